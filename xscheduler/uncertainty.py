"""How sure the latency of a schedule is, and schedules that keep their bound all the same.

A schedule is planned for bound / factor, with the factor such that P(latency <= bound) is at least
the constraint's `confidence`, as far as the causes below are known:

- *times*: each table of a measured profile is off by one relative error, common to all steps that
  use it and independent of other tables' (xprofiler.profile_timing.TableError). Their effects on
  the latency, each found by asking again with that table's times raised, add as squares; the sum
  is taken as log-normal. How single steps scatter is no matter: a query is hundreds of them. A
  computed source (the roofline) has measured nothing: its error is not covered, and said not to be.
- *lengths*: the observed lengths are a sample. REPLICATES resampled distributions (smoothed
  bootstrap, fixed seed) are put in its place. Given distributions are taken as true.
- *model*: a replay of the schedule (xsimulator.replay, fixed seed) may show a longer latency than
  the closed form; by so much it is taken to be wrong.
- *drift*: the mean output length may differ by up to the constraint's `drift`, the std kept: the
  worst of both directions, a factor of its own. The bound's output length drifts along, for it
  is defined by a quantile.

Layers and control variables stay as the schedule has them. Closed forms let a WAA schedule's
decode batch grow with longer outputs, which in a run its `max_in_system` prevents: the margin is
too large rather than too small there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from scipy import optimize, special

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import FloatArray, JointLengths, bootstrap, with_output_moments
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds
from xprofiler.profile import (
    TableKey,
)
from xprofiler.profile_timing import TableError
from xprofiler.raised import Raised
from xprofiler.timing import TimingSource
from xscheduler.live.pinned import pinned_policy
from xsimulator.policies import make_config
from xsimulator.replay.predict import replay_latency_s

REPLICATES = 40
MOST_DRAWN = 2000  # of a larger sample's lengths; its replicates then scatter as much less
ROUNDS = 6  # searches under tightened bounds at most
NEAR = 1.02  # a safe and an unsafe bound this near each other: no more is to be gained
GROW = 1.15  # from a safe bound to the next, while none is known to be unsafe
SHRINK = 0.97  # of an unsafe schedule's latency: what is tried next, at least
SHRINK_UNKNOWN = 0.75  # the same of one whose margin is infinite: beyond what the profile reaches
NEGLIGIBLE = 0.001  # excess of a replay's latency that counts as none
LEAST_STEP = 0.01  # by which a table's times are raised, where its error is smaller
_SEED = 20240427


@runtime_checkable
class Measured(Protocol):
    """A timing source that knows how far off it may be."""

    def table_errors(self) -> Mapping[TableKey, TableError]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """`factor`: plan for bound / factor. The parts are what it would be for one cause alone."""

    factor: float
    timing: float
    lengths: float
    drift: float
    confidence: float
    sentence: str
    model: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWithin:
    """A schedule whose latency keeps the bound with its margin (or, where `is_safe` is false, comes
    nearest to that), and what the margin cost: the share of the throughput that the schedule
    without it has more."""

    schedule: Schedule
    margin: Margin
    cost: float
    is_safe: bool = True


class _Case(NamedTuple):
    """What is asked again and again."""

    estimate: Estimate
    config: Any
    layers: int


def margin(problem: Problem, timing: TimingSource, estimate: Estimate) -> Margin:
    """What the constraint's confidence and drift demand of this estimate's latency."""
    return Doubts(problem, timing).margin(estimate)


class Doubts:
    """Margins of one problem's estimates; keeps the resampled distributions between them."""

    def __init__(self, problem: Problem, timing: TimingSource, *,
                 replays: bool = False) -> None:
        """`replays`: each schedule's latency is checked by a replay."""
        self.problem, self._timing, self._replays = problem, timing, replays
        self._errors = timing.table_errors() if isinstance(timing, Measured) else {}
        self._policies: dict[tuple[object, int], Any] = {}
        self._layers: dict[object, int] = {}  # a number for each policy and its stages

    @property
    def is_certain(self) -> bool:
        """Nothing is known to be uncertain, or there is no bound to break."""
        lengths, constraint = self.problem.lengths, self.problem.constraint
        return math.isinf(constraint.latency_s) or (
            not self._errors and constraint.drift == 0
            and lengths.inputs.num_samples is None and lengths.outputs.num_samples is None)

    def margin(self, estimate: Estimate) -> Margin:
        confidence = self.problem.constraint.confidence
        model = self._model_factor(estimate)
        if self.is_certain:
            return Margin(factor=model, timing=1.0, lengths=1.0, drift=1.0, confidence=confidence,
                          model=model, sentence=self._sentence(model, 1.0, 1.0, 1.0, 0.0, model))
        case = self._case(estimate)
        expected_s = self._latency_s("as planned", self.problem.lengths, case)
        spread, unmeasured = self._timing_spread(case, expected_s)
        ratios = self._length_ratios(case, expected_s)
        drift = self._drift_factor(case, expected_s)
        alone = np.zeros(1)
        timing = math.exp(upper_limit(alone, spread, confidence))
        lengths = max(math.exp(upper_limit(ratios, 0.0, confidence)), 1.0)
        factor = model * drift * max(math.exp(upper_limit(ratios, spread, confidence)), 1.0)
        return Margin(
            factor=factor, timing=timing, lengths=lengths, drift=drift, confidence=confidence,
            model=model, sentence=self._sentence(factor, timing, lengths, drift, unmeasured, model))

    def _model_factor(self, estimate: Estimate) -> float:
        """By how much a replay's latency exceeds the closed form's."""
        if not self._replays or math.isinf(self.problem.constraint.latency_s):
            return 1.0
        seen_s = replay_latency_s(self.problem, self._timing, estimate, _SEED)
        ratio = seen_s / estimate.figures.latency_s
        return ratio if ratio > 1 + NEGLIGIBLE else 1.0  # nan counts as none

    def longer(self) -> JointLengths:
        """Outputs as long as they may have to be reckoned with: drifted up, and moved so that the
        bound's quantile comes to lie at the upper limit of its replicates."""
        lengths, constraint = self.problem.lengths, self.problem.constraint
        length = lengths.outputs.quantile(constraint.quantile)
        logarithms = np.array([shrunk * math.log(
            own.outputs.quantile(constraint.quantile) / length)
            for own, shrunk in self._replicates] or [0.0])
        most = length * math.exp(max(upper_limit(logarithms, 0.0, constraint.confidence), 0.0))
        change = constraint.drift + (most - length) / lengths.outputs.mean
        return with_output_moments(lengths, mean_factor=1 + change, moves=True)

    def with_own_lengths(self, schedule: Schedule) -> Schedule:
        """A schedule found for other lengths, with this problem's estimate of it."""
        estimate = schedule.estimate
        policy: Any = pinned_policy(estimate, self.problem, self._timing)
        own = policy.estimate(make_config(estimate.policy, estimate)[0])
        return replace(schedule, estimate=own.changed(policy=estimate.policy))

    # --- causes -------------------------------------------------------------------------------

    def _timing_spread(self, case: _Case, expected_s: float) -> tuple[float, float]:
        """(standard deviation of the latency's logarithm, share of it that no table explains)."""
        degrees = {stage.tp_degree for stage in case.estimate.deployment.stages}
        square, explained = 0.0, 0.0
        for key, error in self._errors.items():
            if not key.link and key.tp_degree not in degrees:
                continue
            step = max(error.relative, LEAST_STEP)
            raised_s = self._latency_s(key, self.problem.lengths, case,
                                       Raised(self._timing, key, 1 + step))
            effect = math.log(raised_s / expected_s)
            explained += effect / math.log1p(step)
            square += (effect * error.relative / step) ** 2
        return math.sqrt(square), max(1 - explained, 0.0)

    def _length_ratios(self, case: _Case, expected_s: float) -> FloatArray:
        """[replicates] logarithms of the latency over the expected one."""
        return np.array([shrunk * math.log(
            self._latency_s(index, lengths, case) / expected_s)
            for index, (lengths, shrunk) in enumerate(self._replicates)] or [0.0])

    @cached_property
    def _replicates(self) -> list[tuple[JointLengths, float]]:
        lengths = self.problem.lengths
        counts = [part.num_samples for part in (lengths.inputs, lengths.outputs)
                  if part.num_samples is not None]
        if not counts:
            return []
        rng = np.random.default_rng(_SEED)
        shrunk = math.sqrt(min(MOST_DRAWN / min(counts), 1.0))
        return [(bootstrap(lengths, rng, most=MOST_DRAWN, smooth=True), shrunk)
                for _ in range(REPLICATES)]

    def _drift_factor(self, case: _Case, expected_s: float) -> float:
        return max((self._latency_s(("drift", change), lengths, case) / expected_s
                    for change, lengths in self._drifted.items()), default=1.0)

    @cached_property
    def _drifted(self) -> dict[float, JointLengths]:
        """The unchanged among them, so that the worst is never better than that."""
        drift = self.problem.constraint.drift
        if drift == 0:
            return {}
        return {change: with_output_moments(self.problem.lengths, mean_factor=1 + change,
                                            moves=True)
                for change in (-drift, -drift / 2, 0.0, drift / 2, drift)}

    def _latency_s(self, name: object, lengths: JointLengths, case: _Case,
                   timing: TimingSource | None = None) -> float:
        key = (name, case.layers)
        if key not in self._policies:
            self._policies[key] = pinned_policy(
                case.estimate, replace(self.problem, lengths=lengths), timing or self._timing)
        return float(self._policies[key].evaluate([case.config]).latency_s[0])

    def _case(self, estimate: Estimate) -> _Case:
        config, missing = make_config(estimate.policy, estimate)
        assert not missing, f"{missing = }"
        layers = self._layers.setdefault((estimate.policy, estimate.deployment.stages), len(self._layers))
        return _Case(estimate, config, layers)

    # --- words --------------------------------------------------------------------------------

    def _sentence(self, factor: float, timing: float, lengths: float, drift: float,
                  unmeasured: float, model: float = 1.0) -> str:
        constraint, joint = self.problem.constraint, self.problem.lengths
        if math.isinf(constraint.latency_s):
            return "there is no bound, so none can be broken"
        counts = [part.num_samples for part in (joint.inputs, joint.outputs)
                  if part.num_samples is not None]
        causes = []
        if self._errors:
            text = f"{timing - 1:.1%} for what the profile may be off"
            causes.append(text + (f" ({unmeasured:.0%} of the latency is not measured, and its "
                                  "error not covered)" if unmeasured > 0.01 else ""))
            unknown = float(np.mean([error.unknown for error in self._errors.values()]))
            if unknown > 0.5:
                causes[-1] += " (most points have too few samples to tell their noise)"
        if counts:
            causes.append(f"{lengths - 1:.1%} for lengths known from {min(counts)} queries")
        if constraint.drift:
            causes.append(f"{drift - 1:.1%} for outputs up to {constraint.drift:.0%} longer or "
                          "shorter in the mean")
        if model > 1:
            causes.append(f"{model - 1:.1%} by which a replay takes longer than the closed form")
        text = "no margin: lengths are given and taken as true" if not causes else (
            f"planned for {format_seconds(constraint.latency_s / factor)}, so that the bound of "
            f"{format_seconds(constraint.latency_s)} is kept with a confidence of "
            f"{constraint.confidence:.0%}: {', '.join(causes)}")
        return text if self._errors else (
            f"{text}; the times are computed, not measured: how far they are off is not covered")


