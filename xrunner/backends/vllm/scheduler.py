"""A scheduler of vLLM that executes the passes it is given. Imported by vLLM, in the interpreter it
is installed in (`scheduler_cls`)."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from xgpt.core.errors import XgptError


class StepScheduler(Scheduler):  # type: ignore[misc]  # untyped: vLLM is in no environment of ours
    """Schedules exactly the tokens passed to `want`. The batching rule decides which requests work
    together, and when. Blocks, the persistent batch and the account of tokens stay vLLM's."""

    running: list[Any]  # requests

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wanted: dict[str, int] = {}

    def want(self, tokens: Mapping[str, int]) -> None:
        """Sets the next pass: so many tokens of each of these requests, in this order. All waiting
        requests must be among them."""
        self._wanted = dict(tokens)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's schedule, with only the wanted requests running and a budget of their tokens.
        Raises XgptError if vLLM schedules anything else: it lacks blocks, or its version schedules
        otherwise."""
        running = {request.request_id: request for request in self.running}
        self.running = [running[name] for name in self._wanted if name in running]
        self.max_num_scheduled_tokens = sum(self._wanted.values())
        output = super().schedule(throttle_prefills)
        scheduled = dict(output.num_scheduled_tokens)
        if scheduled != self._wanted or output.preempted_req_ids:
            raise XgptError(
                f"vLLM scheduled {sum(scheduled.values())} tokens of {len(scheduled)} requests "
                f"where {sum(self._wanted.values())} of {len(self._wanted)} were wanted "
                f"({len(output.preempted_req_ids or ())} preempted): it has fewer KV blocks than "
                "the schedule, or is of a version that schedules otherwise")
        self.running += [request for name, request in running.items() if name not in self._wanted]
        return output
