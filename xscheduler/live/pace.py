"""Step times of a run compared with the plan.

Each rank reports its latest steps once a second (xrunner.files.heartbeat). The ratio of a step is
its seconds over those that the timing source gives for its kind and size on its stage. Steps differ
from the plan if both halves of a window of the latest ratios do: by more than the threshold, by
more than BEYOND_CHANCE standard errors and by more than the overhead of a step. So neither a short
burst of another program counts, nor one that has passed.

- Short windows: mean and median must differ. They react quickly to what slows every step.
- The long window: the mean alone. A container's quota slows steps in pulses, so most steps are as
  before. A single ratio counts at most MOST_OFF times the median.
- Slower steps count at once, and the plan takes their mean plus a standard error: planning with too
  little misses the limit, with too much it costs some throughput.
- Quicker steps count after LASTING_S seconds, doubled each time they turn out to have been a lull.
  Every part of that time must be quicker, and the plan takes its slowest part. It goes half of the
  way while more than the threshold is left, since larger batches load the machine more.

A step passes all stages of its pool. With as many groups as stages the slowest stage sets the pace;
a single group takes the sum of all. The ratio of a kind is that of the pool's pace, and of several
copies the slowest counts."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.deployment import Pool
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.profile_timing import Factor, Factors
from xprofiler.timing import TimingSource
from xscheduler.copies import problem_for
from xsimulator.replay.step_clock import StepClock, StepClocks, StepSizes

ENOUGH_S = 1.0  # chosen: planned seconds of steps that count if another kind has changed
LASTING_S, LASTING_PARTS = 16.0, 4  # chosen: how long steps must be quicker, in so many parts
MOST_PATIENCE = 8  # chosen: largest multiple of LASTING_S after lulls
BEYOND_CHANCE = 3.0  # chosen: standard errors by which a mean must differ
MOST_OFF = 8.0  # chosen
MOST_KEPT = 4096  # chosen: steps of a kind on a stage; ranks report at most 24 a second
KINDS = ("encode", "decode", "mixed")


class Window(NamedTuple):
    """A window of steps: at most `length`, at least `least`; is_mean: the mean counts without the
    median; from at least so many reports, since one report may be one burst."""

    length: int
    least: int
    is_mean: bool = False
    num_reports: int = 1


# chosen: all of them
SWIFT, SHORT = Window(16, 16, num_reports=2), Window(32, 12, num_reports=2)
LONG = Window(96, 64, is_mean=True)


class Step(Protocol):
    """A step as a rank reports it: see xrunner.files.heartbeat.ReportedStep."""

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
    """A step: log(seconds / expected seconds), rows, expected seconds, time of the report."""

    log: float
    rows: int
    expected_s: float
    told_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceDrift:
    """A difference from the plan. By kind: the factor on the timing source's times planned with so
    far (`before`), observed (`now`), and to plan with from now on (`planned`); the slowest stage.
    shape: index of the shape of copies; where: that shape in words."""

    before: Mapping[str, float]
    now: Mapping[str, Factor]
    planned: Mapping[str, Factor]
    stages: Mapping[str, int]
    steps: int  # that all this rests on
    shape: int = 0
    where: str = ""

    @property
    def slowed(self) -> float:
        """Ratio of now to before, of the kind that changed most."""
        return max((self.now[kind].factor / self.before[kind] for kind in self.now),
                   key=lambda factor: abs(math.log(factor)))

    @property
    def words(self) -> str:
        return ", ".join(f"{kind} {self.before[kind]:.2f} -> {self.now[kind].factor:.2f} times"
                         for kind in KINDS if kind in self.now)


class Place(NamedTuple):
    """Location of some ratios: its logarithm and the standard error of that."""

    log: float
    error: float


class Seen(NamedTuple):
    """The latest steps of a kind on a pool of so many groups, equally many of each stage."""

    groups: int
    stages: Mapping[int, Sequence[Ratio]]

    @property
    def num_steps(self) -> int:
        return len(next(iter(self.stages.values())))

    @property
    def num_reports(self) -> int:
        return min(len({one.told_s for one in own}) for own in self.stages.values())

    def part(self, steps: slice) -> Seen:
        return Seen(self.groups, {stage: own[steps] for stage, own in self.stages.items()})

    @property
    def spans_s(self) -> float:
        """Seconds between the first and the last report."""
        return min(own[-1].told_s - own[0].told_s for own in self.stages.values())

    def parts(self, count: int) -> list[Seen]:
        """`count` parts of equally many steps, the oldest first."""
        edges = [self.num_steps * place // count for place in range(count + 1)]
        return [self.part(slice(*pair)) for pair in itertools.pairwise(edges)]

    @property
    def slowest(self) -> int:
        """The stage with the largest ratio."""
        return max(self.stages, key=lambda stage: _mean(self.stages[stage]).log)

    @property
    def expected_s(self) -> float:
        """Expected seconds of a step on the stage where it takes longest."""
        return max(_expected_s(own) for own in self.stages.values())

    @property
    def mean(self) -> Place:
        return self._pace(_mean)

    @property
    def median(self) -> Place:
        return self._pace(_median)

    def _pace(self, place_of: Callable[[Sequence[Ratio]], Place]) -> Place:
        """Ratio of the pool's pace to the plan, from the location of each stage. (The largest of
        single steps' ratios would lie above every stage.)"""
        own = [(_expected_s(steps), place_of(steps)) for steps in self.stages.values()]
        before_s = [expected for expected, _ in own]
        now_s = [expected * math.exp(place.log) for expected, place in own]
        errors_s = [now * place.error for now, (_, place) in zip(now_s, own, strict=True)]
        if self.groups * max(now_s) > sum(now_s):
            slowest = now_s.index(max(now_s))
            now, error_s = self.groups * now_s[slowest], self.groups * errors_s[slowest]
        else:
            now, error_s = sum(now_s), math.hypot(*errors_s)
        return Place(math.log(now / max(sum(before_s), self.groups * max(before_s))), error_s / now)


