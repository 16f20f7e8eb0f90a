"""Safety margins.

A schedule is planned for limit / factor, so that P(latency <= limit) is at least the constraint's
`confidence`. The factor covers these causes:

- *Times*, measured: each table of a profile has one relative error, common to all steps that use
  it and independent of the other tables' (xprofiler.profile_timing.TableError). An imported
  profile has one more error common to all tables. The effect of each error on the latency is found
  with that table's times raised. Effects add as squares, and their sum is taken as log-normal. A
  briefly measured profile has a least error. The scatter of single steps is ignored, since a
  request takes hundreds of them.

- *Times*, computed (roofline): the error of published runs at the same level of doubt
  (xprofiler.doubt), common to all steps.

- *Lengths*: observed lengths are a sample. LEVELS resampled distributions (smoothed bootstrap,
  fixed seed) take its place. Given distributions are taken as true.

- *Sample*: a limit on a share of all requests is one on the job's own, which are a sample of the
  distribution (xscheduler.job_sample).

- *Inputs*: if input lengths were estimated from characters, all of them are longer or shorter by
  one log-normal factor (xrunner.files.runnable). Its effect adds to that of the times.

- *Drift*: the mean output length may differ by the constraint's `drift` in either direction, with
  the same standard deviation. The worse direction is a factor of its own. The length that the limit
  is for drifts along, since it is a quantile.

An effect is the ratio of two figures of the rough formula (xsimulator.rough) for the schedule's own
layers and control variables; the latency itself comes from a replay. Known error: the formula lets
WAA's decode batch grow with longer outputs, which `max_in_system` prevents in a run. The margin is
then too large."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from xgpt.core.cluster import Cluster, Link
from xgpt.core.constraint import Constraint, Metric
from xgpt.core.lengths import (
    FloatArray,
    JointLengths,
    bootstrap,
    mixture_quantile,
    ndtri,
    with_longer_inputs,
    with_output_moments,
)
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Margin
from xgpt.core.units import format_seconds
from xprofiler.doubt import LEVELS as DOUBTS
from xprofiler.doubt import Doubt
from xprofiler.profile import TableKey
from xprofiler.profile_timing import MOST_NOISE, TableError
from xprofiler.raised import raised
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.job_sample import LEVELS, log_ratios, quantile_levels

MOST_DRAWN = 2000  # chosen: lengths drawn of a larger sample, whose scatter is scaled accordingly
LEAST_STEP = 0.01  # chosen: share by which a table's times are raised if its error is smaller
_SEED = 20240427


@runtime_checkable
class Measured(Protocol):
    """A timing source with known errors: one of each table, and one common to all."""

    def table_errors(self) -> Mapping[TableKey, TableError]: ...

    @property
    def common_error(self) -> float: ...

    @property
    def kind_of_times(self) -> str: ...


@runtime_checkable
class Computed(Protocol):
    """A timing source of computed times."""

    def doubt(self, tp_degree: int = 1, stages: int = 1, link: Link | None = None) -> Doubt:
        """The doubt about times of a group of this degree over this link, in a pipeline of so many
        stages. None: the link that measured runs had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginParts:
    """A safety margin: plan for limit / `factor`. The other factors are of one cause alone. remedy:
    words, for a refusal, on how to make the margin smaller."""

    factor: float
    sentence: str
    timing: float = 1.0
    lengths: float = 1.0
    sample: float = 1.0
    inputs: float = 1.0
    drift: float = 1.0
    remedy: str = ""

    def kept(self, cost: float = 0.0) -> Margin:
        """The margin as part of a schedule. cost: share of throughput that it costs."""
        return Margin(factor=self.factor, cost=cost, note=self.sentence)


