"""Which configurations a problem admits, evaluated once each, and how large a batch may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xgpt.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.space import TensorPlan
from xsimulator.policies.rra import Rra, RraConfig

Point = tuple[int, int]  # encode_batch, decode_iterations
Key = tuple[int, Point]  # index of the tensor plan, point


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What decides about one configuration."""

    throughput_qps: float
    latency_s: float


class Admission:
    """Evaluates configurations of one problem, remembering each, and tells what forbids one."""

    def __init__(self, problem: Problem, timing: TimingSource, plans: Sequence[TensorPlan], *,
                 padded: bool) -> None:
        self.problem, self.plans = problem, tuple(plans)
        self.rra = Rra(problem, timing, padded=padded)
        self._figures: dict[Key, Figures] = {}
        self._crowding: dict[Key, str | None] = {}

    @property
    def num_evaluated(self) -> int:
        return len(self._figures)

    def config(self, key: Key) -> RraConfig:
        plan = self.plans[key[0]]
        return RraConfig(encode_batch=key[1][0], decode_iterations=key[1][1],
                         tp_degree=plan.tp_degree, tp_gpus=plan.tp_gpus,
                         decode_micro_batches=self.problem.fixed.decode_micro_batches)

    def evaluate(self, wanted: Iterable[Key]) -> None:
        """Make the figures of these known, all at once."""
        new = sorted(set(wanted) - self._figures.keys())
        if not new:
            return
        arrays = self.rra.evaluate([self.config(key) for key in new])
        for row, key in enumerate(new):
            self._figures[key] = Figures(throughput_qps=float(arrays.throughput_qps[row]),
                                         latency_s=float(arrays.latency_s[row]))
            self._note_room(key, arrays.memory_bytes[row], arrays.present[row],
                            arrays.stretch[row])

    def figures(self, key: Key) -> Figures:
        self.evaluate([key])
        return self._figures[key]

    def crowding(self, key: Key) -> str | None:
        """"memory", "number of queries" or "measured range" if the configuration holds more than
        there is room for, than there are, or than the timing source answers for; else None.
        Needs no timeline."""
        if key not in self._crowding:
            room = self.rra.room([self.config(key)])
            self._note_room(key, room.memory_bytes[0], room.present[0], room.stretch[0])
        return self._crowding[key]

    def forbidden(self, key: Key, latency_bound_s: float, tolerance: float = 0.0) -> str | None:
        """The constraint a configuration violates, latency by more than `tolerance`, or None."""
        crowded = self.crowding(key)
        if crowded is None and not math.isinf(latency_bound_s):
            limit_s = latency_bound_s * (1 + tolerance)
            return "latency" if self.figures(key).latency_s > limit_s else None
        return crowded

    def _note_room(self, key: Key, memory_bytes: float, present: float, stretch: float) -> None:
        most = self.problem.num_queries or math.inf
        self._crowding[key] = ("memory" if memory_bytes > self.rra.capacity_bytes else
                               "number of queries" if present > most + 1e-9 else
                               "measured range" if stretch > REFUSED_BEYOND else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The largest admissible batch of one (plan, decode_iterations). `outer` allows the latency a
    tolerance: no larger batch is admissible. None: not even the smallest batch is."""

    strict: int | None
    outer: int | None


class Frontiers:
    """Finds frontiers by bisection, many at once: memory, presence and latency grow with the
    batch."""

    def __init__(self, admission: Admission, latency_bound_s: float, *,
                 latency_tolerance: float) -> None:
        self._admission = admission
        self._bound_s, self._tolerance = latency_bound_s, latency_tolerance
        self._known: dict[tuple[int, int], Frontier] = {}

    def find(self, wanted: Sequence[tuple[int, int]], smallest: int, largest: int) -> None:
        """Make the frontiers of these (plan, decode_iterations) known, in a range of batches."""
        new = sorted(set(wanted) - self._known.keys())
        roomy = {line: self.roomy(line, smallest, largest) for line in new}
        outer = self._bisect(roomy, smallest, self._tolerance)
        strict = self._bisect(outer, smallest, 0.0)
        for line in new:
            self._known[line] = Frontier(strict=strict[line], outer=outer[line])

    def of(self, line: tuple[int, int]) -> Frontier:
        return self._known[line]

    def roomy(self, line: tuple[int, int], smallest: int, largest: int) -> int | None:
        """Largest batch there is room for."""
        def has_room(batch: int) -> bool:
            return self._admission.crowding((line[0], (batch, line[1]))) is None

        if not has_room(smallest):
            return None
        low, step = smallest, 1  # the range is open to very large batches: gallop, then bisect
        while low + step <= largest and has_room(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, largest + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if has_room(middle) else (low, middle)
        return low

    def _bisect(self, tops: dict[tuple[int, int], int | None], smallest: int,
                tolerance: float) -> dict[tuple[int, int], int | None]:
        """Largest batch up to `tops` whose latency is admissible. Tries the top first, then a
        little below: it is often not latency that binds, or a frontier is near that one."""
        found: dict[tuple[int, int], int | None] = dict(tops)
        if math.isinf(self._bound_s):
            return found
        # invariant: the answer is in [low, high); low = smallest - 1 stands for none
        spans = {line: (smallest - 1, top + 1) for line, top in tops.items() if top is not None}
        guesses = {line: [math.floor(top * 0.98), top] for line, top in tops.items() if top}
        while open_lines := [line for line, (low, high) in spans.items() if high - low > 1]:
            tried = {line: _next_try(*spans[line], guesses[line]) for line in open_lines}
            self._admission.evaluate([(line[0], (batch, line[1])) for line, batch in tried.items()])
            for line, batch in tried.items():
                low, high = spans[line]
                key = (line[0], (batch, line[1]))
                is_admissible = self._admission.forbidden(key, self._bound_s, tolerance) is None
                spans[line] = (batch, high) if is_admissible else (low, batch)
        found.update({line: low if low >= smallest else None for line, (low, _) in spans.items()})
        return found


def _next_try(low: int, high: int, guesses: list[int]) -> int:
    """Strictly between: a guess while there is one, then the geometric middle (latency acts in
    ratios)."""
    while guesses:
        guess = guesses.pop()
        if low < guess < high:
            return guess
    return min(max(math.isqrt(max(low, 1) * high), low + 1), high - 1)
