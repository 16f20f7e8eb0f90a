"""Batching rules over paged KV: vLLM (v0's default scheduling) and Sarathi (chunked prefill, as
vLLM V1 does). Sources: vLLM, SOSP '23; Sarathi-Serve, OSDI '24.

KV lies in blocks, allocated as a query grows; nothing is reserved for its output. Where a group's
queries need more blocks than are free, the latest admitted is evicted and waits, first in line, to
be encoded again: its input and what it generated so far. Groups as in xrunner.rules.iteration.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from xgpt.core.controls import ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.iteration import Turns, slot_shares
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Chunk, Step, StepKind

BLOCK_TOKENS = 16
WATERMARK = 0.01  # share of the blocks that admission leaves free, against evictions right after


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, kw_only=True)
class _Partial:
    """A query whose input is encoded in part; it holds the blocks of all its input."""

    query: int
    tokens: int
    done: int = 0


class _PagedGroup:
    """Blocks and queries of one group.

    All running queries grow together, so a query holds base + clock tokens with a fixed base, and
    begins a block at every clock of one residue: counting the queries by residue makes a step's
    need of blocks a look-up.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.running: dict[int, int] = {}  # query -> base, the latest admitted last
        self.partial: _Partial | None = None
        self._clock = 0  # decode steps so far
        self._begins = [0] * BLOCK_TOKENS  # queries by base modulo BLOCK_TOKENS

    @property
    def num_present(self) -> int:
        return len(self.running) + (self.partial is not None)

    @property
    def num_needed(self) -> int:
        """Blocks that the next decode step begins."""
        return self._begins[-self._clock % BLOCK_TOKENS]

    def has_room(self, tokens: int) -> bool:
        """For a new query of so many tokens. An empty group takes any that can fit at all."""
        left = self.free - blocks_of(tokens)
        return left >= (int(WATERMARK * self.num_blocks) if self.num_present else 0)

    def hold(self, tokens: int) -> None:
        self.free -= blocks_of(tokens)
        assert self.free >= 0, f"{self.free = }"

    def release(self, tokens: int) -> None:
        self.free += blocks_of(tokens)
        assert self.free <= self.num_blocks, f"{self.free = } {self.num_blocks = }"

    def join(self, query: int, tokens: int) -> None:
        """A query encoded, whose blocks are held already."""
        base = tokens - self._clock
        self.running[query] = base
        self._begins[base % BLOCK_TOKENS] += 1

    def advance(self) -> None:
        """Every running query grows by one token."""
        self.free -= self.num_needed
        self._clock += 1
        assert self.free >= 0, f"{self.free = }"

    def leave(self, query: int) -> int:
        """Frees a running query's blocks; tokens it held."""
        base = self.running.pop(query)
        self._begins[base % BLOCK_TOKENS] -= 1
        held = base + self._clock
        self.release(held)
        return held

    def evict(self) -> tuple[int, int]:
        """Frees the blocks of the latest admitted: (query, tokens it is to be encoded with)."""
        if self.partial is not None:
            partial, self.partial = self.partial, None
            self.release(partial.tokens)
            return partial.query, partial.tokens
        query = next(reversed(self.running))
        return query, self.leave(query) + 1  # its latest token was not in the cache yet


class _PagedQueue:
    """Waiting queries and groups: what both rules have in common."""

    def __init__(self, *, num_groups: int, max_active: int, kv_tokens: int) -> None:
        self.slots = slot_shares(max_active, num_groups)
        self.group_blocks = kv_tokens // num_groups // BLOCK_TOKENS
        self.groups = [_PagedGroup(self.group_blocks) for _ in range(num_groups)]
        self.waiting: deque[tuple[int, int]] = deque()  # (query, tokens to encode)
        self.group_of: dict[int, _PagedGroup] = {}
        self.turns = Turns(num_groups)

    @property
    def held_tokens(self) -> int:
        return sum(g.num_blocks - g.free for g in self.groups) * BLOCK_TOKENS

    def submit(self, query: int, reserve_tokens: int, input_tokens: int) -> bool:
        if blocks_of(max(reserve_tokens, input_tokens)) > self.group_blocks:
            return False
        self.waiting.append((query, input_tokens))
        return True

    def next_group(self) -> int | None:
        return self.turns.find(lambda g: bool(self.waiting or self.groups[g].num_present))

    def can_admit(self, index: int) -> bool:
        """Whether the first waiting query may join this group now."""
        group = self.groups[index]
        return (bool(self.waiting) and group.num_present < self.slots[index]
                and group.has_room(self.waiting[0][1]))

    def admit(self, group: _PagedGroup) -> tuple[int, int]:
        """The first waiting query gets the blocks of its input: (query, tokens)."""
        query, tokens = self.waiting.popleft()
        group.hold(tokens)
        self.group_of[query] = group
        return query, tokens

    def finish(self, query: int) -> None:
        self.group_of.pop(query).leave(query)

    def make_room(self, group: _PagedGroup) -> tuple[int, ...]:
        """Evicts until every query left can grow by a token. One that was encoded in part is named
        too: its row is free, and it begins at its first chunk again."""
        evicted = []
        while group.num_needed > group.free:
            query, tokens = group.evict()
            del self.group_of[query]
            self.waiting.appendleft((query, tokens))
            evicted.append(query)
        return tuple(evicted)


