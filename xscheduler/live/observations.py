"""Estimate of the output lengths from a running job, and its difference from the plan.

Requests that finish first have short outputs, so the mean of the finished ones is too low. A
request still at work has an output longer than the tokens it has written. Requests are admitted in
the order of the file, independent of their lengths. So the product-limit estimate (Kaplan and
Meier, 1958) of both is unbiased up to the longest time that requests were watched. Beyond it, the
planned distribution is used.

Symbols: d(k) requests ended with token k, of n(k) that wrote it; S(k) = P(length > k) = product of
1 - d(j) / n(j) over j <= k. The variance of the mean, the sum of S, is Greenwood's."""

import math
from dataclasses import dataclass, replace

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths, Lengths, joint_empirical
from xscheduler.live.step_monitor import BEYOND_CHANCE
from xscheduler.margin import MOST_DRAWN

LEAST_QUERIES = 50  # chosen: requests done before they count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """[n, 2] (input, output) tokens of finished requests, and of active ones so far."""

    finished: IntArray
    active: IntArray

    @property
    def num_finished(self) -> int:
        return len(self.finished)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedLengths:
    """Estimated output lengths. unknown: probability of outputs longer than any that was observed;
    their lengths are the plan's. mean_error: standard error of the mean, in tokens."""

    outputs: Lengths
    unknown: float
    mean_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Difference of the output lengths, in tokens, from the plan. It is true if the mean or the
    length at the limit's `quantile` is off (is_mean, is_quantile_off)."""

    planned_mean: float
    observed_mean: float
    planned_quantile: int
    observed_quantile: int
    quantile: float
    num_finished: int
    is_mean: bool
    is_quantile_off: bool

    def __bool__(self) -> bool:
        return self.is_mean or self.is_quantile_off


def observed_lengths(observation: Observation, planned: Lengths, longest: int) -> ObservedLengths:
    """The product-limit estimate of the output lengths. longest: most tokens of an output."""
    ends, watched = observation.finished[:, 1], observation.active[:, 1]
    top = int(max(ends.max(initial=1), watched.max(initial=1)))
    done = np.bincount(ends, minlength=top + 1)[1:top + 1]
    at_risk = _at_least(ends, top) + _at_least(watched, top)
    hazard = done / np.maximum(at_risk, 1)
    survival = np.cumprod(1 - hazard)
    before = np.concatenate([[1.0], survival[:-1]])
    pmf, unknown = before * hazard, float(survival[-1])
    tail = _tail(planned, top, longest)
    whole = np.zeros(max(top, len(tail)))
    whole[:top] += pmf
    whole[:len(tail)] += unknown * tail
    whole = np.trim_zeros(whole, "b")
    outputs = Lengths(pmf=whole / whole.sum(), num_samples=max(observation.num_finished, 1),
                      note=f"observed in the run, {observation.num_finished} requests done")
    return ObservedLengths(outputs=outputs, unknown=unknown, mean_error=_greenwood(
        hazard, at_risk, survival))


def length_drift(planned: Lengths, observed: ObservedLengths, *, threshold: float, quantile: float,
             ) -> Drift:
    """The difference from the plan. The mean, or the length at the quantile, is off if it differs
    by more than a share `threshold` and by more than BEYOND_CHANCE standard errors."""
    own = observed.outputs
    count = own.num_samples or 1
    error = observed.mean_error
    if planned.num_samples is not None:
        error = math.hypot(error, planned.std / math.sqrt(planned.num_samples))
    away = abs(own.mean - planned.mean)
    reach, beyond = planned.quantile(quantile), 1 - quantile
    chance = BEYOND_CHANCE * math.sqrt(beyond * quantile / count)
    above = _exceed(own, math.floor(reach * (1 + threshold))) - beyond
    below = beyond - _exceed(own, math.floor(reach * (1 - threshold)))
    return Drift(planned_mean=planned.mean, observed_mean=own.mean, planned_quantile=reach,
                 observed_quantile=own.quantile(quantile), quantile=quantile, num_finished=count,
                 is_mean=away > max(threshold * planned.mean, BEYOND_CHANCE * error),
                 is_quantile_off=max(above, below) > chance)