def upper_limit(logarithms: FloatArray, spread: float, confidence: float) -> float:
    """Logarithm of the factor that a latency stays below with this confidence, if its own is one of
    these plus a normal error of standard deviation `spread`. Infinite where too many of them are:
    sizes that the profile refuses."""
    count = len(logarithms)
    finite = logarithms[np.isfinite(logarithms)]
    if len(finite) < count and (confidence >= len(finite) / count
                                or confidence > count / (count + 1)):
        return math.inf
    if spread == 0:
        place = min(math.ceil(confidence * (count + 1)), count) - 1
        found = float(np.sort(logarithms)[place])
    else:
        def excess(limit: float) -> float:
            return float(special.ndtr((limit - logarithms) / spread).mean()) - confidence

        reach = 9 * spread
        found = float(optimize.brentq(excess, finite.min() - reach, finite.max() + reach))
    if confidence > count / (count + 1) and count > 1:
        # more than so many replicates can tell: a normal of their mean and deviation goes on
        total = math.hypot(float(logarithms.std(ddof=1)), spread)
        found = max(found, float(logarithms.mean() + special.ndtri(confidence) * total))
    return found


def plan_within(problem: Problem, timing: TimingSource, search: Callable[[float], Schedule], *,
                search_problem: Callable[[Problem], Schedule] | None = None,
                replays: bool = False) -> PlannedWithin:
    """The best schedule found whose latency times its own margin keeps the bound.

    search: the best schedule within a latency bound in seconds; raises InfeasibleError.
    search_problem: the same for a problem like this one with other lengths and another bound.
    replays: each schedule's latency is checked by a replay, too.

    A margin belongs to a schedule: where a query of one token more waits a whole phase more, it is
    large, and the best schedules sit at such edges. Tighter bounds do not keep the search from
    edges; longer outputs do. So with `search_problem` the search is asked for outputs as long as
    they may have to be reckoned with (Doubts.longer), at bounds around the given one, and what it
    finds is judged with the problem's own lengths; without it, at tightened bounds. Bounds are
    tried until one is safe, then others between it and the least unsafe one. The schedule's
    `latency_bound_s` is the problem's, its `bound_qps` holds for schedules without a margin.
    """
    bound_s = problem.constraint.latency_s
    doubts = Doubts(problem, timing, replays=replays)
    free = search(bound_s)
    first = doubts.margin(free.estimate)
    if free.estimate.figures.latency_s * first.factor <= bound_s:
        return PlannedWithin(schedule=free, margin=first, cost=0.0)
    tried = _Tried(bound_s, free, first)
    begin_s, find = _tighter_s(bound_s, free.estimate.figures.latency_s, first.factor), search
    if search_problem is not None and first.lengths * first.drift > 1:
        begin_s = _tighter_s(bound_s, free.estimate.figures.latency_s, first.timing * first.model)
        longer = replace(problem, lengths=doubts.longer())

        def find(target_s: float) -> Schedule:
            return search_problem(replace(longer, constraint=longer.constraint.with_latency(limit_s=target_s)))

    for _ in range(ROUNDS):
        target_s = tried.next_target_s(begin_s)
        if target_s is None:
            break
        try:
            found = find(target_s)
        except InfeasibleError as refusal:
            tried.refused(target_s, refusal)
            continue
        own = found if find is search else doubts.with_own_lengths(found)
        tried.add(target_s, found.estimate.figures.latency_s, own, doubts.margin(own.estimate))
    return tried.result()