class VllmRule:
    """ENCODE as soon as a waiting query has room, with as many as `token_budget` holds; else
    DECODE of all that run."""

    needs_tokens = True
    slot_use = SlotUse.REUSED

    def __init__(self, *, num_groups: int, max_active: int, kv_tokens: int,
                 token_budget: int) -> None:
        """`max_active` and `kv_tokens` bound all groups together; `token_budget` one step."""
        assert token_budget >= 1, f"{token_budget = }"
        self.num_groups, self.token_budget = num_groups, token_budget
        self._queue = _PagedQueue(num_groups=num_groups, max_active=max_active,
                                  kv_tokens=kv_tokens)

    @property
    def group_max_active(self) -> int:
        return self._queue.slots[0]

    @property
    def reserved_tokens(self) -> int:
        return self._queue.held_tokens

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        return self._queue.submit(query, reserve_tokens, input_tokens)

    def next_group(self) -> int | None:
        return self._queue.next_group()

    def decide(self) -> Step | None:
        index = self._queue.turns.group
        group = self._queue.groups[index]
        joined = self._encode(index)
        number = self._queue.turns.end()
        if joined:
            return Step(kind=StepKind.ENCODE, group=index, phase=number, iteration=0,
                        joined=joined)
        if not group.running:
            return None
        evicted = self._queue.make_room(group)
        group.advance()
        return Step(kind=StepKind.DECODE, group=index, phase=number, iteration=1, evicted=evicted)

    def finish(self, query: int) -> None:
        self._queue.finish(query)

    def _encode(self, index: int) -> tuple[int, ...]:
        queue, left = self._queue, self.token_budget
        joined: list[int] = []
        while queue.can_admit(index):
            # an input longer than the budget is encoded alone: an evicted query's has grown
            if joined and queue.waiting[0][1] > left:
                break
            query, tokens = queue.admit(queue.groups[index])
            queue.groups[index].join(query, tokens)
            left -= tokens
            joined.append(query)
        return tuple(joined)


class SarathiRule:
    """Every step holds at most `token_budget` tokens: one of each running query, the rest chunks
    of waiting inputs. A query's blocks for all its input are held from its first chunk on."""

    needs_tokens = True
    slot_use = SlotUse.REUSED

    def __init__(self, *, num_groups: int, max_active: int, kv_tokens: int,
                 token_budget: int) -> None:
        """`max_active` and `kv_tokens` bound all groups together; `token_budget` one step."""
        assert token_budget >= 1, f"{token_budget = }"
        self.num_groups, self.token_budget = num_groups, token_budget
        # a step takes every running query along, so no more run than it holds tokens
        self._queue = _PagedQueue(
            num_groups=num_groups, max_active=min(max_active, num_groups * token_budget),
            kv_tokens=kv_tokens)

    @property
    def group_max_active(self) -> int:
        return self._queue.slots[0]

    @property
    def reserved_tokens(self) -> int:
        return self._queue.held_tokens

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        return self._queue.submit(query, reserve_tokens, input_tokens)

    def next_group(self) -> int | None:
        return self._queue.next_group()

    def decide(self) -> Step | None:
        index = self._queue.turns.group
        group = self._queue.groups[index]
        number = self._queue.turns.end()
        may_admit = group.num_needed <= group.free
        evicted = self._queue.make_room(group)
        is_decode = bool(group.running)
        left = self.token_budget - len(group.running)
        if is_decode:
            group.advance()
        chunks, joined = self._encode(index, left, may_admit=may_admit)
        if not is_decode and not chunks:
            return None
        kind = StepKind.ENCODE if not is_decode else StepKind.MIXED if chunks else StepKind.DECODE
        return Step(kind=kind, group=index, phase=number, iteration=int(is_decode),
                    joined=joined, chunks=chunks, evicted=evicted)

    def finish(self, query: int) -> None:
        self._queue.finish(query)

    def _encode(self, index: int, left: int, *,
                may_admit: bool) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        group, chunks, joined = self._queue.groups[index], [], []
        while left > 0:
            if group.partial is None:
                if not (may_admit and self._queue.can_admit(index)):
                    break
                query, tokens = self._queue.admit(group)
                group.partial = _Partial(query=query, tokens=tokens)
            partial = group.partial
            size = min(left, partial.tokens - partial.done)
            chunks.append(Chunk(query=partial.query, first=partial.done, tokens=size))
            partial.done += size
            left -= size
            if partial.done == partial.tokens:
                group.join(partial.query, partial.tokens)
                group.partial = None
                joined.append(partial.query)
        return tuple(chunks), tuple(joined)


def vllm_rule(estimate: Estimate) -> VllmRule:
    """The rule that executes `estimate`."""
    return VllmRule(**_of(estimate))


def sarathi_rule(estimate: Estimate) -> SarathiRule:
    """The rule that executes `estimate`."""
    return SarathiRule(**_of(estimate))


def _of(estimate: Estimate) -> dict[str, int]:
    """What both rules are told."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    assert controls.token_budget is not None, f"{controls = }"
    return {"num_groups": deployment.num_groups, "max_active": controls.max_active,
            "kv_tokens": deployment.kv_tokens, "token_budget": controls.token_budget}
