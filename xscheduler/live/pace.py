"""How long a run's steps take against what they were planned to take.

Each rank tells of its latest steps once a second, in what it tells of itself anyway
(xrunner.io.beat). A step's seconds are divided by what the timing source says of a step of its kind
and size on its stage; of these ratios the median counts, over the latest WINDOW steps of a kind on
a stage. Steps have left the plan where the older and the newer half of a window have, by more than
the threshold, by more than chance, and by more than a step's overhead, of which a source knows
little: one burst of another program's does not, and what has passed does not either.

A pipeline is as quick as its slowest stage, so of several stages the slowest tells for its kind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.retimed import Factor
from xprofiler.timing import TimingSource
from xscheduler.copies import problem_for
from xsimulator.replay.step_clock import StepClock, StepClocks, StepSizes

WINDOW, LEAST_STEPS = 32, 12  # steps of a kind on a stage that count, and without which none do
BEYOND_CHANCE = 3.0  # standard errors of a median by which it must be off
KINDS = ("encode", "decode", "mixed")


class Step(Protocol):
    """A step as a rank tells of it: see xrunner.io.beat.ToldStep."""

    @property
    def kind(self) -> str: ...
    @property
    def queries(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def decoded(self) -> int: ...
    @property
    def context_tokens(self) -> float: ...
    @property
    def longest_context(self) -> int: ...
    @property
    def input_tokens(self) -> float: ...
    @property
    def seconds(self) -> float: ...


class Ratio(NamedTuple):
    """A step's seconds over those it was expected to take."""

    log: float
    rows: int
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceDrift:
    """Where steps have left the plan: by kind, the factor on the timing source's own times that was
    planned with (`before`) and that is seen (`now`), of every kind that steps were seen of;
    `stage` is the slowest of a kind."""

    before: Mapping[str, float]
    now: Mapping[str, Factor]
    stages: Mapping[str, int]
    steps: int  # that all this rests on

    @property
    def slowed(self) -> float:
        """The factor by which the kind that is now off by most has changed."""
        return max((self.now[kind].factor / self.before[kind] for kind in self.now),
                   key=lambda factor: abs(math.log(factor)))

    @property
    def words(self) -> str:
        return ", ".join(f"{kind} {self.before[kind]:.2f} -> {self.now[kind].factor:.2f} times"
                         for kind in KINDS if kind in self.now)


class Ratios:
    """What steps of a run of `estimate` take against `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 longest: int) -> None:
        """longest: tokens that a query ever has at most."""
        self._clocks = StepClocks(problem_for(problem, estimate), timing)
        self._pools, self._longest = estimate.deployment.pools, longest
        self._num_stages = len(estimate.deployment.stages)

    def of(self, stage: int, step: Step) -> Ratio | None:
        """A step on a stage, counted over all replicas; None where the source says nothing."""
        stage %= self._num_stages
        pool = next(pool for pool in self._pools
                    if stage in [own.index for own in pool.stages])
        seconds = expected_s(self._clocks.of(pool.stages, self._longest), step)
        expected = seconds[[own.index for own in pool.stages].index(stage)]
        if not (math.isfinite(expected) and expected > 0 and step.seconds > 0):
            return None
        return Ratio(math.log(step.seconds / expected), step.tokens, expected)


class Pace:
    """Follows the steps of one run of `estimate`, timed by `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 threshold: float, longest: int) -> None:
        """threshold: share by which a kind's steps must be slower or quicker to count. longest:
        tokens that a query ever has at most."""
        self._ratios = Ratios(problem, timing, estimate, longest=longest)
        self._threshold, self._overhead_s = threshold, timing.facts.step_overhead_s
        self._windows: dict[tuple[int, str], deque[Ratio]] = {}
        self._told: dict[int, float] = {}  # rank -> of its state that was taken up last
        self.factors: dict[str, Factor] = {}  # that are planned with

    def hear(self, rank: int, stage: int, told_s: float, steps: Iterable[Step]) -> None:
        """Takes up what a rank of the run's `stage`, counted over all replicas, told at `told_s`;
        nothing where that has been heard already."""
        if told_s <= self._told.get(rank, -math.inf):
            return
        self._told[rank] = told_s
        for step in steps:
            if step.kind in KINDS and (ratio := self._ratios.of(stage, step)) is not None:
                self._windows.setdefault((stage, step.kind), deque(maxlen=WINDOW)).append(ratio)

    def drift(self) -> PaceDrift | None:
        """How steps have left what is planned with; None while they have not."""
        seen = {kind: own for kind in KINDS if (own := self._slowest(kind)) is not None}
        if not any(self._has_left(kind, window) for kind, (_, window) in seen.items()):
            return None
        now = {kind: Factor(rows=float(np.median([ratio.rows for ratio in window])),
                            factor=math.exp(_median(window)))
               for kind, (_, window) in seen.items()}
        return PaceDrift(before={kind: self._planned(kind) for kind in now}, now=now,
                         stages={kind: stage for kind, (stage, _) in seen.items()},
                         steps=sum(len(window) for _, window in seen.values()))

    def take(self, drift: PaceDrift) -> None:
        """These factors are planned with from now on; what was seen so far has been said."""
        self.factors |= drift.now
        self._windows.clear()

    def _slowest(self, kind: str) -> tuple[int, Sequence[Ratio]] | None:
        """(stage, window) of the stage whose steps of a kind take longest against the plan."""
        of_kind = [(stage, tuple(window)) for (stage, other), window in self._windows.items()
                   if other == kind and len(window) >= LEAST_STEPS]
        return max(of_kind, key=lambda own: _median(own[1]), default=None)

    def _has_left(self, kind: str, window: Sequence[Ratio]) -> bool:
        planned, half = math.log(self._planned(kind)), len(window) // 2
        least = math.log1p(self._threshold)
        sides = set()
        for part in (window[:half], window[half:]):
            away = _median(part) - planned
            expected_s = float(np.median([ratio.expected_s for ratio in part]))
            off_s = abs(math.expm1(away)) * expected_s * math.exp(planned)
            if abs(away) <= max(least, BEYOND_CHANCE * _standard_error(part)) or (
                    off_s <= self._overhead_s):
                return False
            sides.add(away > 0)
        return len(sides) == 1

    def _planned(self, kind: str) -> float:
        return self.factors[kind].factor if kind in self.factors else 1.0


def expected_s(clock: StepClock, step: Step) -> list[float]:
    """[stages] seconds of a step of these sizes, its inputs taken to be equally long."""
    tokens = max(step.tokens - step.decoded, 0)
    spans = []
    if tokens and step.input_tokens > 0:
        count = max(round(tokens / step.input_tokens), 1)
        base, odd = divmod(tokens, count)
        spans = [(0, base + (i < odd)) for i in range(count)]
    encoded = step.queries - step.decoded if spans else 0
    return clock.seconds(StepSizes(
        spans=spans, tokens=tokens if spans else 0, encoded=max(encoded, 0), decoded=step.decoded,
        context=step.context_tokens, longest=float(step.longest_context), moved=0.0, handed=0))


def _logs(window: Sequence[Ratio]) -> FloatArray:
    return np.array([ratio.log for ratio in window])


def _median(window: Sequence[Ratio]) -> float:
    return float(np.median(_logs(window)))


def _standard_error(window: Sequence[Ratio]) -> float:
    """Of the median: 1.25 / sqrt(n) deviations of a normal with this interquartile range."""
    low, high = np.quantile(_logs(window), (0.25, 0.75))
    return 1.25 * float(high - low) / 1.35 / math.sqrt(len(window))
