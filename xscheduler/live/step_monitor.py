"""Step times of a run compared with the plan.

Each rank reports its latest steps once a second (xrunner.files.heartbeat). The ratio of a step is
its seconds over those that the timing source gives for its kind and size on its stage. Steps differ
from the plan if both halves of a window of the latest ratios do. They must differ by more than the
threshold, by more than BEYOND_CHANCE standard errors and by more than the overhead of a step. So
neither a short burst of another program counts, nor one that has passed.

- Short windows: mean and median must differ. They react quickly to what slows every step.
- The long window: the mean alone. A container's quota slows steps in pulses, so most steps are
  not slowed. A single ratio counts at most MOST_OFF times the median.
- Slower steps count at once, and the plan takes their mean plus a standard error. To plan with
  too little exceeds the limit, with too much it costs some throughput.
- Quicker steps count after LASTING_S seconds, doubled each time they turn out to have been a lull.
  Every part of that time must be quicker, and the plan takes its slowest part. It goes half of the
  way while more than the threshold is left, since larger batches load the machine more.

A step passes all stages of its pool. With as many groups as stages the slowest stage sets the
speed. A single group takes the sum of all. The ratio of a kind of steps is that of the pool as a
whole, and of several replicas the slowest counts."""

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
from xrunner.rules.steps import rules_for
from xscheduler.replicas import problem_of_replica
from xsimulator.replay.step_clock import StepClock, StepClocks, StepSizes

ENOUGH_S = 1.0  # chosen: planned seconds of steps that count if another kind has changed
LASTING_S, LASTING_PARTS = 16.0, 4  # chosen: how long steps must be quicker, in so many parts
MOST_PATIENCE = 8  # chosen: largest multiple of LASTING_S after lulls
BEYOND_CHANCE = 3.0  # chosen: standard errors by which a mean must differ
MOST_OFF = 8.0  # chosen
MOST_KEPT = 4096  # chosen: steps of a kind on a stage; ranks report at most 24 a second
KINDS = ("encode", "decode", "mixed")


class Window(NamedTuple):
    """A window of the latest steps: at most `length`, at least `least`. is_mean: the mean counts
    without the median. num_reports: least number of reports, since one report may be one burst."""

    length: int
    least: int
    is_mean: bool = False
    num_reports: int = 1


# chosen: all of them
SWIFT, SHORT = Window(16, 16, num_reports=2), Window(32, 12, num_reports=2)
LONG = Window(96, 64, is_mean=True)


class Step(Protocol):
    """A step as a rank reports it (xrunner.files.heartbeat.ReportedStep)."""

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
    """One step: log(seconds / expected seconds), rows, expected seconds, time of the report."""

    log: float
    rows: int
    expected_s: float
    reported_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrift:
    """A difference of step times from the plan, {kind of step: figure}.

    `before`: factor on the timing source's times, planned with so far. `now`: factor observed.
    `planned`: factor to plan with from now on. `stages`: the slowest stage. `steps`: number of
    steps observed. `shape`: index of the shape of replicas; `where`: that shape in words."""

    before: Mapping[str, float]
    now: Mapping[str, Factor]
    planned: Mapping[str, Factor]
    stages: Mapping[str, int]
    steps: int
    shape: int = 0
    where: str = ""

    @property
    def slowed(self) -> float:
        """Factor now / factor before, of the kind of steps that changed most."""
        return max((self.now[kind].factor / self.before[kind] for kind in self.now),
                   key=lambda factor: abs(math.log(factor)))

    @property
    def words(self) -> str:
        return ", ".join(f"{kind} {self.before[kind]:.2f} -> {self.now[kind].factor:.2f} times"
                         for kind in KINDS if kind in self.now)


class LogRatio(NamedTuple):
    """Logarithm of the mean or median of some ratios, and its standard error."""

    log: float
    error: float


