"""Batching rules over paged KV: prefill-first (vLLM's of 2023), Sarathi (chunked prefill), mixed
batching (Orca with paged KV) and LightLLM's.

Sources: vLLM, SOSP '23; Sarathi-Serve, OSDI '24; for the other two Vidur, MLSys '24. KV lies in
blocks that are allocated as a request grows; nothing is reserved for its output. If a group needs
more blocks than are free, the latest admitted request is evicted. It waits first in line to be
encoded again: its input and its output so far. Groups are as in xrunner.rules.iteration.

LightLLM's blocks have one token, and it admits by the rule future-peak, with a token to spare. So
nobody is evicted whose output is known."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

from xgpt.core.controls import Admission, ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.chunks import PartialInput, whole_input
from xrunner.rules.iteration import ContinuousRule
from xrunner.rules.room import Room, Rooms, Waiting
from xrunner.rules.steps import Chunk, Step, StepKind, kind_of

BLOCK_TOKENS = 16  # vLLM's default
WATERMARK = 0.01  # vLLM's default: share of blocks that admission keeps free


# how a group encodes: whole inputs in steps of their own, whole inputs beside decoding, or chunks
Encoding = Literal["alone", "beside", "chunks"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)


class PagedRule(ContinuousRule):
    """Continuous batching over groups of KV blocks."""

    def __init__(self, *, encoding: Encoding, num_groups: int, max_active: int, kv_tokens: int,
                 token_budget: int, admission: Admission | None = None,
                 light_steps: int = 0) -> None:
        """`kv_tokens`: KV budget over all groups. `light_steps`: LightLLM's decode steps between
        two steps that encode, while any request decodes; 0: another policy."""
        assert token_budget >= 1, f"{token_budget = }"
        tokens = kv_tokens // num_groups
        blocks = tokens // BLOCK_TOKENS
        super().__init__(Rooms([
            Room(tokens - 1, admission, otherwise="future-peak") if light_steps else
            Room(blocks * BLOCK_TOKENS, admission, otherwise="greedy", unit=BLOCK_TOKENS,
                 spare=int(WATERMARK * blocks)) for _ in range(num_groups)]), max_active,
            token_budget)
        self.encoding, self.light_steps = encoding, light_steps
        self.partial: list[PartialInput | None] = [None] * num_groups  # inputs begun, by group
        self.decoded = [0] * num_groups  # steps since a group last tried to encode

    def decide(self) -> Step | None:
        return _DECIDES[self.encoding](self, self.turns.group)

    def admitted(self, index: int) -> Waiting | None:
        """The first waiting request, if the group has admitted it. It holds the blocks of its whole
        input from now on; chunked, it decodes when the last is encoded."""
        if not self.waiting or not self.rooms.admit(index, self.waiting[0], self.slots[index],
                                                    decodes=self.encoding != "chunks"):
            return None
        return self.waiting.popleft()

    def make_room(self, index: int) -> tuple[int, ...]:
        """Evicts until every request left can grow by a token; returns the evicted. They include a
        partly encoded request, which starts at its first chunk again."""
        evicted, partial = self.rooms.make_room(index, self.waiting), self.partial[index]
        if partial is not None and partial.query in evicted:
            self.partial[index] = None
        return evicted


def _whole_inputs(rule: PagedRule, index: int, left: int, *,
                  is_alone: bool) -> tuple[list[int], list[Chunk]]:
    """Admits waiting requests whose inputs have `left` tokens together. Returns them, and chunks as
    of `whole_input`. is_alone: nothing is decoded beside them."""
    rooms, joined, chunks = rule.rooms, list[int](), list[Chunk]()
    while rule.waiting:
        tokens = rooms.to_encode(rule.waiting[0])
        # an input longer than the budget is encoded alone: eviction makes inputs longer
        if tokens > left and (joined or not is_alone) or (new := rule.admitted(index)) is None:
            break
        left -= tokens
        joined.append(new.query)
        chunks += whole_input(new, rooms.prefixes)
    return joined, chunks


def _encode_or_decode(rule: PagedRule, index: int) -> Step | None:
    """An ENCODE step if a waiting request has room, else a DECODE step of all that run. An ENCODE
    step takes as many requests as the token budget holds."""
    rooms, joined, chunks = rule.rooms, list[int](), list[Chunk]()
    room = rooms.of_group[index]
    if not room.num_decoding or rule.decoded[index] >= rule.light_steps:
        rule.decoded[index] = 0
        joined, chunks = _whole_inputs(rule, index, rule.token_budget, is_alone=True)
    number = rule.turns.end()
    if joined:
        starts, released = rooms.prefixes.end_step()
        return Step(kind=StepKind.ENCODE, group=index, phase=number, iteration=0,
                    joined=tuple(joined), chunks=tuple(chunks), starts=starts, released=released)
    if not room.num_decoding:
        return None
    rule.decoded[index] += 1
    evicted = rule.make_room(index)
    room.advance()
    _, released = rooms.prefixes.end_step()
    return Step(kind=StepKind.DECODE, group=index, phase=number, iteration=1, evicted=evicted,
                released=released)


def _decode_and_encode(rule: PagedRule, index: int) -> Step | None:
    """A step of at most the budget's tokens: one per running request, the rest whole inputs or
    chunks."""
    room, number, joined, chunks = (
        rule.rooms.of_group[index], rule.turns.end(), list[int](), list[Chunk]())
    evicted = rule.make_room(index)
    left = rule.token_budget - room.num_decoding
    is_decode = room.num_decoding > 0
    if is_decode:
        room.advance()
    if rule.encoding == "chunks":
        joined, chunks = _chunks(rule, index, left, begins=not evicted)
    elif not evicted:
        joined, chunks = _whole_inputs(rule, index, left, is_alone=not is_decode)
    encoded = chunks or joined
    if not is_decode and not encoded:
        return None
    starts, released = rule.rooms.prefixes.end_step()
    return Step(kind=kind_of(is_decode, encoded), group=index, phase=number,
                iteration=int(is_decode), joined=tuple(joined), chunks=tuple(chunks),
                evicted=evicted, starts=starts, released=released)


def _chunks(rule: PagedRule, index: int, left: int, *,
            begins: bool) -> tuple[list[int], list[Chunk]]:
    """Requests whose input ends with a step of `left` input tokens, and the step's chunks. begins:
    whether it may begin an input."""
    chunks, joined, part = list[Chunk](), list[int](), rule.partial[index]
    while left > 0:
        if part is None:
            new = rule.admitted(index) if begins else None
            if new is None:
                break
            part = PartialInput.of(new, rule.rooms.prefixes)
        chunk, part = part.next(left)
        chunks.append(rule.rooms.prefixes.encode(chunk))
        left -= chunk.tokens
        if part.is_whole:
            rule.rooms.of_group[index].begin(part.query)
            joined.append(part.query)
            part = None
    rule.partial[index] = part
    return joined, chunks


_DECIDES: Mapping[Encoding, Callable[[PagedRule, int], Step | None]] = {
    "alone": _encode_or_decode, "beside": _decode_and_encode, "chunks": _decode_and_encode}
LIGHT_STEPS = 10  # LightLLM's default: decode steps between two that encode

vllm = partial(PagedRule, encoding="alone")
lightllm = partial(PagedRule, encoding="alone", light_steps=LIGHT_STEPS)


def _within_budget(encoding: Encoding, *, num_groups: int, max_active: int, kv_tokens: int,
                   token_budget: int, admission: Admission | None = None) -> PagedRule:
    """A rule whose steps decode beside encoding; arguments as of `PagedRule`."""
    # each running request adds a token to a step, so no more can run than a step has tokens
    return PagedRule(encoding=encoding, num_groups=num_groups, kv_tokens=kv_tokens,
                     max_active=min(max_active, num_groups * token_budget),
                     token_budget=token_budget, admission=admission)


sarathi, mixed = partial(_within_budget, "chunks"), partial(_within_budget, "beside")


def _rule(make: Callable[..., PagedRule], estimate: Estimate) -> PagedRule:
    """The rule that executes `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    assert controls.token_budget is not None, f"{controls = }"
    return make(num_groups=deployment.num_groups, max_active=controls.max_active,
                kv_tokens=deployment.kv_tokens, token_budget=controls.token_budget,
                admission=controls.admission)


vllm_rule, sarathi_rule = partial(_rule, vllm), partial(_rule, sarathi)
mixed_rule, lightllm_rule = partial(_rule, mixed), partial(_rule, lightllm)
