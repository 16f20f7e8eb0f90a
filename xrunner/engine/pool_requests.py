"""The requests of one pool as its head knows them: waiting, active in a slot, and their output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.comm.messages import Joined, StartMessage, StepMessage
from xrunner.engine.group import FED_BACK
from xrunner.ops.sampling import NOT_FINITE
from xrunner.query import FinishedQuery, PreparedQuery, TokenLikelihood
from xrunner.rules.slots import Departures, GroupSlots, Seat, SlotUse, Span
from xrunner.rules.steps import BatchingRule, Start, Step, StepKind, kv_budget

_NO_NUMBERS = ("logits not finite: the model computes no number here, or one beyond its type's "
               "range")
_NO_TOKEN = "no token may come next: the answer's form allows none here, or " + _NO_NUMBERS
_RECENT_TOKENS = 32  # chosen, a power of two: most recent tokens searched for a stop string
# Characters that decoding from the middle of a text may change: a space or part of a character at
# the cut, and a character at the end whose last bytes are to come.
_CUT_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Sizes that caches are made for: number of requests, and tokens of the longest ones."""

    queries: int
    longest_input: int
    longest_output: int
    longest: int


class PoolRequests:
    """Turns the rule's decisions into messages, and keeps account of the slots."""

    def __init__(self, slot_use: SlotUse, start_token: int | None, *,
                 feeds_back: bool = False) -> None:
        """`start_token`: see Vocabulary. `feeds_back`: the executor keeps last tokens
        (FED_BACK)."""
        self.active: dict[int, ActiveQuery] = {}  # active, or done within an unfinished batch
        self.ended_elsewhere: list[int] = []  # in the encode pool, after their KV was sent here
        self._use, self._start_token, self._feeds_back = slot_use, start_token, feeds_back
        self.on_begin: Callable[[Sequence[int]], None] | None = None  # called as requests begin
        self.extent: Extent | None = None  # set if requests come while the pool runs
        self.in_blocks = False  # KV lies in blocks if the rule reserves tokens
        self.is_shared = False  # all groups share the blocks
        self._new: dict[int, PreparedQuery] = {}
        self._begun: dict[int, ActiveQuery] = {}  # waiting: evicted, or from another pool
        self._freed: list[Seat] = []  # of finished requests, to be reported to stages
        self._in_part: set[int] = set()  # active, partly encoded
        self._slots: defaultdict[int, GroupSlots[int]] = defaultdict(GroupSlots)  # by group
        self._departures = Departures(slot_use)

    @property
    def has_work(self) -> bool:
        """Whether a request is not done."""
        return bool(self._new or self._begun or self.active)

    def add(self, query: PreparedQuery | ActiveQuery) -> None:
        """Adds a waiting request."""
        if isinstance(query, ActiveQuery):
            self._begun[query.query.index] = query
        else:
            self._new[query.index] = query

    def remove(self, indices: Sequence[int]) -> list[PreparedQuery]:
        """Removes waiting requests and returns them."""
        return [self._new.pop(index) for index in indices]

    def abandon(self) -> tuple[list[int], list[int]]:
        """Forgets all requests; returns (those that had begun, those that had not), by index."""
        begun, new = [*self.active, *self._begun], [*self._new]
        for own in (self.active, self._begun, self._new, self._freed, self._in_part, self._slots,
                    self.ended_elsewhere):
            own.clear()
        self._departures = Departures(self._use)
        return begun, new

    @property
    def longest_input(self) -> int:
        """Number of tokens of the longest input that waits, or may come."""
        return (self.extent or _extent_of(self._new.values())).longest_input

    def start_message(self, rule: BatchingRule) -> StartMessage:
        """Cache sizes for working all waiting requests by `rule`. A group gets no more slots than
        there are requests, so a short job's caches stay small."""
        extent = self.extent or _extent_of(self._new.values())
        inputs, outputs = extent.longest_input, extent.longest_output
        capacity, encoded = extent.longest, 0
        if self._start_token is not None:
            capacity, encoded = outputs, inputs
        if rule.slot_use is SlotUse.KEPT:
            # a row grows with its batch's longest output, and one superfluous step
            capacity = outputs + 1 + (0 if encoded else inputs)
        return StartMessage(num_groups=rule.num_groups, capacity=capacity,
                            slots=min(rule.group_max_active, max(extent.queries, 1)),
                            encoded_capacity=encoded, budget=kv_budget(
                                rule, in_blocks=self.in_blocks))

    @property
    def num_waiting(self) -> int:
        """Number of requests whose prefill has not begun."""
        return len(self._new)

    def compose(self, step: Step, now: float) -> tuple[StepMessage, Tensor, list[ActiveQuery]]:
        """A step's message, its input tokens, and the requests that it yields a token for. Input
        tokens are those of decoding requests [n], then the encoded ones [T]. Requests are in the
        order in which their tokens return."""
        slots, kind = self._slots[step.group], step.kind
        # (request, first token, tokens) encoded; without chunks whole inputs
        spans = [(c.query, c.first, c.tokens) for c in step.chunks]
        begun = ([query for query, *_ in spans if query not in self.active] if spans
                 else list(step.joined))
        starts = {start.query: start for start in step.starts}
        if begun and self.on_begin is not None:
            self.on_begin(begun)
        joined = (*(self._join(index, now, is_handed=True) for index in step.handed),
                  *(self._join(index, now, starts.get(index)) for index in begun))
        entering = [*step.handed, *begun]
        if kind is not StepKind.DECODE and not spans:
            spans = [(new.query, 0, new.input_tokens) for new in joined]
        removed, replaced = slots.seat(entering, is_reused=self._use is SlotUse.REUSED)
        self._departures.join(len(entering))
        seats, in_part = slots.seats, self._in_part
        resting = tuple(slot for slot, index in enumerate(seats)
                        if index in in_part) if in_part else ()
        fed: list[int] = []
        if kind is StepKind.DECODE and not resting:
            fed = list(seats)
        elif kind is not StepKind.ENCODE:
            gone = in_part.union(begun) if kind is StepKind.MIXED else in_part
            fed = [index for index in seats if index not in gone]
        ids = [self._last_token(self.active[index]) for index in fed]
        for query, first, tokens in spans:
            ids += self.active[query].tokens(first, first + tokens)
        message = StepMessage(
            kind=kind, group=step.group, phase=step.phase, iteration=step.iteration,
            removed=removed, replaced=replaced, joined=joined, resting=resting,
            ended=tuple(self.ended_elsewhere), released=step.released,
            freed=tuple(seat for seat in self._freed if seat.group != step.group),
            spans=self._seated(step, spans, seats) if self._use is SlotUse.REUSED else ())
        self.ended_elsewhere.clear()
        self._freed.clear()
        given = [self.active[index] for index in (
            fed if kind is StepKind.DECODE else [*fed, *step.joined])]
        if kind is not StepKind.ENCODE or self._start_token is None:
            for active in given:
                active.is_fed_back = self._feeds_back
        return message, torch.tensor(ids), given

    def finish(self, group: int, done: Sequence[int]) -> list[ActiveQuery]:
        """Records requests of `group` that have their last tokens; returns those with results
        due."""
        due = self._departures.finish(done)
        if self.is_shared:
            seats = self._slots[group].seats
            self._freed += [Seat(group, seats.index(index)) for index in due]
        if self._use is not SlotUse.KEPT:
            self._slots[group].vacate(due)
        elif due:  # a whole batch, so every group
            for slots in self._slots.values():
                slots.vacate(slots.seats)
        return [self.active.pop(index) for index in due]

    def evict(self, group: int, evicted: Sequence[int]) -> list[ActiveQuery]:
        """Puts begun requests back in line, before the step of `group` that evicts them. Returns
        the rest of their static batch: requests with results due."""
        for index in evicted:
            self._in_part.discard(index)
            self._begun[index] = self.active.pop(index)
            assert not self._begun[index].num_promised, f"{index = } is evicted without its tokens"
            self._departures.leave()
        is_batch = self._use is SlotUse.KEPT
        for slots in self._slots.values() if is_batch else (self._slots[group],):
            slots.vacate(evicted)
        return self.finish(group, ())

    def hand_off(self, group: int) -> list[ActiveQuery]:
        """Removes all unfinished requests of `group` and returns them."""
        slots = self._slots[group]
        leaving = [self.active.pop(index) for index in slots.seats if index in self.active]
        slots.vacate(slots.seats)
        self._departures.leave(len(leaving))
        return leaving

    def _join(self, index: int, now: float, start: Start | None = None, *,
              is_handed: bool = False) -> Joined:
        active = self._begun.pop(index, None)
        if active is None:
            query = self._new.pop(index)
            active = ActiveQuery(query, now, len(query.input_ids))
        self.active[index] = active
        # encoding starts with all tokens generated; a request from another pool has only its input
        tokens = active.input_tokens if is_handed else active.num_tokens
        sampling = active.query.sampling
        if sampling.needs_history and active.output_ids:  # evicted before, or from another pool
            written = tuple(active.output_ids)
            sampling = replace(sampling, history=(*sampling.history, *written), written=written)
        return Joined(query=index, input_tokens=tokens, sampling=sampling, is_handed=is_handed,
                      start=start,
                      goes_on=self._start_token is not None or active.query.max_new_tokens > 1)

    def _last_token(self, active: ActiveQuery) -> int:
        if active.is_fed_back:
            return FED_BACK
        if active.output_ids:
            return active.output_ids[-1]
        assert self._start_token is not None, f"{active.query.index = } has no first token"
        return self._start_token

    def _seated(self, step: Step, spans: Sequence[tuple[int, int, int]],
                seats: Sequence[int]) -> tuple[Span, ...]:
        """Spans to encode, by slot."""
        seated = []
        for query, first, tokens in spans:
            is_last = query in step.joined
            seated.append(Span(seats.index(query), first, tokens, is_last))
            (self._in_part.discard if is_last else self._in_part.add)(query)
        return tuple(seated)


