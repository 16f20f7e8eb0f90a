"""How long a run's steps take against what they were planned to take.

Each rank tells of its latest steps once a second, in what it tells of itself anyway
(xrunner.io.beat). A step's seconds are divided by what the timing source says of a step of its kind
and size on its stage. Steps have left the plan where these ratios have in the older and in the
newer half of a window of the latest steps of a kind on a stage, by more than the threshold, by more
than chance, and by more than a step's overhead, of which a source knows little: one burst of
another program's does not, and what has passed does not either.

In the short window median and mean must have left: it tells soon what slows each step alike. In the
long one the mean alone: what is slowed in pulses (a container's quota stops its processes for a
part of each tenth of a second) has most of its steps as they were, and takes longer all the same. A
single ratio counts no more than MOST_OFF times the median. What is planned with from then on is the
mean of the newer half.

A pipeline is as quick as its slowest stage, so of several stages the slowest tells for its kind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.retimed import Factor
from xprofiler.timing import TimingSource
from xscheduler.copies import problem_for
from xsimulator.replay.step_clock import StepClock, StepClocks, StepSizes

# Steps of a kind on a stage: of a window at most, and without which it does not tell.
SHORT, LONG = (32, 12), (96, 64)
LEAST_STEPS = 12  # without which a kind is not said to take other times
BEYOND_CHANCE = 3.0  # standard errors of a mean by which it must be off
MOST_OFF = 8.0
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
                self._windows.setdefault((stage, step.kind), deque(maxlen=LONG[0])).append(ratio)

    def drift(self) -> PaceDrift | None:
        """How steps have left what is planned with; None while they have not."""
        for length, least in (SHORT, LONG):
            seen = {kind: own for kind in KINDS if (own := self._slowest(kind, length)) is not None}
            if any(len(window) >= least and self._has_left(kind, window, is_long=least == LONG[1])
                   for kind, (_, window) in seen.items()):
                return self._drift_of(seen)
        return None

    def _drift_of(self, seen: Mapping[str, tuple[int, Sequence[Ratio]]]) -> PaceDrift:
        """`seen`: by kind, its slowest stage and the steps there."""
        now = {kind: Factor(rows=float(np.median([ratio.rows for ratio in window])),
                            factor=math.exp(_mean(window[len(window) // 2:]).log))
               for kind, (_, window) in seen.items()}
        return PaceDrift(before={kind: self._planned(kind) for kind in now}, now=now,
                         stages={kind: stage for kind, (stage, _) in seen.items()},
                         steps=sum(len(window) for _, window in seen.values()))

    def take(self, drift: PaceDrift) -> None:
        """These factors are planned with from now on; what was seen so far has been said."""
        self.factors |= drift.now
        self._windows.clear()

    def _slowest(self, kind: str, length: int) -> tuple[int, Sequence[Ratio]] | None:
        """(stage, its latest steps, `length` at most) of the stage whose steps of a kind take
        longest against the plan."""
        of_kind = [(stage, tuple(window)[-length:]) for (stage, other), window
                   in self._windows.items() if other == kind and len(window) >= LEAST_STEPS]
        return max(of_kind, key=lambda own: _mean(own[1]).log, default=None)

    def _has_left(self, kind: str, window: Sequence[Ratio], *, is_long: bool) -> bool:
        planned, half = math.log(self._planned(kind)), len(window) // 2
        least = math.log1p(self._threshold)
        sides = set()
        for part in (window[:half], window[half:]):
            expected_s = float(np.median([ratio.expected_s for ratio in part]))
            for place, error in (_mean(part), *(() if is_long else (_median(part),))):
                away = place - planned
                off_s = abs(math.expm1(away)) * expected_s * math.exp(planned)
                if abs(away) <= max(least, BEYOND_CHANCE * error) or off_s <= self._overhead_s:
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


class _Place(NamedTuple):
    """Where ratios lie: the logarithm, and its standard error."""

    log: float
    error: float


def _median(window: Sequence[Ratio]) -> _Place:
    """Its error: 1.25 / sqrt(n) deviations of a normal with this interquartile range."""
    low, middle, high = np.quantile([ratio.log for ratio in window], (0.25, 0.5, 0.75))
    return _Place(float(middle), 1.25 * float(high - low) / 1.35 / math.sqrt(len(window)))


def _mean(window: Sequence[Ratio]) -> _Place:
    ratios = np.exp([ratio.log for ratio in window])
    middle = float(np.median(ratios))
    ratios = np.clip(ratios, middle / MOST_OFF, middle * MOST_OFF)
    mean = float(ratios.mean())
    return _Place(math.log(mean), float(ratios.std()) / mean / math.sqrt(len(window)))
