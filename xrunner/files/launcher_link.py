"""What a run tells its launcher about output lengths, and the changes that come back.

    observed.json   head -> launcher   (input, output) of the queries done, and of those at work;
                                       how many of those done took longer than the latency's bound
    adjust.json     launcher -> head   control variables from the next phase on

(How long their steps take, all ranks say in what they tell of themselves: xrunner.files.beat.)

The runner never imports the planner: it says what it sees, and obeys. Both files are replaced
whole, so that a reader sees one state of them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.system.whole_file import write_atomically
from xrunner.comm import exchange as wire
from xrunner.query import FinishedQuery
from xrunner.rules.changes import Changeable, Changes, ChangesByShape, changes_of_shape


class Kept(NamedTuple):
    """Of this run's queries, from `first` on: how many are done with an answer, how many of these
    took longer than the bound on latency, and how many failed."""

    first: int
    done: int
    over: int
    failed: int = 0


OBSERVED_FILE, ADJUST_FILE = "observed.json", "adjust.json"
_INTERVAL_S = 0.5  # between states written, and between looks for a change
_LEAST_KEPT = 2000  # of the latest queries; a few times those at work, where they are more
_ROUNDS_KEPT = 4

LengthsSoFar = dict[int, tuple[int, int]]  # query -> (input tokens, output tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOrder:
    """What holds from the next phase on. `revision` counts from 1."""

    revision: int
    controls: Changes | ChangesByShape

    def save(self, output: Path) -> None:
        write_atomically(output / ADJUST_FILE, wire.to_bytes(self, ChangeOrder).decode() + "\n",
                         is_durable=False)


def load_change_order(output: Path) -> ChangeOrder | None:
    """The last order that the launcher gave; None before it has given one."""
    try:
        order: ChangeOrder = wire.from_bytes((output / ADJUST_FILE).read_bytes(), ChangeOrder)
    except FileNotFoundError:
        return None
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """One state of observed.json, by query. Of the queries before `first` only the active are in
    it: the long ones, which tell nothing without the others. `kept`: of all that this run has
    done; None where it does not say."""

    first: int
    finished: LengthsSoFar
    active: LengthsSoFar
    kept: Kept | None = None


def read_observed(output: Path) -> ObservedState | None:
    """The last state that the run wrote; None before it has written one."""
    try:
        raw = json.loads((output / OBSERVED_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    finished, active = ({query: (inputs, outputs) for query, inputs, outputs in raw[key]}
                        for key in ("finished", "active"))
    return ObservedState(first=raw["first"], finished=finished, active=active,
                         kept=Kept(*raw["kept"]) if "kept" in raw else None)


class LauncherLink:
    """Rank 0's end of the link: it keeps what it is told of, and hands changes to the rule."""

    def __init__(self, output: Path, *, first_query: int,
                 at_work: Callable[[], LengthsSoFar] | None = None,
                 rule: Changeable | None = None, limit_s: float = math.inf) -> None:
        """`first_query`: of this run. `at_work`: of the active queries; None where nobody here
        knows them (WAA): then only queries are told of before which, in the order of admission,
        all are done, since of the others just the short ones are. `rule`: what is changed; None:
        nothing is. `limit_s`: what a query's latency is to be at most."""
        self._place: dict[int, int] = {}  # of queries that are not done
        self._num_begun = 0
        self._first_query = first_query
        self._output, self._at_work, self._rule = output, at_work, rule
        self._finished: LengthsSoFar = {}
        self._waiting: LengthsSoFar = {}  # done, but one before them is not
        self._first = self._next = first_query
        self._kept, self._limit_s = Kept(first_query, 0, 0), limit_s
        self._last_s = 0.0
        self.revision = 0  # of the change taken up last
        self.taken: list[dict[str, Any]] = []  # changes, with the phase each holds from

    def begin(self, queries: Sequence[int]) -> None:
        """These are taken up next, after all that it has been told of; the state names queries by
        their places in this order, counted from the run's first, else by their index."""
        for index in queries:
            self._place[index] = self._first_query + self._num_begun
            self._num_begun += 1

    def finished(self, result: FinishedQuery) -> None:
        first, done, over, failed = self._kept
        self._kept = Kept(first, done + 1, over + (result.latency_s > self._limit_s), failed) if (
            result.output_ids) else Kept(first, done, over, failed + 1)
        lengths = len(result.query.input_ids), len(result.output_ids)
        place = self._place.pop(result.query.index, result.query.index)
        if self._at_work is not None:
            self._finished[place] = lengths
            return
        self._waiting[place] = lengths
        while (lengths_of := self._waiting.pop(self._next, None)) is not None:
            self._finished[self._next] = lengths_of
            self._next += 1

    def look(self, elapsed_s: float) -> None:
        """Writes the state and takes up a change, now and then."""
        if elapsed_s - self._last_s < _INTERVAL_S:
            return
        self._last_s = elapsed_s
        active = {} if self._at_work is None else {
            self._place.get(index, index): lengths for index, lengths in self._at_work().items()}
        self._forget(len(active))
        write_atomically(self._output / OBSERVED_FILE, json.dumps({
            "first": self._first, "kept": self._kept, **{
            key: [(query, *lengths) for query, lengths in sorted(state.items())]
            for key, state in (("finished", self._finished), ("active", active))}}) + "\n",
            is_durable=False)
        if self._rule is not None:
            self._take_up(self._rule, elapsed_s)

    def _forget(self, num_active: int) -> None:
        kept = max(_LEAST_KEPT, _ROUNDS_KEPT * num_active)
        if len(self._finished) > 2 * kept:
            self._first = max(self._finished) - kept
            self._finished = {q: n for q, n in self._finished.items() if q >= self._first}

    def _take_up(self, rule: Changeable, elapsed_s: float) -> None:
        order = load_change_order(self._output)
        if order is None or order.revision <= self.revision:
            return
        self.revision, phase = order.revision, rule.next_phase
        rule.change(order.controls, phase=phase)
        if (own := changes_of_shape(order.controls, 0)) is not None:
            self.taken.append({"revision": self.revision, "elapsed_s": elapsed_s, "phase": phase,
                               **asdict(own)})

    def taken_by(self, replica: int, revision: int, phase: int, elapsed_s: float,
                 controls: Changes) -> None:
        """Another replica has taken up a change, in a phase of its own."""
        self.taken.append({"revision": revision, "replica": replica, "elapsed_s": elapsed_s,
                           "phase": phase, **asdict(controls)})
