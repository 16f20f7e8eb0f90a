"""How long a run's steps take against what they were planned to take.

Each rank tells of its latest steps once a second, in what it tells of itself anyway
(xrunner.io.beat). A step's seconds are divided by what the timing source says of a step of its kind
and size on its stage. Steps have left the plan where these ratios have in the older and in the
newer half of a window of the latest steps of a kind on a stage, by more than the threshold, by more
than chance, and by more than a step's overhead, of which a source knows little: a burst of fewer
steps of another program's does not, and what has passed does not either.

In the shorter windows median and mean must have left: they tell soon what slows each step alike. In
the long one the mean alone: what is slowed in pulses (a container's quota stops its processes for a
part of each tenth of a second) has most of its steps as they were, and takes longer all the same. A
single ratio counts no more than MOST_OFF times the median.

What is planned with from then on is the mean of the window's end, and where steps are slower a
standard error more: to reckon with too little breaks the bound, with too much it costs a few
queries a second. For the same reason slower steps count at once, quicker ones once they have lasted
LASTING_S; and each time that they turn out to have been a lull, twice as long. All parts of that
time must be quicker, and the slowest of them is planned with. That is half of the way, while more
than the threshold is left of it: how much of a core another program takes depends on how busy the
run is, and smaller batches than before are less busy, which says nothing of the larger ones that
they would bring back. Steps that have left the plan before are followed more closely: in the long
window FOLLOWED counts, for up to the threshold of further slowness would otherwise stay out of
every plan.

A step goes through all stages of its pool. With as many groups as stages the slowest of these sets
the pace, a single group takes the sum of all; the ratio of a kind is that of the pool's pace, and
of several copies the slowest tells."""

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

LEAST_STEPS = 12  # chosen: without which a kind is not said to take other times
TELLING_S = 1.0  # of work, by the plan, that tell what a kind takes where another has left the plan
ENOUGH_STEPS = 16  # chosen: that a factor is the mean of, where there are as many
LASTING_S, LASTING_PARTS = 16.0, 4  # chosen: for which steps must be quicker, each part of it
MOST_PATIENCE = 8  # chosen: times as long where that was a lull before
FOLLOWED = 0.05  # chosen: share by which steps must be slower still, once they have left the plan
BEYOND_CHANCE = 3.0  # chosen: standard errors of a mean by which it must be off
MOST_OFF = 8.0  # chosen
MOST_KEPT = 4096  # chosen: steps of a kind on a stage; ranks tell of 24 a second at most
KINDS = ("encode", "decode", "mixed")


class Window(NamedTuple):
    """Steps of a kind on a stage: so many at most, and so many without which it does not tell;
    whether their mean alone counts, without the median; and how often they must have been told
    of: all that are told at once may be one burst."""

    length: int
    least: int
    is_mean: bool = False
    times_told: int = 1


SWIFT, SHORT = Window(16, 16, times_told=2), Window(32, 12, times_told=2)
LONG = Window(96, 64, is_mean=True)


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
    """A step's seconds over those it was expected to take; when it was told of."""

    log: float
    rows: int
    expected_s: float
    told_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceDrift:
    """Where steps have left the plan: by kind, the factor on the timing source's own times that was
    planned with (`before`), that is seen (`now`), and that is planned with from now on (`planned`),
    of every kind that steps were seen of; `stage` is the slowest of a kind. Of copies of several
    shapes it is of those of one `shape`, which `where` names."""

    before: Mapping[str, float]
    now: Mapping[str, Factor]
    planned: Mapping[str, Factor]
    stages: Mapping[str, int]
    steps: int  # that all this rests on
    shape: int = 0
    where: str = ""

    @property
    def slowed(self) -> float:
        """The factor by which the kind that is now off by most has changed."""
        return max((self.now[kind].factor / self.before[kind] for kind in self.now),
                   key=lambda factor: abs(math.log(factor)))

    @property
    def words(self) -> str:
        return ", ".join(f"{kind} {self.before[kind]:.2f} -> {self.now[kind].factor:.2f} times"
                         for kind in KINDS if kind in self.now)


