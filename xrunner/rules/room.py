"""Room: the account of one group's KV tokens, by which requests are admitted and evicted. Free of
torch, and without a clock: it counts decode steps.

All requests at work grow by one token in a decode step. So a request holds base + s tokens, where s
counts the group's steps, and `base` is constant. By its forecast it ends at step `end`. Load only
grows between two ends. Just before the q-th end (requests in the order of their ends, n in all) it
is

    sum of the bases from q on + (n - q) x end_q.

Each rule looks at these loads with the new request among them. Here p is its input, o its forecast,
M the budget, c the tokens held and r the tokens to come of those at work.

Greedy asks that sum c + p + 1 <= M. Reserve-static asks that p + o <= M - sum c - sum r.

Reserve-dynamic asks that the load at the first end of those at work is at most M. Future-peak asks
this of the load at every end. Reserve asks it of the sum of input + most output tokens.

Sources: greedy, vLLM (SOSP '23); the two of reserve-*, TetriInfer (section 3.4); future-peak,
LightLLM's scheduler and Aladdin's condition (e)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xgpt.core.controls import Admission, AdmissionRule
from xrunner.rules.forecast import Forecaster
from xrunner.rules.prefixes import SharedPrefixes, Unshared
from xrunner.rules.steps import KvBudget


class Waiting(NamedTuple):
    """A request that waits. `reserve`: most KV tokens that it may need. `tokens`: to encode, its
    input and `written` output tokens of an evicted one. `forecast`: its output tokens as forecast
    beforehand; 0: the room's forecaster is asked. `has_begun`: it was evicted. `shared`: tokens of
    its input in a shared prefix, which none of the others count."""

    query: int
    reserve: int
    tokens: int
    written: int = 0
    forecast: int = 0
    has_begun: bool = False
    shared: int = 0

    @property
    def own_tokens(self) -> int:
        """Tokens of its input that no other request shares."""
        return self.tokens - self.written

    @property
    def input_tokens(self) -> int:
        return self.own_tokens + self.shared

    @property
    def cap(self) -> int:
        """Most output tokens."""
        return self.reserve - self.own_tokens


class Caps:
    """The forecaster that knows each request's own limit alone."""

    def first(self, input_tokens: int, cap: int) -> int:
        return cap

    def beyond(self, input_tokens: int, written: int, cap: int) -> int:
        return cap

    def ended(self, input_tokens: int, written: int) -> None:
        pass


class End(NamedTuple):
    """When a request at work ends by its forecast, in steps, and its base."""

    step: int
    base: int
    query: int


@dataclass(slots=True)
class _AtWork:
    """A request at work: as it was admitted, with its remaining tokens `left` by the forecast.
    `base` and `end` are meaningful once it decodes."""

    waiting: Waiting
    left: int
    base: int = 0
    end: int = 0
    decodes: bool = False


def peak(ends: Sequence[End]) -> int:
    """The largest load, in tokens, at any of `ends`, which are in order; 0 without any."""
    most = bases = 0
    for count, end in enumerate(reversed(ends), start=1):
        bases += end.base
        most = max(most, bases + count * end.step)
    return most


