"""The queries of one pool as its head knows them: who waits, who is at work and in which slot, and
what has become of each so far."""

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
from xrunner.rules.steps import BatchingRule, Step, StepKind, kv_budget

_NO_NUMBERS = ("logits not finite: the model gives no number here, or one beyond what its type "
               "holds")
_RECENT_TOKENS = 32  # a power of two: a stop string is looked for in so many at least
# What decoding from the middle of a text may change: a space at the cut, part of a character there;
# and at the end a character whose last bytes are still to come.
_CUT_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What caches are sized by: how many queries there may be, the tokens of their longest input,
    the most of an output, and the most of both together."""

    queries: int
    longest_input: int
    longest_output: int
    longest: int


class Roster:
    """Turns what the rule decides into the message of a step, and keeps the account of slots."""

    def __init__(self, slot_use: SlotUse, start_token: int | None, *,
                 feeds_back: bool = False) -> None:
        """`start_token`: see Vocabulary. `feeds_back`: who executes the steps keeps the last token
        of each query that has a slot (FED_BACK)."""
        self.active: dict[int, ActiveQuery] = {}  # at work, or done in a batch that is not
        self.in_vain: list[int] = []  # they ended elsewhere, but their entries were handed over
        self._use, self._start_token, self._feeds_back = slot_use, start_token, feeds_back
        self.on_begin: Callable[[Sequence[int]], None] | None = None  # told whose work begins
        self.extent: Extent | None = None  # where not all queries wait here from the beginning
        self.in_blocks = False  # entries that the rule reserves tokens for lie in blocks
        self.is_shared = False  # all groups take of the same blocks
        self._new: dict[int, PreparedQuery] = {}
        self._begun: dict[int, ActiveQuery] = {}  # waiting: evicted, or from another pool
        self._freed: list[Seat] = []  # by queries that are done, not told as yet
        self._in_part: set[int] = set()  # active, their inputs encoded in part
        self._slots: defaultdict[int, GroupSlots[int]] = defaultdict(GroupSlots)  # by group
        self._departures = Departures(slot_use)

    @property
    def has_work(self) -> bool:
        """Whether a query is not done."""
        return bool(self._new or self._begun or self.active)

    def add(self, query: PreparedQuery | ActiveQuery) -> None:
        """A query that waits from now on."""
        if isinstance(query, ActiveQuery):
            self._begun[query.query.index] = query
        else:
            self._new[query.index] = query

    def remove(self, indices: Sequence[int]) -> None:
        """These queries, which wait, are not the pool's any more."""
        for index in indices:
            del self._new[index]

    def start_message(self, rule: BatchingRule) -> StartMessage:
        """The sizes of caches for a pool that works all waiting queries by `rule`, to their end. A
        group gets no more slots than there are queries: a short job's caches would be mostly
        empty."""
        extent = self.extent or _extent_of(self._new.values())
        inputs, outputs = extent.longest_input, extent.longest_output
        capacity, encoded = extent.longest, 0
        if self._start_token is not None:
            capacity, encoded = outputs, inputs
        if rule.slot_use is SlotUse.KEPT:
            # a row grows with the longest output of its batch, and by one superfluous step
            capacity = outputs + 1 + (0 if encoded else inputs)
        return StartMessage(num_groups=rule.num_groups, capacity=capacity,
                            slots=min(rule.group_max_active, max(extent.queries, 1)),
                            encoded_capacity=encoded, budget=kv_budget(
                                rule, in_blocks=self.in_blocks))

    @property
    def num_waiting(self) -> int:
        """Queries whose encoding has not begun."""
        return len(self._new)

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that waits, or may come."""
        return (self.extent or _extent_of(self._new.values())).longest_input

    def compose(self, step: Step, now: float) -> tuple[StepMessage, Tensor, list[ActiveQuery]]:
        """The step's header; its input tokens, of those who decode [n], then of what is encoded
        [T]; and the queries that it gives a token, in the order in which these come back."""
        slots, kind = self._slots[step.group], step.kind
        self._evict(step.evicted, slots)
        # (query, first token, tokens) of what is encoded; where it is not said, whole inputs are
        spans = [(c.query, c.first, c.tokens) for c in step.chunks]
        begun = ([query for query, first, _ in spans if first == 0] if spans
                 else list(step.joined))
        if begun and self.on_begin is not None:
            self.on_begin(begun)
        joined = (*(self._join(index, now, is_handed=True) for index in step.handed),
                  *(self._join(index, now) for index in begun))
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
            ended=tuple(self.in_vain),
            freed=tuple(seat for seat in self._freed if seat.group != step.group),
            spans=self._seated(step, spans, seats) if self._use is SlotUse.REUSED else ())
        self.in_vain.clear()
        self._freed.clear()
        given = [self.active[index] for index in (
            fed if kind is StepKind.DECODE else [*fed, *step.joined])]
        if kind is not StepKind.ENCODE or self._start_token is None:
            for active in given:
                active.is_fed_back = self._feeds_back
        return message, torch.tensor(ids), given

    def finish(self, group: int, done: Sequence[int]) -> list[ActiveQuery]:
        """These queries of `group` have their last tokens. Returns those whose results are due."""
        due = self._departures.finish(done)
        if self.is_shared:
            seats = self._slots[group].seats
            self._freed += [Seat(group, seats.index(index)) for index in due]
        if self._use is not SlotUse.KEPT:
            self._slots[group].vacate(due)
        elif due:  # all of a batch, and so of every group
            for slots in self._slots.values():
                slots.vacate(slots.seats)
        return [self.active.pop(index) for index in due]

    def hand_off(self, group: int) -> list[ActiveQuery]:
        """All queries of `group` that are not done leave the pool."""
        slots = self._slots[group]
        leaving = [self.active.pop(index) for index in slots.seats if index in self.active]
        slots.vacate(slots.seats)
        self._departures.leave(len(leaving))
        return leaving

    def leave_to_another(self, indices: Sequence[int]) -> list[PreparedQuery]:
        """These queries, which wait, are another pool's to encode."""
        if indices and self.on_begin is not None:
            self.on_begin(indices)
        return [self._new.pop(index) for index in indices]

    def _evict(self, evicted: Sequence[int], slots: GroupSlots[int]) -> None:
        for index in evicted:
            self._in_part.discard(index)
            self._begun[index] = self.active.pop(index)
            assert not self._begun[index].num_promised, f"{index = } is evicted without its tokens"
            self._departures.leave()
        slots.vacate(evicted)

    def _join(self, index: int, now: float, *, is_handed: bool = False) -> Joined:
        active = self._begun.pop(index, None)
        if active is None:
            query = self._new.pop(index)
            active = ActiveQuery(query, now, len(query.input_ids))
        self.active[index] = active
        # who is encoded, is so with all it has generated; who was elsewhere brings its input
        tokens = active.input_tokens if is_handed else active.num_tokens
        sampling = active.query.sampling
        if sampling.said and active.output_ids:  # from before it was evicted, or in another pool
            sampling = replace(sampling, said=(*sampling.said, *active.output_ids))
        return Joined(query=index, input_tokens=tokens, sampling=sampling, is_handed=is_handed,
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
        """The spans that are encoded, slot by slot."""
        seated = []
        for query, first, tokens in spans:
            is_last = query in step.joined
            seated.append(Span(seats.index(query), first, tokens, is_last))
            (self._in_part.discard if is_last else self._in_part.add)(query)
        return tuple(seated)


def _extent_of(queries: Collection[PreparedQuery]) -> Extent:
    return Extent(queries=len(queries),
                  longest_input=max((len(query.input_ids) for query in queries), default=1),
                  longest_output=max((query.max_new_tokens for query in queries), default=1),
                  longest=max((query.reserve_tokens for query in queries), default=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a model's tokens mean: which of them end a text, which text they are, and which one an
    encoder-decoder model's decoder is fed first (None for a decoder-only model)."""

    eos_ids: frozenset[int]
    decode_text: Callable[[Sequence[int]], str]
    start_token: int | None = None


class Ending(NamedTuple):
    """How a query ended. `text` None: its text is that of all its tokens."""

    reason: str  # "stop" | "length" | "error"
    text: str | None
    error: str | None = None  # why there is no more of it


def _no_text(cause: Exception) -> str:
    return f"its tokens cannot be made a text: {type(cause).__name__}: {cause}"


@dataclass(slots=True, eq=False)
class ActiveQuery:
    """A query in flight, owned by the head. `ending` is set with its last token."""

    query: PreparedQuery  # from another pool it comes without its input's tokens
    encode_start_s: float
    input_tokens: int
    first_token_s: float | None = None
    output_ids: list[int] = field(default_factory=list)
    likelihoods: tuple[TokenLikelihood, ...] = ()  # of them, or of what is scored
    embedding: tuple[float, ...] = ()  # where it is asked for
    ending: Ending | None = None
    num_promised: int = 0  # tokens that steps give it, counted before they are known
    has_left: bool = False  # all are counted: the rule takes it for done
    is_fed_back: bool = False  # its last token lies where its next step is executed
    _recent: int = 0  # a stop string that has not appeared ends behind this many tokens' text

    @property
    def num_tokens(self) -> int:
        """Tokens of its input, and of its output so far."""
        return self.input_tokens + self.num_outputs

    @property
    def num_outputs(self) -> int:
        return len(self.output_ids) + self.num_promised

    def ends_by_count(self, vocabulary: Vocabulary) -> bool:
        """Whether it goes on to its last token whichever come before. (But for tokens that are
        none, of which the head may hear a step later.)"""
        query = self.query
        return (query.is_forced or not vocabulary.eos_ids) and not (
            query.stop or query.sampling.pooled)

    @property
    def is_at_work(self) -> bool:
        """Whether there are tokens to come that nobody has counted."""
        return self.ending is None and not self.has_left

    def promise(self) -> bool:
        """Counts a token that is to come; whether it is the last."""
        self.num_promised += 1
        self.has_left = self.num_outputs >= self.query.max_new_tokens
        return self.has_left

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Tokens first .. end - 1 of its input and, behind that, its output so far."""
        ids = self.query.input_ids
        return ids[first:end] if end <= len(ids) else [*ids, *self.output_ids][first:end]

    def take(self, token: int, now: float, vocabulary: Vocabulary) -> bool:
        """Takes up one sampled token; whether it was the last."""
        self.num_promised = max(self.num_promised - 1, 0)
        if self.first_token_s is None:
            self.first_token_s = now
        if token == NOT_FINITE:
            # its row may be decoded on until the head hears of it, and needs a token for that
            self.output_ids.append(0)
            self.ending = Ending("error", None, _NO_NUMBERS)
            return True
        query, reason = self.query, None
        self.output_ids.append(token)
        if query.sampling.pooled:  # the token stands for the end of the step, and says nothing
            self.ending = Ending("stop", "")
            return True
        is_full = len(self.output_ids) >= query.max_new_tokens
        # an end that is given where there is no more room is none that the model chose
        before = self.input_tokens if vocabulary.start_token is None else 1
        is_given = is_full and query.sampling.fixed_at(
            before + query.max_new_tokens - 1) is not None
        if token in vocabulary.eos_ids and not query.is_forced and not is_given:
            reason = "stop"
        elif is_full:
            reason = "length"
        try:
            text = self._stopped_text(vocabulary.decode_text) if query.stop else None
        except Exception as cause:  # a tokenizer's: no other query is to suffer for it
            self.ending = Ending("error", "", _no_text(cause))
            return True
        if text is not None:
            reason = "stop"
        if reason is not None:
            self.ending = Ending(reason, text)
        return reason is not None

    def finished(self, now: float, decode_text: Callable[[Sequence[int]], str]) -> FinishedQuery:
        """Its result, given out `now`."""
        assert self.ending is not None, f"{self.query.index = } is not done"
        assert self.first_token_s is not None, "who has ended has a token"
        reason, text, error = self.ending
        ids = self.output_ids[:-1] if error == _NO_NUMBERS else self.output_ids
        if text is None:
            try:
                text = decode_text(ids)
            except Exception as cause:
                reason, text, error = "error", "", _no_text(cause)
        return FinishedQuery(query=self.query, output_ids=tuple(ids), likelihoods=self.likelihoods,
                             embedding=self.embedding,
                             finish_reason=reason, encode_start_s=self.encode_start_s,
                             first_token_s=self.first_token_s, last_token_s=now, error=error,
                             text=text)

    def _stopped_text(self, decode_text: Callable[[Sequence[int]], str]) -> str | None:
        """The text up to the first stop string, once one has appeared. To be asked after every
        token: of a long output only the last tokens are decoded each time."""
        recent = decode_text(self.output_ids[self._recent:])
        if not any(stop in recent for stop in self.query.stop):
            self._forget(decode_text)
            return None
        text = decode_text(self.output_ids)
        ends = [at for stop in self.query.stop if (at := text.find(stop)) >= 0]
        return text[:min(ends)] if ends else None

    def _forget(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        """Half of the recent tokens, as often as they have doubled, if the other half's text is
        longer than any stop string."""
        count = len(self.output_ids) - self._recent
        if count < _RECENT_TOKENS or count & (count - 1):
            return
        middle, reach = self._recent + count // 2, max(map(len, self.query.stop)) + _CUT_CHARACTERS
        if len(decode_text(self.output_ids[middle:])) >= reach:
            self._recent = middle