class Place(NamedTuple):
    """Where ratios lie: the logarithm, and its standard error."""

    log: float
    error: float


class Seen(NamedTuple):
    """The latest steps of a kind on a pool of so many groups: by stage, as many of each."""

    groups: int
    stages: Mapping[int, Sequence[Ratio]]

    @property
    def num_steps(self) -> int:
        return len(next(iter(self.stages.values())))

    @property
    def times_told(self) -> int:
        return min(len({one.told_s for one in own}) for own in self.stages.values())

    def part(self, steps: slice) -> Seen:
        return Seen(self.groups, {stage: own[steps] for stage, own in self.stages.items()})

    @property
    def spans_s(self) -> float:
        """Between when the first and the last of them were told of."""
        return min(own[-1].told_s - own[0].told_s for own in self.stages.values())

    def parts(self, count: int) -> list[Seen]:
        """As many steps in each, the oldest first."""
        edges = [self.num_steps * place // count for place in range(count + 1)]
        return [self.part(slice(*pair)) for pair in itertools.pairwise(edges)]

    @property
    def slowest(self) -> int:
        """The stage whose steps take longest against the plan."""
        return max(self.stages, key=lambda stage: _mean(self.stages[stage]).log)

    @property
    def expected_s(self) -> float:
        """Of a step on the stage where it takes longest, by the plan."""
        return max(_expected_s(own) for own in self.stages.values())

    @property
    def mean(self) -> Place:
        return self._pace(_mean)

    @property
    def median(self) -> Place:
        return self._pace(_median)

    def _pace(self, place_of: Callable[[Sequence[Ratio]], Place]) -> Place:
        """What the pool's pace is against the plan: of what its stages take, each by itself. (Of
        single steps' ratios the largest would lie above what any stage takes.)"""
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
    """What steps of a run of `estimate` take against `timing`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 longest: int) -> None:
        """longest: tokens that a query ever has at most."""
        self._clocks = StepClocks(problem_for(problem, estimate), timing)
        self.pools, self._longest = estimate.deployment.pools, longest
        self.num_stages = len(estimate.deployment.stages)

    def of(self, stage: int, step: Step) -> Ratio | None:
        """A step on a stage, counted over all replicas; None where the source says nothing."""
        stage %= self.num_stages
        pool = next(pool for pool in self.pools
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
        self._patience, self._was_quicker = 1, False

    def hear(self, rank: int, stage: int, told_s: float, steps: Iterable[Step]) -> None:
        """Takes up what a rank of the run's `stage`, counted over all replicas, told at `told_s`;
        nothing where that has been heard already."""
        if told_s <= self._told.get(rank, -math.inf):
            return
        self._told[rank] = told_s
        for step in steps:
            if step.kind in KINDS and (ratio := self._ratios.of(stage, step)) is not None:
                self._windows.setdefault((stage, step.kind), deque(
                    maxlen=MOST_KEPT)).append(ratio._replace(told_s=told_s))

    def drift(self) -> PaceDrift | None:
        """How steps have left what is planned with; None while they have not."""
        for window in (SWIFT, SHORT, LONG):
            if slower := self._slower(window):
                return self._drift_of(slower | self._meanwhile(slower), is_slower=True)
        if quicker := self._quicker():
            return self._drift_of(quicker | self._meanwhile(quicker), is_slower=False)
        return None

    def take(self, drift: PaceDrift) -> None:
        """These factors are planned with from now on; what was seen so far has been said."""
        self.factors |= drift.planned
        self._windows.clear()
        if drift.slowed > 1 and self._was_quicker:  # that was a lull
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._was_quicker = drift.slowed < 1

    def factors_of(self, shape: int) -> dict[str, Factor]:
        """Those that copies of the only shape are planned with."""
        assert shape == 0, f"{shape = }"
        return self.factors

    def _drift_of(self, seen: Mapping[str, Seen], *, is_slower: bool) -> PaceDrift:
        now, planned = {}, {}
        for kind, own in seen.items():
            (steps, *_), before = own.stages.values(), self._planned(kind)
            rows = float(np.median([one.rows for one in steps]))
            latest = own.part(slice(-max(own.num_steps // 2, ENOUGH_STEPS), None))
            place = latest.mean if is_slower or own.num_steps < LONG.least else max(
                part.mean for part in own.parts(LASTING_PARTS))
            factor = math.exp(place.log)
            if is_slower:  # what is quicker meanwhile must last
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
        """Kinds whose steps have become slower than planned with."""
        return {kind: own for kind, own in self._seen(window.length).items()
                if own.num_steps >= window.least and own.times_told >= window.times_told
                and self._is_off(kind, own.parts(2), 1, is_mean=window.is_mean)}

    def _quicker(self) -> dict[str, Seen]:
        """Kinds whose steps have been quicker than planned with for as long as that must last."""
        least_s, latest_s = self._patience * LASTING_S, max(self._told.values(), default=0.0)
        return {kind: own for kind, own in self._seen(
                    MOST_KEPT, since_s=latest_s - least_s - 2 * TELLING_S).items()
                if own.num_steps >= LONG.least and own.spans_s >= least_s
                and self._is_off(kind, own.parts(LASTING_PARTS), -1, is_mean=True)}

    def _meanwhile(self, off: Mapping[str, Seen]) -> dict[str, Seen]:
        """What steps of the other kinds took since those of `off`: fewer of them tell, if they took
        a while. Older ones would tell of what the machine was like before."""
        since_s = min(step.told_s for own in off.values() for steps in own.stages.values()
                      for step in steps)
        return {kind: own for kind, own in self._seen(LONG.length, since_s=since_s).items()
                if kind not in off}

    def _seen(self, length: int, *, since_s: float | None = None) -> dict[str, Seen]:
        """By kind, what of the latest steps there is to see on the copy that is slowest."""
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
            is_long = since_s is not None and sum(one.expected_s for one in steps) >= TELLING_S
            if len(steps) >= LEAST_STEPS or is_long:
                own[place] = steps
        if not own:
            return None
        count = min(length, *map(len, own.values()))
        return Seen(pool.num_groups, {place: steps[-count:] for place, steps in own.items()})

    def _is_off(self, kind: str, parts: Sequence[Seen], side: int, *, is_mean: bool) -> bool:
        """Whether steps of a kind have become slower (1) or quicker (-1) than planned with in each
        part: in its mean, and unless `is_mean` in its median."""
        planned = math.log(self._planned(kind))
        for part in parts:
            expected_s = part.expected_s
            for place, error in (part.mean, *(() if is_mean else (part.median,))):
                away = side * (place - planned)
                least = FOLLOWED if (side > 0 and is_mean and kind in self.factors) else (
                    self._threshold)
                off_s = abs(math.expm1(place - planned)) * expected_s * math.exp(planned)
                if away <= max(math.log1p(least), BEYOND_CHANCE * error) or (
                        off_s <= self._overhead_s):
                    return False
        return True

    def _planned(self, kind: str) -> float:
        """The factor that is planned with: of a kind that was not seen, as the others (see
        xprofiler.profile_timing)."""
        if kind in self.factors or not self.factors:
            return self.factors[kind].factor if kind in self.factors else 1.0
        others = Factors(self.factors)
        return {"encode": others.encode, "decode": others.decode}.get(
            kind, math.sqrt(others.encode * others.decode))


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


def _expected_s(steps: Sequence[Ratio]) -> float:
    return float(np.median([one.expected_s for one in steps]))


def _median(window: Sequence[Ratio]) -> Place:
    """Its error: 1.25 / sqrt(n) deviations of a normal with this interquartile range."""
    low, middle, high = np.quantile([ratio.log for ratio in window], (0.25, 0.5, 0.75))
    return Place(float(middle), 1.25 * float(high - low) / 1.35 / math.sqrt(len(window)))


def _mean(window: Sequence[Ratio]) -> Place:
    ratios = np.exp([ratio.log for ratio in window])
    middle = float(np.median(ratios))
    ratios = np.clip(ratios, middle / MOST_OFF, middle * MOST_OFF)
    mean = float(ratios.mean())
    return Place(math.log(mean), float(ratios.std()) / mean / math.sqrt(len(window)))
