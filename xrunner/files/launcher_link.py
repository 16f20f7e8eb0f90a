"""Observed lengths, from a run to its launcher, and changed settings in return.

    observed.json   head -> launcher   (input, output) tokens of finished and active requests;
                                       how many exceeded the latency limit
    adjust.json     launcher -> head   settings from the next phase on

Step times travel in heartbeats (xrunner.files.heartbeat). The runner never imports the planner: it
reports, and applies changes. Both files are replaced whole, so readers see one state."""

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


class LatencyCounts(NamedTuple):
    """Counts of this run's requests from index `first` on. `done`: finished with an answer. `over`:
    of these, slower than the latency limit. `failed`: without an answer."""

    first: int
    done: int
    over: int
    failed: int = 0


OBSERVED_FILE, ADJUST_FILE = "observed.json", "adjust.json"
_INTERVAL_S = 0.5  # chosen: seconds between states written, and between checks for a change
_LEAST_KEPT = 2000  # chosen: latest requests kept, or _ROUNDS_KEPT times the active ones if more
_ROUNDS_KEPT = 4

LengthsSoFar = dict[int, tuple[int, int]]  # request -> (input tokens, output tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOrder:
    """New settings from the next phase on. `revision` counts from 1."""

    revision: int
    controls: Changes | ChangesByShape

    def save(self, output: Path) -> None:
        write_atomically(output / ADJUST_FILE, wire.to_bytes(self, ChangeOrder).decode() + "\n",
                         is_durable=False)


def load_change_order(output: Path) -> ChangeOrder | None:
    """The launcher's last order; None before the first."""
    try:
        order: ChangeOrder = wire.from_bytes((output / ADJUST_FILE).read_bytes(), ChangeOrder)
    except FileNotFoundError:
        return None
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """Lengths by request, as observed.json holds them. Of requests before `first` only active ones
    are in it: long ones, which would mislead alone. `kept`: counts of all finished requests (None:
    unknown)."""

    first: int
    finished: LengthsSoFar
    active: LengthsSoFar
    kept: LatencyCounts | None = None


def read_observed(output: Path) -> ObservedState | None:
    """The last state that the run wrote; None before the first."""
    try:
        raw = json.loads((output / OBSERVED_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    finished, active = ({query: (inputs, outputs) for query, inputs, outputs in raw[key]}
                        for key in ("finished", "active"))
    return ObservedState(first=raw["first"], finished=finished, active=active,
                         kept=LatencyCounts(*raw["kept"]) if "kept" in raw else None)


class LauncherLink:
    """Rank 0's end of the link: writes lengths, and applies changes to the rule."""

    def __init__(self, output: Path, *, first_query: int,
                 at_work: Callable[[], LengthsSoFar] | None = None,
                 rule: Changeable | None = None, limit_s: float = math.inf) -> None:
        """`first_query`: the run's first request. `rule`: applies changes (None: there are none).

        `at_work`: lengths of active requests. None if unknown (WAA): a finished request is then
        reported only when all admitted before it are done, since the others so far are short ones.
        `limit_s`: latency limit in seconds."""
        self._place: dict[int, int] = {}  # of unfinished requests, in order of admission
        self._num_begun = 0
        self._first_query = first_query
        self._output, self._at_work, self._rule = output, at_work, rule
        self._finished: LengthsSoFar = {}
        self._waiting: LengthsSoFar = {}  # done, but an earlier one is not
        self._first = self._next = first_query
        self._kept, self._limit_s = LatencyCounts(first_query, 0, 0), limit_s
        self._last_s = 0.0
        self.revision = 0  # of the last change applied
        self.changes: list[dict[str, Any]] = []  # changes, with the first phase of each

    def begin(self, queries: Sequence[int]) -> None:
        """Records requests that begin next. States count them in this order from the run's first.
        Those that begin again keep their places."""
        for index in queries:
            if index in self._place:
                continue
            self._place[index] = self._first_query + self._num_begun
            self._num_begun += 1

    def finished(self, result: FinishedQuery) -> None:
        first, done, over, failed = self._kept
        is_over = result.latency_s > self._limit_s
        self._kept = LatencyCounts(first, done + 1, over + is_over, failed) if (
            result.output_ids) else LatencyCounts(first, done, over, failed + 1)
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
        """Writes the state and applies a change, if the last time is long enough ago."""
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
            self.changes.append({"revision": self.revision, "elapsed_s": elapsed_s, "phase": phase,
                                 **asdict(own)})

    def note_change(self, replica: int, revision: int, phase: int, elapsed_s: float,
                    controls: Changes) -> None:
        """Records that another replica applies a change from its own `phase` on."""
        self.changes.append({"revision": revision, "replica": replica, "elapsed_s": elapsed_s,
                             "phase": phase, **asdict(controls)})