class Ratios:
    """Ratios of the steps of a run of `estimate` to the times of `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 longest: int) -> None:
        """longest: tokens that a query ever has at most."""
        self._clocks = StepClocks(problem_for(problem, estimate), timing)
        self.pools, self._longest = estimate.deployment.pools, longest
        self.num_stages = len(estimate.deployment.stages)

    def of(self, stage: int, step: Step) -> Ratio | None:
        """The ratio of a step on a stage, counted over all replicas; None without a known time."""
        stage %= self.num_stages
        pool = next(pool for pool in self.pools
                    if stage in [own.index for own in pool.stages])
        seconds = expected_s(self._clocks.of(pool.stages, self._longest), step)
        expected = seconds[[own.index for own in pool.stages].index(stage)]
        if not (math.isfinite(expected) and expected > 0 and step.seconds > 0):
            return None
        return Ratio(math.log(step.seconds / expected), step.tokens, expected)


class Pace:
    """Observes the steps of one run of `estimate`, planned with `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 threshold: float, longest: int) -> None:
        """threshold: least relative change that counts. longest: most tokens of a query."""
        self._ratios = Ratios(problem, timing, estimate, longest=longest)
        self._threshold, self._overhead_s = threshold, timing.facts.step_overhead_s
        self._windows: dict[tuple[int, str], deque[Ratio]] = {}
        self._reported: dict[int, float] = {}  # rank -> time of its last report
        self.factors: dict[str, Factor] = {}  # planned with
        self._patience, self._was_quicker = 1, False

    def hear(self, rank: int, stage: int, told_s: float, steps: Iterable[Step]) -> None:
        """Takes a rank's report of time `told_s` on its `stage`, counted over all replicas. A
        report that was taken before is ignored."""
        if told_s <= self._reported.get(rank, -math.inf):
            return
        self._reported[rank] = told_s
        for step in steps:
            if step.kind in KINDS and (ratio := self._ratios.of(stage, step)) is not None:
                self._windows.setdefault((stage, step.kind), deque(
                    maxlen=MOST_KEPT)).append(ratio._replace(told_s=told_s))

    def drift(self) -> PaceDrift | None:
        """The difference from the plan; None if there is none."""
        for window in (SWIFT, SHORT, LONG):
            if slower := self._slower(window):
                return self._drift_of(slower | self._meanwhile(slower), is_slower=True)
        if quicker := self._quicker():
            return self._drift_of(quicker | self._meanwhile(quicker), is_slower=False)
        return None

    def take(self, drift: PaceDrift) -> None:
        """Plans with the drift's factors from now on, and forgets the steps so far."""
        self.factors |= drift.planned
        self._windows.clear()
        if drift.slowed > 1 and self._was_quicker:  # that was a lull
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._was_quicker = drift.slowed < 1

    def factors_of(self, shape: int) -> dict[str, Factor]:
        """The factors planned with, for the only shape."""
        assert shape == 0, f"{shape = }"
        return self.factors

    def _drift_of(self, seen: Mapping[str, Seen], *, is_slower: bool) -> PaceDrift:
        now, planned = {}, {}
        for kind, own in seen.items():
            (steps, *_), before = own.stages.values(), self._planned(kind)
            rows = float(np.median([one.rows for one in steps]))
            latest = own.part(slice(-max(own.num_steps // 2, SWIFT.least), None))
            place = latest.mean if is_slower or own.num_steps < LONG.least else max(
                part.mean for part in own.parts(LASTING_PARTS))
            factor = math.exp(place.log)
            if is_slower:  # a kind that is quicker meanwhile does not count yet
                factor = max(factor, before)
            now[kind] = planned[kind] = Factor(rows=rows, factor=factor)
            if factor > before:
                planned[kind] = Factor(rows=rows, factor=factor * (1 + place.error))
            elif before > (1 + self._threshold) ** 2 * factor:
                planned[kind] = Factor(rows=rows, factor=math.sqrt(before * factor))
        return PaceDrift(before={kind: self._planned(kind) for kind in now}, now=now,
                         planned=planned, stages={kind: own.slowest for kind, own in seen.items()},
                         steps=sum(own.num_steps for own in seen.values()))

    def _slower(self, window: Window) -> dict[str, Seen]:
        """The kinds whose steps are slower than planned."""
        return {kind: own for kind, own in self._seen(window.length).items()
                if own.num_steps >= window.least and own.num_reports >= window.num_reports
                and self._is_off(kind, own.parts(2), 1, is_mean=window.is_mean)}

    def _quicker(self) -> dict[str, Seen]:
        """The kinds whose steps have been quicker than planned for long enough."""
        least_s, latest_s = self._patience * LASTING_S, max(self._reported.values(), default=0.0)
        return {kind: own for kind, own in self._seen(
                    MOST_KEPT, since_s=latest_s - least_s - 2 * ENOUGH_S).items()
                if own.num_steps >= LONG.least and own.spans_s >= least_s
                and self._is_off(kind, own.parts(LASTING_PARTS), -1, is_mean=True)}

    def _meanwhile(self, off: Mapping[str, Seen]) -> dict[str, Seen]:
        """Steps of the other kinds since those of `off` began; older ones precede the change. Fewer
        steps are enough if they took ENOUGH_S."""
        since_s = min(step.told_s for own in off.values() for steps in own.stages.values()
                      for step in steps)
        return {kind: own for kind, own in self._seen(LONG.length, since_s=since_s).items()
                if kind not in off}

    def _seen(self, length: int, *, since_s: float | None = None) -> dict[str, Seen]:
        """{kind: latest steps on the slowest copy}."""
        copies = 1 + max((stage for stage, _ in self._windows), default=0) // (
            self._ratios.num_stages)
        found = {}
        for kind in KINDS:
            of_kind = [seen for copy in range(copies) for pool in self._ratios.pools
                       if (seen := self._of_pool(kind, pool, copy, length, since_s)) is not None]
            if of_kind:
                found[kind] = max(of_kind, key=lambda own: own.mean.log)
        return found

    def _of_pool(self, kind: str, pool: Pool, copy: int, length: int,
                 since_s: float | None) -> Seen | None:
        own: dict[int, Sequence[Ratio]] = {}
        for stage in pool.stages:
            place = copy * self._ratios.num_stages + stage.index
            steps = [step for step in self._windows.get((place, kind), ())
                     if since_s is None or step.told_s >= since_s]
            is_long = since_s is not None and sum(one.expected_s for one in steps) >= ENOUGH_S
            if len(steps) >= SHORT.least or is_long:
                own[place] = steps
        if not own:
            return None
        count = min(length, *map(len, own.values()))
        return Seen(pool.num_groups, {place: steps[-count:] for place, steps in own.items()})

    def _is_off(self, kind: str, parts: Sequence[Seen], side: int, *, is_mean: bool) -> bool:
        """Whether steps are slower (side 1) or quicker (-1) than planned in every part, by the mean
        and, unless `is_mean`, by the median."""
        planned = math.log(self._planned(kind))
        for part in parts:
            expected_s = part.expected_s
            for place, error in (part.mean, *(() if is_mean else (part.median,))):
                away = side * (place - planned)
                off_s = abs(math.expm1(place - planned)) * expected_s * math.exp(planned)
                if away <= max(math.log1p(self._threshold), BEYOND_CHANCE * error) or (
                        off_s <= self._overhead_s):
                    return False
        return True

    def _planned(self, kind: str) -> float:
        """The factor planned with; of a kind without steps, by the others'
        (xprofiler.profile_timing)."""
        if kind in self.factors or not self.factors:
            return self.factors[kind].factor if kind in self.factors else 1.0
        others = Factors(self.factors)
        return {"encode": others.encode, "decode": others.decode}.get(
            kind, math.sqrt(others.encode * others.decode))


def expected_s(clock: StepClock, step: Step) -> list[float]:
    """[stages] expected seconds of a step; its inputs are taken as equally long."""
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


def _expected_s(steps: Sequence[Ratio]) -> float:
    return float(np.median([one.expected_s for one in steps]))


def _median(window: Sequence[Ratio]) -> Place:
    """The median; its error is that of a normal with the same interquartile range."""
    low, middle, high = np.quantile([ratio.log for ratio in window], (0.25, 0.5, 0.75))
    return Place(float(middle), 1.25 * float(high - low) / 1.35 / math.sqrt(len(window)))


def _mean(window: Sequence[Ratio]) -> Place:
    ratios = np.exp([ratio.log for ratio in window])
    middle = float(np.median(ratios))
    ratios = np.clip(ratios, middle / MOST_OFF, middle * MOST_OFF)
    mean = float(ratios.mean())
    return Place(math.log(mean), float(ratios.std()) / mean / math.sqrt(len(window)))