class Margins:
    """Safety margins of one problem's estimates; resampled distributions are made once."""

    def __init__(self, problem: Problem, evaluator: Evaluator, *,
                 is_of_job: bool = True) -> None:
        """evaluator: of the problem, under any limit. is_of_job: the problem's requests are the
        whole job that the limit is for, not the rest of it."""
        self.problem, self.evaluator = problem, evaluator
        timing = evaluator.timing
        self._timing = timing
        self._kind_of_times = timing.kind_of_times if isinstance(timing, Measured) else ""
        self._errors = timing.table_errors() if isinstance(timing, Measured) else {}
        self._common = timing.common_error if isinstance(timing, Measured) else 0.0
        # computed times are medians: they need no margin for a confidence of 0.5
        self._computed = timing if (
            isinstance(timing, Computed) and problem.constraint.confidence > 0.5) else None
        self._variants: dict[Hashable, Evaluator] = {}  # with other times or lengths
        lengths = problem.lengths
        self._counts = [part.num_samples for part in (lengths.inputs, lengths.outputs)
                        if part.num_samples is not None]  # samples that lengths were estimated from
        self._levels = quantile_levels(problem) if is_of_job else np.empty(0)
        # lower bound on the latency margin of every schedule
        self.least_factor = 1.0 if not self._computed or self.is_certain("latency") else min(
            self._computed.doubt(degree).factor(problem.constraint.confidence)
            for degree in range(1, problem.cluster.num_devices + 1))

    def is_certain(self, metric: Metric) -> bool:
        """Whether there is no known uncertainty, or no limit."""
        constraint = self.problem.constraint
        has_limit = math.isfinite(constraint.limit_s(metric)) or (
            metric == "deadline" and constraint.bound_on(metric) is not None)
        return not has_limit or not (
            self._errors or constraint.drift or self._counts or self.problem.input_error
            or self._computed or (metric == "latency" and len(self._levels)))

    def margin(self, estimate: Estimate, metric: Metric = "latency") -> MarginParts:
        """The safety margin on a metric. The sentence is for latency only. The margins of
        makespan and deadlines are that of the seconds which one more request adds."""
        confidence = self.problem.constraint.confidence
        if self.is_certain(metric):
            return self._worded(MarginParts(factor=1.0, sentence=""), 0.0, None)
        expected_s = self.evaluator.seconds(estimate, metric)
        if expected_s <= 0:  # outputs of one token have no second one
            return MarginParts(factor=1.0, sentence="")
        of_times, unmeasured = self._timing_spread(estimate, metric)
        doubt = doubt_of_estimate(self._computed, estimate, self.problem.cluster)
        computed = 1.0 if doubt is None else doubt.factor(confidence)
        of_inputs = self._input_spread(estimate, metric)
        spread = math.hypot(of_times, of_inputs)
        ratios = np.array([shrunk * math.log(
            self._variant(index, lengths).seconds(estimate, metric) / expected_s)
            for index, (lengths, shrunk) in enumerate(self._replicates)] or [0.0])
        constraint = self.problem.constraint
        sampled = log_ratios(
            self._levels if metric == "latency" else np.empty(0), constraint.quantile,
            lambda level: self._variant(("level", level), constraint=constraint.with_latency(
                quantile=level)).seconds(estimate, metric))
        drift = max((self._variant(("drift", change), lengths).seconds(estimate, metric)
                     / expected_s for change, lengths in self._drifted.items()), default=1.0)
        return self._worded(MarginParts(
            factor=(drift * computed
                    * _factor(np.add.outer(ratios, sampled).ravel(), spread, confidence)),
            timing=computed * _factor(np.zeros(1), of_times, confidence), drift=drift,
            inputs=_factor(np.zeros(1), of_inputs, confidence),
            lengths=_factor(ratios, 0.0, confidence), sample=_factor(sampled, 0.0, confidence),
            sentence=""),
            unmeasured, doubt)

    def _timing_spread(self, estimate: Estimate, metric: Metric) -> tuple[float, float]:
        """(standard deviation of log(metric) due to times, share that no table explains)."""
        expected_s = self.evaluator.seconds(estimate, metric)
        degrees = {stage.tp_degree for stage in estimate.deployment.stages}
        square, explained = self._common**2, 0.0
        for key, error in self._errors.items():
            if not key.link and key.tp_degree not in degrees:
                continue
            step = max(error.relative, LEAST_STEP)
            longer = self._variant(key, timing=raised(self._timing, key, 1 + step))
            effect = math.log(longer.seconds(estimate, metric) / expected_s)
            explained += effect / math.log1p(step)
            square += (effect * error.relative / step) ** 2
        return math.sqrt(square), max(1 - explained, 0.0)

    def _input_spread(self, estimate: Estimate, metric: Metric) -> float:
        """Standard deviation of log(metric) due to estimated input lengths."""
        if not (error := self.problem.input_error):
            return 0.0
        longer = self._variant("inputs", with_longer_inputs(self.problem.lengths, math.exp(error)))
        expected_s = self.evaluator.seconds(estimate, metric)
        return max(math.log(longer.seconds(estimate, metric) / expected_s), 0.0)

    @cached_property
    def _replicates(self) -> list[tuple[JointLengths, float]]:
        if not self._counts:
            return []
        rng = np.random.default_rng(_SEED)
        shrunk = math.sqrt(min(MOST_DRAWN / min(self._counts), 1.0))
        return [(bootstrap(self.problem.lengths, rng, MOST_DRAWN), shrunk)
                for _ in range(LEVELS)]

    @cached_property
    def _drifted(self) -> dict[float, JointLengths]:
        """{change of the mean: lengths}, including no change, which no worst case beats."""
        lengths, drift = self.problem.lengths, self.problem.constraint.drift
        changes = (-drift, -drift / 2, 0.0, drift / 2, drift) if drift else ()
        return {change: with_output_moments(lengths, mean_factor=1 + change)
                for change in changes}

    def _variant(self, name: Hashable, lengths: JointLengths | None = None,
                 timing: TimingSource | None = None,
                 constraint: Constraint | None = None) -> Evaluator:
        """An evaluator of the problem with other lengths, times or limits, kept by its name."""
        if name not in self._variants:
            problem = self.evaluator.problem
            self._variants[name] = Evaluator(
                replace(problem, lengths=lengths or problem.lengths,
                        constraint=constraint or problem.constraint),
                timing or self.evaluator.timing)
        return self._variants[name]

    def _worded(self, parts: MarginParts, unmeasured: float, doubt: Doubt | None) -> MarginParts:
        constraint = self.problem.constraint
        if math.isinf(constraint.latency_s):
            return replace(parts, sentence="no margin: there is no latency limit")
        causes = []
        if self._errors:
            kind = self._kind_of_times
            causes.append(f"{parts.timing - 1:.1%} for {kind} step times")
            if any(error.is_brief for error in self._errors.values()):
                causes[-1] += " (measured briefly, at few sizes)"
            if unmeasured > 0.01:
                causes[-1] += (f" ({unmeasured:.0%} of the latency is not measured, and its error "
                               "is not covered)")
            if any(error.is_noisy for error in self._errors.values()):
                causes[-1] += (f" (repeats were disturbed: {MOST_NOISE:.0%} of noise is covered, "
                               "more is not; profile again on a quiet machine)")
            if float(np.mean([error.unknown for error in self._errors.values()])) > 0.5:
                causes[-1] += " (most points have too few samples to show their noise)"
        if doubt is not None:
            parts = replace(parts, remedy=_remedy(doubt, constraint.confidence))
            causes.append(f"{parts.timing - 1:.1%} for computed step times ({doubt.words})")
        if self._counts:
            causes.append(f"{parts.lengths - 1:.1%} for lengths ({min(self._counts)} samples)")
        if parts.sample > 1:
            causes.append(f"{parts.sample - 1:.1%} for sampling (the job's requests are a sample "
                          "of the planned lengths)")
        if self.problem.input_error:
            causes.append(f"{parts.inputs - 1:.1%} for input lengths (estimated from characters, "
                          f"{self.problem.input_error:.0%} off)")
        if constraint.drift:
            causes.append(f"{parts.drift - 1:.1%} for outputs up to {constraint.drift:.0%} longer "
                          "or shorter on average")
        text = "no margin: lengths are given and taken as true" if not causes else (
            f"planned for {format_seconds(constraint.latency_s / parts.factor)}, so that the limit "
            f"of {format_seconds(constraint.latency_s)} holds with {constraint.confidence:.0%} "
            f"probability: {', '.join(causes)}")
        return replace(parts, sentence=text if self._errors or self._computed else (
            f"{text}; the times are computed, and their error is not covered"))