def _in_units(unit: int, tokens: int) -> int:
    """`tokens`, rounded up to whole multiples of `unit`."""
    return -(-tokens // unit) * unit


class Room:
    """Tokens and requests of one group. Requests are admitted, decode from a later step on, and
    finish or are evicted."""

    def __init__(self, tokens: int, admission: Admission | None = None, *,
                 otherwise: AdmissionRule = "reserve", unit: int = 1, spare: int = 1) -> None:
        """`tokens`: the budget M. `admission`: its rule None means `otherwise`. `unit`: tokens are
        held in whole multiples of it (paged KV). `spare`: units that greedy keeps free, unless
        nobody is at work."""
        admission = admission or Admission()
        self.rule: AdmissionRule = admission.rule or otherwise
        self.tokens, self.unit, self.spare = tokens, unit, spare
        self.after_free, self.evicts = admission.after_free, (
            self.rule == "greedy" or admission.may_overflow)
        self.forecaster: Forecaster = Caps()
        self.at_work: dict[int, _AtWork] = {}  # by request, the latest admitted last
        self.held = 0  # tokens in whole units; by the rule `reserve`, the reserved ones
        self.num_decoding = 0
        self._steps = 0  # decode steps so far
        self._starting: list[int] = [0] * unit  # decoding requests by base modulo `unit`
        self._ends: list[End] = []  # of decoding requests, in order
        self._whole = 0  # tokens of those that do not decode yet, with all they may write
        self._is_planned = self.rule not in ("reserve", "greedy")

    @property
    def grown(self) -> int:
        """Tokens held after the next decode step, unless they were reserved."""
        return self.held + self._starting[-self._steps % self.unit] * self.unit

    @property
    def is_over(self) -> bool:
        """Whether the next decode step would exceed the budget of a rule that evicts."""
        return self.evicts and self.grown > self.tokens

    def fits(self, budget: int) -> bool:
        """Tells whether those at work keep within a budget of so many tokens, by their
        forecasts."""
        if not self._is_planned:
            return self.held <= budget
        return self._whole + len(self.at_work) * (self.unit - 1) + peak(self._ends) <= budget

    def has_room(self, new: Waiting, *, decodes: bool = True, budget: int | None = None) -> bool:
        """Tells whether a request may join those at work; without any, it may. `decodes`: from the
        next decode step on; else it counts with all it may write at every end. `budget`: another
        than the room's, which even a request alone must keep."""
        most = self.tokens if budget is None else budget
        if not self.at_work:
            least = new.tokens if self.rule == "greedy" else new.reserve
            return budget is None or _in_units(self.unit, least) <= budget
        if self.rule == "reserve":
            return self.held + _in_units(self.unit, new.reserve) <= most
        if self.held + _in_units(self.unit, new.tokens) + self.spare * self.unit > most:
            return False
        if self.rule == "greedy":
            return True
        self._look_again()
        left, rounding = self._left(new), self.unit - 1
        whole = self._whole + len(self.at_work) * rounding + new.tokens + rounding
        if self.rule == "reserve-static" or not decodes:
            whole += left
        if self.rule == "reserve-static":
            return whole + sum(end.base + end.step for end in self._ends) <= most
        if self.rule == "reserve-dynamic":
            first = self._ends[0].step if self._ends else self._steps
            load = sum(end.base + first for end in self._ends[self.after_free:])
            return whole + load + min(left, first - self._steps) * decodes <= most
        if not decodes:
            return whole + peak(self._ends) <= most
        ends, own = self._ends.copy(), End(self._steps + left, new.tokens - self._steps, new.query)
        ends.insert(bisect_left(ends, own), own)
        return whole - new.tokens + peak(ends) <= most

    def admit(self, new: Waiting, *, decodes: bool = True) -> None:
        """Admits a request; `decodes` as of `has_room`, or `begin` says it later."""
        self.at_work[new.query] = one = _AtWork(new, self._left(new) if self._is_planned else 0)
        self.held += _in_units(self.unit, new.reserve if self.rule == "reserve" else new.tokens)
        self._whole += new.tokens + one.left
        if decodes:
            self.begin(new.query)

    def begin(self, query: int) -> None:
        """Lets an admitted request grow with the next decode step."""
        one, steps = self.at_work[query], self._steps
        self._whole -= one.waiting.tokens + one.left
        one.base, one.end, one.decodes = one.waiting.tokens - steps, steps + one.left, True
        self.num_decoding += 1
        self._starting[one.base % self.unit] += 1
        if self._is_planned:
            insort(self._ends, End(one.end, one.base, query))

    def advance(self) -> None:
        """Lets every decoding request grow by one token."""
        if self.rule != "reserve":
            self.held = self.grown
        self._steps += 1

    def advance_to(self, step: int) -> None:
        """Lets every decoding request grow until `step` decode steps have been."""
        while self._steps < step:
            self.advance()

    def finish(self, query: int) -> Waiting:
        """Removes a request that has its last token; returns it as it was admitted."""
        one = self._remove(query)
        self.forecaster.ended(one.waiting.input_tokens, self._written(one))
        return one.waiting

    def evict(self) -> Waiting:
        """Removes the latest admitted request; returns it with its tokens to encode again."""
        one = self._remove(next(reversed(self.at_work)))
        new = one.waiting._replace(has_begun=True)
        if not one.decodes:
            return new
        written = self._written(one)  # its latest token is not in the cache yet
        return new._replace(tokens=new.own_tokens + written, written=written)

    def _remove(self, query: int) -> _AtWork:
        one = self.at_work.pop(query)
        tokens = one.waiting.tokens
        if one.decodes:
            tokens = one.base + self._steps
            self.num_decoding -= 1
            self._starting[one.base % self.unit] -= 1
            if self._is_planned:
                del self._ends[bisect_left(self._ends, End(one.end, one.base, query))]
        else:
            self._whole -= tokens + one.left
        self.held -= _in_units(self.unit, one.waiting.reserve if self.rule == "reserve" else tokens)
        return one

    def _written(self, one: _AtWork) -> int:
        return one.base + self._steps - one.waiting.own_tokens + 1

    def _left(self, new: Waiting) -> int:
        """Tokens that the request is to write, by its forecast."""
        total = new.forecast or self.forecaster.first(new.input_tokens, new.cap)
        if new.written >= total:
            total = self.forecaster.beyond(new.input_tokens, new.written, new.cap)
        return max(min(total, new.cap) - new.written, 1)

    def _look_again(self) -> None:
        """Forecasts anew the requests that have written more than forecast."""
        while self._ends and self._ends[0].step <= self._steps:
            one = self.at_work[self._ends.pop(0).query]
            new, written = one.waiting, self._written(one)
            total = max(self.forecaster.beyond(new.input_tokens, written, new.cap), written + 1)
            one.end = new.own_tokens + total - one.base
            insort(self._ends, End(one.end, one.base, new.query))


class Rooms:
    """The rooms of a pool's groups, and which one each request at work is in. Living prefixes count
    once, in equal parts of all groups' budgets."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self.of_group = rooms
        self.room_of: dict[int, Room] = {}
        self.prefixes: SharedPrefixes | Unshared = Unshared()
        self._tokens = len(rooms) * rooms[0].tokens  # of all groups and prefixes

    @classmethod
    def even(cls, num_groups: int, tokens: int, admission: Admission | None = None) -> Rooms:
        """Rooms of equal budgets, `tokens` in all."""
        return cls([Room(tokens // num_groups, admission) for _ in range(num_groups)])

    @property
    def held(self) -> int:
        """Number of KV tokens held over all groups."""
        return sum(room.held for room in self.of_group) + self.prefixes.tokens

    @property
    def evicts(self) -> bool:
        """Whether requests that have begun may be evicted."""
        return self.of_group[0].evicts

    @property
    def budget(self) -> KvBudget:
        """The KV budget of a group; of all groups together if they share prefixes."""
        is_shared = self.prefixes.is_shared
        return KvBudget(self._tokens if is_shared else self.of_group[0].tokens,
                        self.of_group[0].unit, is_shared, self.prefixes.most_within(self._tokens))

    def resize(self, group_tokens: int) -> None:
        """Gives each group a budget of so many tokens."""
        self._tokens = group_tokens * len(self.of_group)
        self._set_budgets()

    def submit(self, new: Waiting, waiting: deque[Waiting]) -> bool:
        """Appends a request to `waiting` if a group has room for it when nobody else is at work
        there. Returns whether it did. What it shares is taken from its tokens."""
        unit, most = self.of_group[0].unit, max(new.reserve, new.tokens)

        def fits(shared: int) -> bool:
            return _in_units(unit, most - shared) <= self._budget(shared)

        shared = self.prefixes.shared(new.query, fits)
        if not fits(shared):
            return False
        if shared:
            new = new._replace(reserve=new.reserve - shared, tokens=new.tokens - shared,
                               shared=shared)
        self.prefixes.submit(new.query)
        waiting.append(new)
        return True

    @property
    def forecaster(self) -> Forecaster:
        """Forecasts output tokens, for all groups."""
        return self.of_group[0].forecaster

    @forecaster.setter
    def forecaster(self, forecaster: Forecaster) -> None:
        for room in self.of_group:
            room.forecaster = forecaster

    def admit(self, group: int, new: Waiting, most: float = math.inf, *,
              decodes: bool = True) -> bool:
        """Admits a request if its group has room, and fewer than `most` requests. Returns whether
        it did. With shared prefixes, idle ones go if that helps."""
        room, prefixes = self.of_group[group], self.prefixes
        if len(room.at_work) >= most:
            return False
        if prefixes.is_shared:
            def fits(tokens: int) -> bool:
                budget = self._budget(tokens)
                return room.has_room(new, decodes=decodes, budget=budget) and (
                    tokens <= prefixes.tokens
                    or all(one is room or one.fits(budget) for one in self.of_group))

            if not prefixes.make_room(new.query, fits):
                return False
            prefixes.admit(new.query)
            self._set_budgets()
        elif not room.has_room(new, decodes=decodes):
            return False
        room.admit(new, decodes=decodes)
        self.room_of[new.query] = room
        return True

    def to_encode(self, *waiting: Waiting) -> int:
        """Number of tokens that these encode together, none of which has begun."""
        return sum([new.tokens for new in waiting]) + self.prefixes.to_encode(
            [new.query for new in waiting])

    def make_room(self, group: int, waiting: deque[Waiting]) -> tuple[int, ...]:
        """Evicts until the group's requests can grow by a token. The evicted go to the front of
        `waiting`; returns them, the latest admitted first. Idle prefixes go before any request."""
        room, prefixes, evicted = self.of_group[group], self.prefixes, list[int]()
        # a request has room for all that it may write if no other is in its memory
        others = self.room_of if prefixes.is_shared else room.at_work
        while room.is_over:
            if prefixes.let_go():
                self._set_budgets()
            elif room.at_work and len(others) > 1:  # none: other groups' prefixes exceed the budget
                new = room.evict()
                del self.room_of[new.query]
                waiting.appendleft(new)
                evicted.append(new.query)
                prefixes.evict(new.query)
                self._set_budgets()
            else:
                break
        return tuple(evicted)

    def finish(self, query: int) -> Waiting:
        """Removes a request that has its last token; returns it as it was admitted."""
        if self.prefixes.is_shared:
            self.prefixes.finish(query)
            self._set_budgets()
        return self.room_of.pop(query).finish(query)

    def _budget(self, prefix_tokens: int) -> int:
        """Tokens of each group beside prefixes of so many, in whole units."""
        unit = self.of_group[0].unit
        return (self._tokens - prefix_tokens) // len(self.of_group) // unit * unit

    def _set_budgets(self) -> None:
        budget = self._budget(self.prefixes.tokens)
        for room in self.of_group:
            room.tokens = budget
