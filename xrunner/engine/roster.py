"""The queries of one pool as its head knows them: who waits, who is at work and in which slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from xrunner.engine.query import ActiveQuery
from xrunner.query import PreparedQuery
from xrunner.rules.slots import Departures, GroupSlots, SlotUse, Span
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xrunner.transport.messages import Joined, StartMessage, StepMessage


class Roster:
    """Turns what the rule decides into the message of a step, and keeps the account of slots."""

    def __init__(self, slot_use: SlotUse, start_token: int | None) -> None:
        """`start_token`: see Vocabulary."""
        self.active: dict[int, ActiveQuery] = {}  # at work, or done in a batch that is not
        self.in_vain: list[int] = []  # they ended elsewhere, but their entries were handed over
        self._use, self._start_token = slot_use, start_token
        self._new: dict[int, PreparedQuery] = {}
        self._begun: dict[int, ActiveQuery] = {}  # waiting: evicted, or from another pool
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

    def start_message(self, rule: BatchingRule, spare_bytes: int) -> StartMessage:
        """The sizes of caches for a pool that works all waiting queries by `rule`, to their end."""
        waiting = self._new.values()
        inputs = max((len(query.input_ids) for query in waiting), default=1)
        outputs = max((query.max_new_tokens for query in waiting), default=1)
        capacity, encoded = max((query.reserve_tokens for query in waiting), default=1), 0
        if self._start_token is not None:
            capacity, encoded = outputs, inputs
        if rule.slot_use is SlotUse.KEPT:
            # a row grows with the longest output of its batch, and by one superfluous step
            capacity = outputs + 1 + (0 if encoded else inputs)
        return StartMessage(num_groups=rule.num_groups, capacity=capacity,
                            slots=rule.group_max_active, encoded_capacity=encoded,
                            spare_bytes=spare_bytes)

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that waits."""
        return max((len(query.input_ids) for query in self._new.values()), default=1)

    def compose(self, step: Step, now: float) -> tuple[StepMessage, Tensor, list[int]]:
        """The step's header; its input tokens, of those who decode [n], then of what is encoded
        [T]; and the queries that it gives a token, in the order in which these come back."""
        slots, kind = self._slots[step.group], step.kind
        self._evict(step.evicted, slots)
        # (query, first token, tokens) of what is encoded; where it is not said, whole inputs are
        spans = [(c.query, c.first, c.tokens) for c in step.chunks]
        entering = ([query for query, first, _ in spans if first == 0] if spans
                    else list(step.joined))
        joined = tuple(self._join(index, now, kind) for index in entering)
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
            gone = in_part.union(entering) if kind is StepKind.MIXED else in_part
            fed = [index for index in seats if index not in gone]
        ids = [self._last_token(self.active[index]) for index in fed]
        for query, first, tokens in spans:
            ids += self.active[query].tokens(first, first + tokens)
        message = StepMessage(
            kind=kind, group=step.group, phase=step.phase, iteration=step.iteration,
            removed=removed, replaced=replaced, joined=joined, resting=resting,
            ended=tuple(self.in_vain),
            spans=self._seated(step, spans, seats) if self._use is SlotUse.REUSED else ())
        self.in_vain.clear()
        return message, torch.tensor(ids), fed if kind is StepKind.DECODE else [*fed, *step.joined]

    def finish(self, group: int, done: Sequence[int]) -> list[ActiveQuery]:
        """These queries of `group` have their last tokens. Returns those whose results are due."""
        due = self._departures.finish(done)
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

    def _evict(self, evicted: Sequence[int], slots: GroupSlots[int]) -> None:
        for index in evicted:
            self._in_part.discard(index)
            self._begun[index] = self.active.pop(index)
            self._departures.leave()
        slots.vacate(evicted)

    def _join(self, index: int, now: float, kind: StepKind) -> Joined:
        active = self._begun.pop(index, None) or ActiveQuery(self._new.pop(index), now)
        self.active[index] = active
        # who is encoded, is so with all it has generated; who was elsewhere brings its input
        tokens = active.input_tokens if kind is StepKind.DECODE else active.num_tokens
        return Joined(query=index, input_tokens=tokens, sampling=active.query.sampling,
                      goes_on=self._start_token is not None or active.query.max_new_tokens > 1)

    def _last_token(self, active: ActiveQuery) -> int:
        if active.output_ids:
            return active.output_ids[-1]
        assert self._start_token is not None, f"{active.query.index = } has no first token"
        return self._start_token

    def _seated(self, step: Step, spans: Sequence[tuple[int, int, int]],
                seats: Sequence[int]) -> tuple[Span, ...]:
        """What is encoded, slot by slot."""
        seated = []
        for query, first, tokens in spans:
            is_last = query in step.joined
            seated.append(Span(seats.index(query), first, tokens, is_last))
            (self._in_part.discard if is_last else self._in_part.add)(query)
        return tuple(seated)