def joint_lengths(observation: Observation, observed: ObservedLengths,
                  planned: JointLengths) -> JointLengths:
    """Joint distribution of input and observed output lengths. If the two are correlated it has the
    observed pairs, else the planned inputs, which are known better."""
    pairs = _weighted_pairs(observation, observed)
    inputs, outputs = pairs[:, 0], pairs[:, 1]
    if inputs.std() > 0 and outputs.std() > 0 and math.sqrt(len(observation.finished)) * abs(
            np.corrcoef(inputs, outputs)[0, 1]) > BEYOND_CHANCE:
        joint = joint_empirical(pairs, observed.outputs.note)
        count = observed.outputs.num_samples
        return replace(joint, inputs=replace(joint.inputs, num_samples=count),
                       outputs=replace(joint.outputs, num_samples=count))
    return JointLengths(inputs=planned.inputs, outputs=observed.outputs)


def _at_least(values: IntArray, top: int) -> IntArray:
    """[top] number of `values` that are at least k, for k = 1..top."""
    counts = np.bincount(values, minlength=top + 1)[:top + 1]
    at_least: IntArray = counts[::-1].cumsum()[::-1][1:]
    return at_least


def _tail(planned: Lengths, top: int, longest: int) -> FloatArray:
    """[tokens] planned probabilities of lengths beyond `top`, else all of it at `longest`."""
    size = max(planned.max, longest, top + 1)
    tail = np.zeros(size)
    tail[:planned.max] = planned.pmf
    tail[:top] = 0.0
    if tail.sum() <= 0:
        tail[max(longest, top + 1) - 1] = 1.0
    trimmed: FloatArray = np.trim_zeros(tail / tail.sum(), "b")
    return trimmed


def _greenwood(hazard: FloatArray, at_risk: IntArray, survival: FloatArray) -> float:
    """Standard error of the mean (Greenwood's formula), up to the longest time watched."""
    after = survival[::-1].cumsum()[::-1]  # sum of S(j), j >= k
    open_ = (hazard > 0) & (hazard < 1)
    terms = after[open_] ** 2 * hazard[open_] / ((1 - hazard[open_]) * at_risk[open_])
    return float(np.sqrt(terms.sum()))


def _exceed(lengths: Lengths, length: int) -> float:
    return float(lengths.pmf[max(length, 0):].sum())


def _weighted_pairs(observation: Observation, observed: ObservedLengths) -> IntArray:
    """[MOST_DRAWN, 2] (input, output) pairs, each as often as its weight: of finished requests the
    probability of their length, of the longest active ones a share of that of longer outputs."""
    pmf, ends = observed.outputs.pmf, observation.finished[:, 1]
    same = np.bincount(ends, minlength=len(pmf) + 1)
    pairs, weights = observation.finished, pmf[ends - 1] / same[ends]
    top = int(max(ends.max(initial=1), observation.active[:, 1].max(initial=1)))
    longest = observation.active
    if len(longest):
        longest = longest[longest[:, 1] >= np.quantile(longest[:, 1], 0.8)]
    if len(longest) and observed.unknown > 0:
        rest = pmf[top:] / max(pmf[top:].sum(), 1e-300)
        places = (np.arange(len(longest)) + 0.5) / len(longest)
        lengths = top + 1 + np.searchsorted(np.cumsum(rest), places)
        pairs = np.concatenate([pairs, np.stack([longest[:, 0], lengths], axis=1)])
        weights = np.concatenate([weights, np.full(len(longest), observed.unknown / len(longest))])
    edges = np.cumsum(weights) / weights.sum()
    rows = np.searchsorted(edges, (np.arange(MOST_DRAWN) + 0.5) / MOST_DRAWN)
    drawn: IntArray = pairs[np.minimum(rows, len(pairs) - 1)]
    return drawn
