"""Steady-state figures of a replay of a finite job, without its ramp-up and drain."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.constraint import Constraint, Metric
from xgpt.core.lengths import BoolArray, FloatArray, IntArray, Lengths
from xgpt.core.problem import QueryTimes
from xgpt.core.schedule import Estimate
from xsimulator.replay.records import PoolRecords, ReplayResult

ROUNDING = 1e-9  # chosen: times that differ by a smaller share of the last one are equal
LEAST_COUNTED = 0.5  # chosen: least share of the requests that must count without the drain
LEAST_NEAR = 30  # chosen: requests of about the limit's output length whose latency is averaged
NEAR, _NEAR_TOKENS = 0.03, 2  # chosen: outputs this near to the length, as a share or in tokens


def enough_queries(estimate: Estimate, *, least: int, rounds: int, most: int) -> int:
    """Number of requests of a replay for steady state: `rounds` times those in the system, between
    `least` and `most`. It is for one replica, or for all together if they are unequal."""
    shapes = estimate.shapes if estimate.others else (estimate.one_copy,)
    return min(most, sum(shape.deployment.replicas * max(least, math.ceil(
        rounds * shape.most_in_system)) for shape in shapes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadyFigures:
    """Steady-state figures of a replay, within one window.

    `latency_s`: at the kind and quantile of the latency limit, nan if no request counts. `ttft_s`
    (from the start of the encoding) and `tpot_s`: quantiles over requests, nan likewise."""

    throughput_qps: float
    latency_s: float
    ttft_s: float
    tpot_s: float
    in_system: float  # requests between the start of their encoding and their last token, mean
    utilisation: FloatArray  # [stages of all pools] share of the window at work
    queries: int  # done within the window


def steady_figures(result: ReplayResult, constraint: Constraint,
                   outputs: Lengths) -> SteadyFigures | None:
    """The steady-state figures of a replay; None if the job is too short.

    The window begins when requests have been coming out for as long as a slow one takes. It ends
    with the last token before the last encoding starts. Requests come out at both ends, so static
    batches are counted whole."""
    def busy_s(begin_s: float, end_s: float) -> FloatArray:
        return np.concatenate([_busy_s(pool, begin_s, end_s) for pool in result.pools])

    return steady_from_times(result.times, result.output_tokens, busy_s, constraint, outputs)


def steady_from_times(times: QueryTimes, output_tokens: IntArray,
              busy_s: Callable[[float, float], FloatArray], constraint: Constraint,
              outputs: Lengths) -> SteadyFigures | None:
    """Steady-state figures as of `steady_figures`, from the requests' times and tokens.
    busy_s(begin_s, end_s): [stages of all pools] seconds at work."""
    start_s, query_latency_s = times.start_s, times.latency_s
    own_end_s = start_s + query_latency_s
    done_s = np.sort(own_end_s)
    if len(done_s) < 4:
        return None
    slow_s = quantile(query_latency_s, 0.99)
    # times of steps that coincide differ in the last digits
    near_s = ROUNDING * done_s[-1]
    begin = np.searchsorted(done_s, max(done_s[0] + slow_s, done_s[len(done_s) // 10]) - near_s)
    end = np.searchsorted(done_s, start_s.max() + near_s, side="right") - 1
    if begin >= len(done_s) or end <= begin or done_s[end] <= done_s[begin]:
        return None
    begin_s, end_s = float(done_s[begin]), float(done_s[end])
    counted = int(np.searchsorted(done_s, end_s + near_s, side="right")
                  - np.searchsorted(done_s, begin_s + near_s, side="right"))
    present = np.clip(np.minimum(own_end_s, end_s) - np.maximum(start_s, begin_s), 0.0, None)
    within = (own_end_s > begin_s + near_s) & (own_end_s <= end_s + near_s)
    counts = (start_s >= begin_s - slow_s - near_s) & (start_s <= end_s + near_s)
    # requests that begin later meet the drain, whose steps encode nothing
    undrained = counts & (start_s <= end_s - slow_s + near_s)
    if undrained.sum() >= LEAST_COUNTED * counts.sum():
        counts = undrained
    if not counts.any() or not within.any():
        return None  # static batches so large that none begins inside the window
    latency_s, ttft_s, tpot_s = limited_s(times, output_tokens, constraint, outputs, counts)
    return SteadyFigures(
        throughput_qps=counted / (end_s - begin_s), latency_s=latency_s, ttft_s=ttft_s,
        tpot_s=tpot_s,
        in_system=float(present.sum() / (end_s - begin_s)), queries=counted,
        # rounding may put the sum above the window
        utilisation=np.minimum(busy_s(begin_s, end_s) / (end_s - begin_s), 1.0))


def limited_s(times: QueryTimes, output_tokens: IntArray, constraint: Constraint, outputs: Lengths,
              counts: BoolArray | slice = slice(None)) -> tuple[float, float, float]:
    """Latency, TTFT (from the start of the prefill) and TPOT of the requests `counts`, in seconds,
    each at the kind and quantile of its limit."""
    latency_s, first_s = times.latency_s[counts], times.first_token_s[counts]
    if constraint.kind == "sequence":
        bound_s = _latency_of_length(output_tokens[counts], latency_s,
                                     outputs.quantile(constraint.quantile))
    else:
        bound_s = quantile(latency_s, constraint.quantile)
    after = output_tokens[counts] - 1
    tpot_s = ((times.last_token_s[counts] - first_s) / np.maximum(after, 1))[after > 0]
    return (bound_s, _metric_quantile(first_s - times.start_s[counts], constraint, "ttft"),
            _metric_quantile(tpot_s, constraint, "tpot"))


def combine_unlike(found: Sequence[SteadyFigures | None]) -> SteadyFigures | None:
    """The figures of unequal replicas together; None if a replica has no steady state. Throughputs
    add up. Of times the longest counts, since each replica must keep the limits."""
    copies = [one for one in found if one is not None]
    if len(copies) < len(found):
        return None

    def most(name: str) -> float:
        return max((s for one in copies if not math.isnan(s := getattr(one, name))),
                   default=math.nan)

    return SteadyFigures(
        throughput_qps=sum(one.throughput_qps for one in copies), latency_s=most("latency_s"),
        ttft_s=most("ttft_s"), tpot_s=most("tpot_s"),
        in_system=sum(one.in_system for one in copies), queries=sum(one.queries for one in copies),
        utilisation=np.concatenate([one.utilisation for one in copies]))


def _metric_quantile(seconds: FloatArray, constraint: Constraint, metric: Metric) -> float:
    """The quantile of `seconds` that the metric's limit names, or the latency limit's quantile if
    the metric has no limit."""
    bound = constraint.bound_on(metric) or constraint.latency
    return quantile(seconds, bound.quantile) if len(seconds) else float("nan")


def quantile(values: FloatArray, share: float) -> float:
    """The quantile `share` of finite `values`, as np.quantile in a quarter of the time."""
    at = share * (len(values) - 1)
    low = math.floor(at)
    near = np.partition(values, [low, min(low + 1, len(values) - 1)])[low:low + 2]
    rise, beyond = near[-1] - near[0], at - low
    return float(near[0] + rise * beyond if beyond < 0.5 else near[-1] - rise * (1 - beyond))


def _latency_of_length(outputs: IntArray, latency_s: FloatArray, length: int) -> float:
    """Mean latency, in seconds, of the requests of output length `length`.

    If they are few, the nearest shorter ones count too, plus the mean time of the tokens that these
    lack. Longer ones do not count, since one more phase of RRA makes the latency jump."""
    off = length - outputs
    below = off >= 0
    if not below.any():
        return float("nan")
    place = min(LEAST_NEAR, int(below.sum())) - 1
    enough = np.partition(off[below], place)[place]
    near = below & (off <= min(enough, max(_NEAR_TOKENS, NEAR * length)))
    if not near.any():
        return float("nan")
    spread = float(outputs.var())
    slope = float(np.cov(outputs, latency_s, bias=True)[0, 1]) / spread if spread > 0 else 0.0
    return float(latency_s[near].mean() + max(slope, 0.0) * off[near].mean())


def _busy_s(pool: PoolRecords, begin_s: float, end_s: float) -> FloatArray:
    """[stages] seconds at work within the window."""
    inside = np.minimum(pool.end_s, end_s) - np.maximum(pool.start_s, begin_s)
    return np.asarray(np.clip(inside, 0.0, None).sum(axis=0))