class StepSample(NamedTuple):
    """The latest steps of one kind on a pool with `groups` groups, equally many of each stage."""

    groups: int
    stages: Mapping[int, Sequence[Ratio]]

    @property
    def num_steps(self) -> int:
        return len(next(iter(self.stages.values())))

    @property
    def num_reports(self) -> int:
        return min(len({one.reported_s for one in own}) for own in self.stages.values())

    def part(self, steps: slice) -> StepSample:
        return StepSample(self.groups, {stage: own[steps] for stage, own in self.stages.items()})

    @property
    def spans_s(self) -> float:
        """Seconds between the first and the last report."""
        return min(own[-1].reported_s - own[0].reported_s for own in self.stages.values())

    def parts(self, count: int) -> list[StepSample]:
        """`count` parts of equally many steps, the oldest first."""
        edges = [self.num_steps * part // count for part in range(count + 1)]
        return [self.part(slice(*pair)) for pair in itertools.pairwise(edges)]

    @property
    def slowest(self) -> int:
        """The index of the stage with the largest ratio."""
        return max(self.stages, key=lambda stage: _mean(self.stages[stage]).log)

    @property
    def expected_s(self) -> float:
        """Expected seconds of a step on the stage where it takes longest."""
        return max(_expected_s(own) for own in self.stages.values())

    @property
    def mean(self) -> LogRatio:
        return self._pace(_mean)

    @property
    def median(self) -> LogRatio:
        return self._pace(_median)

    def _pace(self, average: Callable[[Sequence[Ratio]], LogRatio]) -> LogRatio:
        """Ratio of the whole pool's step time to the plan, from the `average` of each stage's
        ratios. (The largest of single steps' ratios would lie above every stage.)"""
        own = [(_expected_s(steps), average(steps)) for steps in self.stages.values()]
        before_s = [expected for expected, _ in own]
        now_s = [expected * math.exp(ratio.log) for expected, ratio in own]
        errors_s = [now * ratio.error for now, (_, ratio) in zip(now_s, own, strict=True)]
        if self.groups * max(now_s) > sum(now_s):
            slowest = now_s.index(max(now_s))
            now, error_s = self.groups * now_s[slowest], self.groups * errors_s[slowest]
        else:
            now, error_s = sum(now_s), math.hypot(*errors_s)
        before = max(sum(before_s), self.groups * max(before_s))
        return LogRatio(math.log(now / before), error_s / now)


class Ratios:
    """Ratios of the steps of a run of `estimate` to the times of `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 longest: int) -> None:
        """longest: most tokens of a request, input and output."""
        self._clocks = StepClocks(problem_of_replica(problem, estimate), timing)
        self.pools, self._longest = estimate.deployment.pools, longest
        self.num_stages = len(estimate.deployment.stages)
        self._slots = 0  # a placed pool works alone
        if self.pools[0].placement is not None:
            self._slots = rules_for(estimate)[0].group_max_active

    def of(self, stage: int, step: Step) -> Ratio | None:
        """The ratio of a step on a stage, counted over all replicas; None without a known time."""
        stage %= self.num_stages
        pool = next(pool for pool in self.pools
                    if stage in [own.index for own in pool.stages])
        seconds = expected_s(self._clocks.of(pool.stages, self._longest, placement=pool.placement,
                                             slots=self._slots), step)
        expected = seconds[[own.index for own in pool.stages].index(stage)]
        if not (math.isfinite(expected) and expected > 0 and step.seconds > 0):
            return None
        return Ratio(math.log(step.seconds / expected), step.tokens, expected)


class StepMonitor:
    """Observes the steps of one run of `estimate`, planned with `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 threshold: float, longest: int) -> None:
        """threshold: least relative change that counts. longest: most tokens of a request."""
        self._ratios = Ratios(problem, timing, estimate, longest=longest)
        self._threshold, self._overhead_s = threshold, timing.facts.step_overhead_s
        self._windows: dict[tuple[int, str], deque[Ratio]] = {}
        self._reported: dict[int, float] = {}  # rank -> time of its last report
        self.factors: dict[str, Factor] = {}  # planned with
        self._patience, self._was_quicker = 1, False

    def add_report(self, rank: int, stage: int, reported_s: float, steps: Iterable[Step]) -> None:
        """Adds a rank's report of time `reported_s` on its `stage`, counted over all replicas. A
        report that was added before is ignored."""
        if reported_s <= self._reported.get(rank, -math.inf):
            return
        self._reported[rank] = reported_s
        for step in steps:
            if step.kind in KINDS and (ratio := self._ratios.of(stage, step)) is not None:
                self._windows.setdefault((stage, step.kind), deque(
                    maxlen=MOST_KEPT)).append(ratio._replace(reported_s=reported_s))

    def drift(self) -> StepDrift | None:
        """The difference from the plan; None if there is none."""
        for window in (SWIFT, SHORT, LONG):
            if slower := self._slower(window):
                return self._drift_of(slower | self._meanwhile(slower), is_slower=True)
        if quicker := self._quicker():
            return self._drift_of(quicker | self._meanwhile(quicker), is_slower=False)
        return None

    def accept(self, drift: StepDrift) -> None:
        """Plans with the drift's factors from now on, and forgets the steps so far."""
        self.factors |= drift.planned
        self._windows.clear()
        if drift.slowed > 1 and self._was_quicker:  # that was a lull
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._was_quicker = drift.slowed < 1

    def factors_of(self, shape: int) -> dict[str, Factor]:
        """{kind of step: factor} that the only shape is planned with."""
        assert shape == 0, f"{shape = }"
        return self.factors

    def _drift_of(self, sample: Mapping[str, StepSample], *, is_slower: bool) -> StepDrift:
        now, planned = {}, {}
        for kind, own in sample.items():
            (steps, *_), before = own.stages.values(), self._planned(kind)
            rows = float(np.median([one.rows for one in steps]))
            latest = own.part(slice(-max(own.num_steps // 2, SWIFT.least), None))
            ratio = latest.mean if is_slower or own.num_steps < LONG.least else max(
                part.mean for part in own.parts(LASTING_PARTS))
            factor = math.exp(ratio.log)
            if is_slower:  # a kind that is quicker meanwhile does not count yet
                factor = max(factor, before)
            now[kind] = planned[kind] = Factor(rows=rows, factor=factor)
            if factor > before:
                planned[kind] = Factor(rows=rows, factor=factor * (1 + ratio.error))
            elif before > (1 + self._threshold) ** 2 * factor:
                planned[kind] = Factor(rows=rows, factor=math.sqrt(before * factor))
        return StepDrift(before={kind: self._planned(kind) for kind in now}, now=now,
                         planned=planned,
                         stages={kind: own.slowest for kind, own in sample.items()},
                         steps=sum(own.num_steps for own in sample.values()))

    def _slower(self, window: Window) -> dict[str, StepSample]:
        """{kind: steps} of the kinds whose steps are slower than planned."""
        return {kind: own for kind, own in self._samples(window.length).items()
                if own.num_steps >= window.least and own.num_reports >= window.num_reports
                and self._is_off(kind, own.parts(2), 1, is_mean=window.is_mean)}

    def _quicker(self) -> dict[str, StepSample]:
        """{kind: steps} of the kinds whose steps have been quicker than planned for long enough."""
        least_s, latest_s = self._patience * LASTING_S, max(self._reported.values(), default=0.0)
        return {kind: own for kind, own in self._samples(
                    MOST_KEPT, since_s=latest_s - least_s - 2 * ENOUGH_S).items()
                if own.num_steps >= LONG.least and own.spans_s >= least_s
                and self._is_off(kind, own.parts(LASTING_PARTS), -1, is_mean=True)}

    def _meanwhile(self, off: Mapping[str, StepSample]) -> dict[str, StepSample]:
        """{kind: steps} of the other kinds since those of `off` began; older steps precede the
        change. Fewer steps are enough if they took ENOUGH_S."""
        since_s = min(step.reported_s for own in off.values() for steps in own.stages.values()
                      for step in steps)
        return {kind: own for kind, own in self._samples(LONG.length, since_s=since_s).items()
                if kind not in off}

    def _samples(self, length: int, *, since_s: float | None = None) -> dict[str, StepSample]:
        """{kind: latest steps on the slowest replica}."""
        copies = 1 + max((stage for stage, _ in self._windows), default=0) // (
            self._ratios.num_stages)
        found = {}
        for kind in KINDS:
            of_kind = [sample for copy in range(copies) for pool in self._ratios.pools
                       if (sample := self._of_pool(kind, pool, copy, length, since_s)) is not None]
            if of_kind:
                found[kind] = max(of_kind, key=lambda own: own.mean.log)
        return found

    def _of_pool(self, kind: str, pool: Pool, copy: int, length: int,
                 since_s: float | None) -> StepSample | None:
        own: dict[int, Sequence[Ratio]] = {}
        for stage in pool.stages:
            index = copy * self._ratios.num_stages + stage.index
            steps = [step for step in self._windows.get((index, kind), ())
                     if since_s is None or step.reported_s >= since_s]
            is_long = since_s is not None and sum(one.expected_s for one in steps) >= ENOUGH_S
            if len(steps) >= SHORT.least or is_long:
                own[index] = steps
        if not own:
            return None
        count = min(length, *map(len, own.values()))
        return StepSample(pool.num_groups, {index: steps[-count:] for index, steps in own.items()})

    def _is_off(self, kind: str, parts: Sequence[StepSample], side: int, *, is_mean: bool) -> bool:
        """Whether steps are slower (side 1) or quicker (-1) than planned in every part, by the mean
        and, unless `is_mean`, by the median."""
        planned = math.log(self._planned(kind))
        for part in parts:
            expected_s = part.expected_s
            for log, error in (part.mean, *(() if is_mean else (part.median,))):
                away = side * (log - planned)
                off_s = abs(math.expm1(log - planned)) * expected_s * math.exp(planned)
                if away <= max(math.log1p(self._threshold), BEYOND_CHANCE * error) or (
                        off_s <= self._overhead_s):
                    return False
        return True

    def _planned(self, kind: str) -> float:
        """The factor planned with. For a kind without steps it follows from the other kinds
        (xprofiler.profile_timing)."""
        if kind in self.factors or not self.factors:
            return self.factors[kind].factor if kind in self.factors else 1.0
        others = Factors(self.factors)
        return {"encode": others.encode, "decode": others.decode}.get(
            kind, math.sqrt(others.encode * others.decode))


def expected_s(clock: StepClock, step: Step) -> list[float]:
    """[stages] expected seconds of a step. Its inputs are assumed to be equally long."""
    tokens = max(step.tokens - step.decoded, 0)
    spans = _equal_spans(step, tokens, clock.max_context) if (
        tokens and step.input_tokens > 0) else []
    encoded = step.queries - step.decoded if spans else 0
    return clock.seconds(StepSizes(
        spans=spans, tokens=tokens if spans else 0, encoded=max(encoded, 0), decoded=step.decoded,
        context=step.context_tokens, longest=float(step.longest_context), moved=0.0, handed=0))


def _equal_spans(step: Step, tokens: int, most: int) -> list[tuple[int, int]]:
    """(first token, number) of equal parts of inputs with as many `tokens` and attention pairs as
    the step encodes. most: tokens of the longest request."""
    count, first = max(round(tokens / step.input_tokens), 1), 0
    if step.input_tokens > tokens or tokens > count * most:  # they begin behind shared tokens
        count = max(step.queries - step.decoded, -(-tokens // most), 1)
        first = max(round((step.input_tokens - tokens / count) / 2), 0)
    base, odd = divmod(tokens, count)
    first = max(min(first, most - base - 1), 0)
    return [(first, base + (i < odd)) for i in range(count)]


def _expected_s(steps: Sequence[Ratio]) -> float:
    return float(np.median([one.expected_s for one in steps]))


def _median(window: Sequence[Ratio]) -> LogRatio:
    """The median; its error is that of a normal distribution with the same interquartile range."""
    low, middle, high = np.quantile([ratio.log for ratio in window], (0.25, 0.5, 0.75))
    return LogRatio(float(middle), 1.25 * float(high - low) / 1.35 / math.sqrt(len(window)))


def _mean(window: Sequence[Ratio]) -> LogRatio:
    ratios = np.exp([ratio.log for ratio in window])
    middle = float(np.median(ratios))
    ratios = np.clip(ratios, middle / MOST_OFF, middle * MOST_OFF)
    mean = float(ratios.mean())
    return LogRatio(math.log(mean), float(ratios.std()) / mean / math.sqrt(len(window)))