class _Tried:
    """Latency bounds searched with, and what came of them."""

    def __init__(self, bound_s: float, free: Schedule, first: Margin) -> None:
        self._bound_s, self._free = bound_s, free
        self._least_s: float | None = None  # the largest that is safe, or that nothing meets
        self._most_s: float | None = None  # the least whose schedule is not safe
        self._next_s: float | None = None  # after an unsafe one
        self._safe: list[tuple[Schedule, Margin]] = []
        self._unsafe = [(free, first)]
        self._refusal: InfeasibleError | None = None

    def next_target_s(self, begin_s: float) -> float | None:
        if self._least_s is None:
            return begin_s if self._next_s is None else self._next_s
        if self._most_s is None:
            return GROW * self._least_s
        if self._most_s <= NEAR * self._least_s:
            return None
        return math.sqrt(self._least_s * self._most_s)

    def add(self, target_s: float, searched_s: float, schedule: Schedule, own: Margin) -> None:
        """searched_s: the schedule's latency in the eyes of the search."""
        needed_s = schedule.estimate.figures.latency_s * own.factor
        if needed_s <= self._bound_s:
            self._safe.append((schedule, own))
            self._least_s = target_s
        else:
            self._unsafe.append((schedule, own))
            self._most_s = target_s
            self._next_s = min(SHRINK * searched_s, _tighter_s(
                target_s, searched_s, needed_s / self._bound_s))

    def refused(self, target_s: float, refusal: InfeasibleError) -> None:
        self._least_s, self._refusal = target_s, refusal

    def result(self) -> PlannedWithin:
        if not self._safe and self._refusal is not None:
            schedule, own = self._unsafe[0]
            raise InfeasibleError(
                f"no schedule was found that keeps the bound of {format_seconds(self._bound_s)} "
                f"with its margin (without one: {schedule.estimate.policy} at "
                f"{format_seconds(schedule.estimate.figures.latency_s)}; {own.sentence}). With a margin: "
                f"{self._refusal}") from self._refusal
        if self._safe:
            found, own = max(self._safe, key=lambda pair: pair[0].estimate.figures.throughput_qps)
        else:
            found, own = min(self._unsafe,
                             key=lambda pair: pair[0].estimate.figures.latency_s * pair[1].factor)
            own = replace(own, sentence=f"NOT kept with that confidence: {own.sentence}")
        queries, bound_qps = found.estimate.figures.throughput_qps, self._free.proof.bound_qps
        return PlannedWithin(
            schedule=found.changed(limit_s=self._bound_s, bound_qps=bound_qps,
                             gap=bound_qps / queries - 1, unbounded_qps=self._free.proof.unbounded_qps),
            margin=own, cost=1 - queries / self._free.estimate.figures.throughput_qps,
            is_safe=bool(self._safe))


def _tighter_s(target_s: float, searched_s: float, factor: float) -> float:
    """The bound to search with after `target_s`, whose schedule (of latency `searched_s`) needs
    `factor` times as much."""
    if math.isinf(factor):
        return SHRINK_UNKNOWN * min(target_s, searched_s)
    return target_s / factor
