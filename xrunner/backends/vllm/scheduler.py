"""A scheduler of vLLM that executes the passes it is given. Imported by vLLM, in the interpreter it
is installed in (`scheduler_cls`)."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.scheduler import Scheduler

from xgpt.core.errors import XgptError
from xrunner.backends.vllm.protocol import SharedStart


class StepScheduler(Scheduler):  # type: ignore[misc]  # untyped: vLLM is in no environment of ours
    """Schedules exactly the tokens passed to `want`. The batching rule decides which requests work
    together, and when. Blocks, the persistent batch and the account of tokens stay vLLM's."""

    running: list[Any]  # requests

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wanted: dict[str, int] = {}
        self._starts: dict[str, SharedStart] = {}  # of waiting requests
        self._writers: dict[int, tuple[str, int]] = {}  # of a prefix: (request, prefix's end)
        self._held: dict[int, list[Any]] = {}  # blocks of each prefix that is encoded

    def want(self, tokens: Mapping[str, int]) -> None:
        """Sets the next pass: so many tokens of each of these requests, in this order. All waiting
        requests must be among them."""
        self._wanted = dict(tokens)

    def share(self, name: str, start: SharedStart) -> None:
        """Begins a waiting request behind the tokens that it shares."""
        self._starts[name] = start
        self._writers.update((node, (name, end)) for node, end in start.writes)

    def release(self, nodes: Iterable[int]) -> None:
        """Gives up prefixes. Their blocks are free once no request has them."""
        for node in nodes:
            self._writers.pop(node, None)
            self.kv_cache_manager.block_pool.free_blocks(reversed(self._held.pop(node, [])))

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's schedule, with only the wanted requests running and a budget of their tokens.
        Raises XgptError if vLLM schedules anything else: it lacks blocks, or its version schedules
        otherwise."""
        running = {request.request_id: request for request in self.running}
        self.running = [running[name] for name in self._wanted if name in running]
        self.max_num_scheduled_tokens = sum(self._wanted.values())
        output = super().schedule(throttle_prefills)
        scheduled = dict(output.num_scheduled_tokens)
        if (scheduled != self._wanted or output.preempted_req_ids
                or self._starts.keys() & self._wanted.keys()):  # vLLM did not ask for these blocks
            raise XgptError(
                f"vLLM scheduled {sum(scheduled.values())} tokens of {len(scheduled)} requests "
                f"where {sum(self._wanted.values())} of {len(self._wanted)} were wanted "
                f"({len(output.preempted_req_ids or ())} preempted): it has fewer KV blocks than "
                "the schedule, or is of a version that schedules otherwise")
        self.running += [request for name, request in running.items() if name not in self._wanted]
        self._hold()
        return output

    def _hold(self) -> None:
        """Holds the blocks of prefixes that this pass completes. Without a holder vLLM would reuse
        them once no request has them."""
        for node, (name, end) in list(self._writers.items()):
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens >= end:
                del self._writers[node]
            if request is not None and request.num_computed_tokens >= end:
                self._held[node] = self._blocks(name, end)
                self.kv_cache_manager.block_pool.touch(self._held[node])

    def _blocks(self, name: str, tokens: int) -> list[Any]:
        """Whole blocks of a request's first tokens."""
        return list(self.kv_cache_manager.get_blocks(name).blocks[0][:tokens // self.block_size])

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        """The blocks that the batching rule shares, where vLLM would look for any that fit. Raises
        XgptError if their tokens are not the request's."""
        start = self._starts.pop(request.request_id, None)
        if start is None or not start.first:
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        blocks = self._held.get(start.node) or self._blocks(*self._writers[start.node])
        found = blocks[:start.first // self.block_size]
        hashes = [get_block_hash(block.block_hash) for block in found if block.block_hash]
        if hashes != request.block_hashes[:start.first // self.block_size]:
            raise XgptError(f"vLLM's blocks do not have the {start.first} tokens that a request "
                            "shares: it is of a version that keeps blocks otherwise")
        return self.kv_cache_manager.create_kv_cache_blocks((found,)), start.first, 0, False