def doubt_of_estimate(timing: object, estimate: Estimate, cluster: Cluster) -> Doubt | None:
    """The greatest doubt about times of the estimate's stages on the cluster; None for times that
    were measured here, or of a source that states no doubt."""
    if not isinstance(timing, Computed):
        return None
    doubts = [timing.doubt(*of) for of in dict.fromkeys(
        (stage.tp_degree, len(shape.deployment.stages), cluster.link_of(stage.ranks))
        for shape in estimate.shapes for stage in shape.deployment.stages)]
    return max(doubts, key=lambda doubt: DOUBTS.index(doubt.level))


def _remedy(doubt: Doubt, confidence: float) -> str:
    """Ways to a smaller margin than that of computed times, in words."""
    lower = [f"{doubt.factor(own) - 1:.0%} at {own:g}" for own in (0.9, 0.8, 0.7)
             if own < confidence]
    return ("Only the margin exceeds the limit. To make it smaller, use a profile measured on "
            "such GPUs, measurements of your own (`xgpt calibrate`), an engine that was compared "
            "with runs on such GPUs (plan.engine), or a lower constraint.confidence (margin for "
            f"the times: {', '.join([*lower, 'none at 0.5'])})")


def _factor(logarithms: FloatArray, spread: float, confidence: float) -> float:
    """exp(upper_limit(...)), at least 1."""
    return max(math.exp(upper_limit(logarithms, spread, confidence)), 1.0)


def upper_limit(logarithms: FloatArray, spread: float, confidence: float) -> float:
    """Upper confidence limit of a log factor. The factor is one of `logarithms`, equally likely,
    plus a normal error of standard deviation `spread`. Infinite if too many logarithms are (the
    profile has no times for such sizes)."""
    count = len(logarithms)
    finite = logarithms[np.isfinite(logarithms)]
    if len(finite) < count and (confidence >= len(finite) / count
                                or confidence > count / (count + 1)):
        return math.inf
    if spread == 0:
        place = min(math.ceil(confidence * (count + 1)), count) - 1
        limit = float(np.sort(logarithms)[place])
    else:
        limit = mixture_quantile(logarithms, spread, confidence)
    if confidence > count / (count + 1) and count > 1:
        # beyond the largest replicate: a normal with their mean and deviation
        total = math.hypot(float(logarithms.std(ddof=1)), spread)
        limit = max(limit, float(logarithms.mean() + ndtri(confidence) * total))
    return limit
