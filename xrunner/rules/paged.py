"""Batching rules over paged KV: prefill-first (vLLM's of 2023) and Sarathi (chunked prefill).

Sources: vLLM, SOSP '23; Sarathi-Serve, OSDI '24. KV lies in blocks that are allocated as a request
grows; nothing is reserved for its output. If a group needs more blocks than are free, the latest
admitted request is evicted. It waits first in line to be encoded again: its input and its output so
far. Groups are as in xrunner.rules.iteration."""

from collections.abc import Callable
from functools import partial

from xgpt.core.controls import Admission, ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.chunks import PartialInput, whole_input
from xrunner.rules.iteration import ContinuousRule
from xrunner.rules.room import Room, Rooms, Waiting
from xrunner.rules.steps import Chunk, Step, StepKind, kind_of

BLOCK_TOKENS = 16  # vLLM's default
WATERMARK = 0.01  # vLLM's default: share of blocks that admission keeps free


class PagedRule(ContinuousRule):
    """Continuous batching over groups of KV blocks. Sarathi encodes inputs in chunks beside
    decoding (`is_chunked`), prefill-first encodes them whole in steps of their own."""

    def __init__(self, *, is_chunked: bool, num_groups: int, max_active: int, kv_tokens: int,
                 token_budget: int, admission: Admission | None = None) -> None:
        """`kv_tokens`: KV budget over all groups."""
        assert token_budget >= 1, f"{token_budget = }"
        blocks = kv_tokens // num_groups // BLOCK_TOKENS
        super().__init__(Rooms([Room(
            blocks * BLOCK_TOKENS, admission, otherwise="greedy", unit=BLOCK_TOKENS,
            spare=int(WATERMARK * blocks)) for _ in range(num_groups)]), max_active, token_budget)
        self.is_chunked = is_chunked
        self.partial: list[PartialInput | None] = [None] * num_groups  # inputs begun, by group

    def decide(self) -> Step | None:
        decided = _decode_and_chunks if self.is_chunked else _encode_or_decode
        return decided(self, self.turns.group)

    def admitted(self, index: int) -> Waiting | None:
        """The first waiting request, if the group has admitted it. It holds the blocks of its whole
        input from now on; chunked, it decodes when the last is encoded."""
        if not self.waiting or not self.rooms.admit(index, self.waiting[0], self.slots[index],
                                                    decodes=not self.is_chunked):
            return None
        return self.waiting.popleft()

    def make_room(self, index: int) -> tuple[int, ...]:
        """Evicts until every request left can grow by a token; returns the evicted. They include a
        partly encoded request, which starts at its first chunk again."""
        evicted, partial = self.rooms.make_room(index, self.waiting), self.partial[index]
        if partial is not None and partial.query in evicted:
            self.partial[index] = None
        return evicted


def _encode_or_decode(rule: PagedRule, index: int) -> Step | None:
    """An ENCODE step if a waiting request has room, else a DECODE step of all that run. An ENCODE
    step takes as many requests as the token budget holds."""
    rooms, left, joined, chunks = rule.rooms, rule.token_budget, list[int](), list[Chunk]()
    room = rooms.of_group[index]
    while rule.waiting:
        tokens = rooms.to_encode(rule.waiting[0])
        # an input longer than the budget is encoded alone: eviction makes inputs longer
        if (joined and tokens > left) or (new := rule.admitted(index)) is None:
            break
        left -= tokens
        joined.append(new.query)
        chunks += whole_input(new, rooms.prefixes)
    number = rule.turns.end()
    if joined:
        starts, released = rooms.prefixes.end_step()
        return Step(kind=StepKind.ENCODE, group=index, phase=number, iteration=0,
                    joined=tuple(joined), chunks=tuple(chunks), starts=starts, released=released)
    if not room.num_decoding:
        return None
    evicted = rule.make_room(index)
    room.advance()
    _, released = rooms.prefixes.end_step()
    return Step(kind=StepKind.DECODE, group=index, phase=number, iteration=1, evicted=evicted,
                released=released)


def _decode_and_chunks(rule: PagedRule, index: int) -> Step | None:
    """A step of at most the budget's tokens: one per running request, the rest input chunks."""
    room, number = rule.rooms.of_group[index], rule.turns.end()
    evicted = rule.make_room(index)
    left = rule.token_budget - room.num_decoding
    is_decode = room.num_decoding > 0
    if is_decode:
        room.advance()
    chunks, joined, part = list[Chunk](), list[int](), rule.partial[index]
    while left > 0:
        if part is None:
            new = None if evicted else rule.admitted(index)
            if new is None:
                break
            part = PartialInput.of(new, rule.rooms.prefixes)
        chunk, part = part.next(left)
        chunks.append(rule.rooms.prefixes.encode(chunk))
        left -= chunk.tokens
        if part.is_whole:
            room.begin(part.query)
            joined.append(part.query)
            part = None
    rule.partial[index] = part
    if not is_decode and not chunks:
        return None
    starts, released = rule.rooms.prefixes.end_step()
    return Step(kind=kind_of(is_decode, chunks), group=index, phase=number,
                iteration=int(is_decode), joined=tuple(joined), chunks=tuple(chunks),
                evicted=evicted, starts=starts, released=released)


vllm = partial(PagedRule, is_chunked=False)


def sarathi(*, num_groups: int, max_active: int, kv_tokens: int, token_budget: int,
            admission: Admission | None = None) -> PagedRule:
    """A Sarathi rule; arguments as of `PagedRule`."""
    # each running request adds a token to a step, so no more can run than a step has tokens
    return PagedRule(is_chunked=True, num_groups=num_groups, kv_tokens=kv_tokens,
                     max_active=min(max_active, num_groups * token_budget),
                     token_budget=token_budget, admission=admission)


def _rule(make: Callable[..., PagedRule], estimate: Estimate) -> PagedRule:
    """The rule that executes `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    assert controls.token_budget is not None, f"{controls = }"
    return make(num_groups=deployment.num_groups, max_active=controls.max_active,
                kv_tokens=deployment.kv_tokens, token_budget=controls.token_budget,
                admission=controls.admission)


vllm_rule, sarathi_rule = partial(_rule, vllm), partial(_rule, sarathi)