def lengths_so_far(requests: PoolRequests) -> dict[int, tuple[int, int]]:
    """(input, output) tokens of each active request, by index."""
    return {index: (active.input_tokens, active.num_outputs)
            for index, active in requests.active.items()}


def _extent_of(queries: Collection[PreparedQuery]) -> Extent:
    return Extent(queries=len(queries),
                  longest_input=max((len(query.input_ids) for query in queries), default=1),
                  longest_output=max((query.max_new_tokens for query in queries), default=1),
                  longest=max((query.reserve_tokens for query in queries), default=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Meaning of a model's tokens. `eos_ids`: tokens that end a text. `decode_text`: tokens to
    text. `start_token`: first decoder input of an encoder-decoder model (None: decoder-only)."""

    eos_ids: frozenset[int]
    decode_text: Callable[[Sequence[int]], str]
    start_token: int | None = None


class Ending(NamedTuple):
    """How a request ended. `text`: None for the text of all its tokens."""

    reason: str  # "stop" | "length" | "error"
    text: str | None
    error: str | None = None  # why its output is incomplete


def _no_text(cause: Exception) -> str:
    return f"the tokenizer cannot decode the answer's tokens: {type(cause).__name__}: {cause}"


@dataclass(slots=True, eq=False)
class ActiveQuery:
    """A request in flight, owned by the head. `ending` is set with its last token."""

    query: PreparedQuery  # without input tokens if it comes from another pool
    encode_start_s: float
    input_tokens: int
    first_token_s: float | None = None
    output_ids: list[int] = field(default_factory=list)
    likelihoods: tuple[TokenLikelihood, ...] = ()  # of its output, or of scored targets
    embedding: tuple[float, ...] = ()  # where asked for
    ending: Ending | None = None
    num_promised: int = 0  # tokens counted before they are known
    has_left: bool = False  # all its tokens are counted: done for the rule
    is_fed_back: bool = False  # its last token stays where its next step runs
    _recent: int = 0  # first token whose text may contain the end of a stop string

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its input and of its output so far."""
        return self.input_tokens + self.num_outputs

    @property
    def num_outputs(self) -> int:
        return len(self.output_ids) + self.num_promised

    def ends_by_count(self, vocabulary: Vocabulary) -> bool:
        """Whether its length is fixed beforehand, whichever tokens come. Only a token that is not
        finite may end it earlier; the head may learn that a step late."""
        query = self.query
        return (query.is_forced or not vocabulary.eos_ids) and not (
            query.stop or query.sampling.pooled)

    @property
    def is_at_work(self) -> bool:
        """Whether uncounted tokens are to come."""
        return self.ending is None and not self.has_left

    def promise(self) -> bool:
        """Counts a token before it is known; returns whether it is the last."""
        self.num_promised += 1
        self.has_left = self.num_outputs >= self.query.max_new_tokens
        return self.has_left

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Tokens first .. end - 1 of its input followed by its output."""
        ids = self.query.input_ids
        return ids[first:end] if end <= len(ids) else [*ids, *self.output_ids][first:end]

    def take(self, token: int, now: float, vocabulary: Vocabulary) -> bool:
        """Adds one sampled token; returns whether it was the last."""
        self.num_promised = max(self.num_promised - 1, 0)
        if self.first_token_s is None:
            self.first_token_s = now
        if token == NOT_FINITE:
            # its row may be decoded on until the head hears of it, which takes a token
            self.output_ids.append(0)
            self.ending = Ending("error", None, _NO_TOKEN if self.query.sampling.passed
                                 else _NO_NUMBERS)
            return True
        query, reason = self.query, None
        self.output_ids.append(token)
        if query.sampling.pooled:  # an embedding's token has no meaning
            self.ending = Ending("stop", "")
            return True
        is_full = len(self.output_ids) >= query.max_new_tokens
        # a fixed end-of-sequence at the last position was not chosen by the model
        before = self.input_tokens if vocabulary.start_token is None else 1
        is_given = is_full and query.sampling.fixed_at(
            before + query.max_new_tokens - 1) is not None
        if token in vocabulary.eos_ids and not query.is_forced and not is_given:
            reason = "stop"
        elif is_full:
            reason = "length"
        try:
            text = self._stopped_text(vocabulary.decode_text) if query.stop else None
        except Exception as cause:  # by a tokenizer: other requests must not suffer
            self.ending = Ending("error", "", _no_text(cause))
            return True
        if text is not None:
            reason = "stop"
        if reason is not None:
            self.ending = Ending(reason, text)
        return reason is not None

    def finished(self, now: float, decode_text: Callable[[Sequence[int]], str]) -> FinishedQuery:
        """Its result, given out at `now`."""
        assert self.ending is not None, f"{self.query.index = } is not done"
        assert self.first_token_s is not None, "who has ended has a token"
        reason, text, error = self.ending
        ids = self.output_ids[:-1] if error in (_NO_NUMBERS, _NO_TOKEN) else self.output_ids
        if text is None:
            try:
                text = decode_text(ids)
            except Exception as cause:
                reason, text, error = "error", "", _no_text(cause)
        return FinishedQuery(query=self.query, output_ids=tuple(ids), likelihoods=self.likelihoods,
                             embedding=self.embedding,
                             finish_reason=reason, encode_start_s=self.encode_start_s,
                             first_token_s=self.first_token_s, last_token_s=now, error=error,
                             text=text, arrival_s=self.query.arrival_s)

    def _stopped_text(self, decode_text: Callable[[Sequence[int]], str]) -> str | None:
        """The text before the first stop string, once one has appeared; else None. Call it after
        every token: only the last tokens of a long output are decoded."""
        recent = decode_text(self.output_ids[self._recent:])
        if not any(stop in recent for stop in self.query.stop):
            self._forget(decode_text)
            return None
        text = decode_text(self.output_ids)
        ends = [at for stop in self.query.stop if (at := text.find(stop)) >= 0]
        return text[:min(ends)] if ends else None

    def _forget(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        """Moves `_recent` to the middle each time the recent tokens have doubled. The second half's
        text must be longer than any stop string."""
        count = len(self.output_ids) - self._recent
        if count < _RECENT_TOKENS or count & (count - 1):
            return
        middle, reach = self._recent + count // 2, max(map(len, self.query.stop)) + _CUT_CHARACTERS
        if len(decode_text(self.output_ids[middle:])) >= reach:
            self._recent = middle
