"""Prediction of one finite job, from ramp-up to drain, by replays with sampled lengths.

A schedule's own figures are for steady state; a job of a few hundred requests is mostly ramp-up."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xsimulator.replay.job import planned_outputs, planned_queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import JobReplayer
from xsimulator.replay.steady_state import enough_queries
from xsimulator.sharing import repeated, sharing_of

# Number of requests of a replay that checks a latency: least, most, as a multiple of those in the
# system. WATCHED of them have the length of the limit's quantile. measured: on twelve schedules of
# benchmarks/hand_problems.py latencies scatter by 0.1 to 0.6 % over seeds, and means are within
# 0.2 % of those of twice as many requests.
CHECKED_QUERIES, MOST_CHECKED, CHECKED_ROUNDS, WATCHED = 2500, 50_000, 6, 60
# Fewer requests are enough if few decode together: so many steps, requests and rounds. measured: on
# two schedules with 5 and 23 requests in the system a scatter of 0.1 to 0.2 %, as with 1,500.
CHECKED_STEPS, LEAST_CHECKED, LEAST_ROUNDS = 20_000, 800, 20
# chosen: of a longer job so many requests, evenly spread, are replayed; the rest is extrapolated at
# the throughput of their middle part
MOST_PREDICTED, _MIDDLE = 50_000, (0.2, 0.8)


@dataclass(frozen=True, slots=True, eq=False)
class EndTimes:
    """Ends and deadlines, in seconds, of the requests of a job that have a deadline, [requests] of
    one replay after the other."""

    ends_s: FloatArray
    deadlines_s: FloatArray

    def in_time(self, factor: float = 1.0, delay_s: float = 0.0) -> float:
        """Share of the requests that end by their deadlines, if the job begins `delay_s` later and
        takes `factor` times as long."""
        return float(np.mean(self.ends_s * factor + delay_s <= self.deadlines_s))

    def stretch(self, share: float) -> float:
        """Factor by which all deadlines must be longer, or may be shorter, so that just `share` of
        the requests are in time."""
        place = max(math.ceil(share * len(self.ends_s) - 1e-9), 1) - 1
        return float(np.sort(self.ends_s / self.deadlines_s)[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrediction:
    """Expected throughput, latencies and makespan (`wall_s`) of a job, as means over replays.
    Percentiles are over the requests of one job. TTFT counts from the arrival, `loop_ttft_s` as in
    ReplayResult. TPOT is of requests with more than one output token, None without any.
    `encoded_tokens`: of inputs, without those that requests share. `ends`: None without deadlines.
    `load_s`: before them; None: unknown. `replicas`: of each of several, in the last replay:
    queries, output_tokens, wall_s to its last token, output_tokens_per_s."""

    throughput_qps: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    wall_s: float
    encoded_tokens: float = 0.0
    ends: EndTimes | None = field(default=None, compare=False, repr=False)
    load_s: float | None = None
    loop_ttft_s: float | None = None
    replicas: Sequence[Mapping[str, float]] = field(default=(), compare=False, repr=False)


def num_checked_queries(problem: Problem, estimate: Estimate) -> int:
    """Number of requests of a replay that checks the latency limits."""
    usual = enough_queries(estimate, least=CHECKED_QUERIES, rounds=CHECKED_ROUNDS,
                           most=MOST_CHECKED)
    figures, groups = estimate.figures, estimate.deployment.num_groups
    steps = groups * max(problem.lengths.outputs.mean / max(figures.decode_batch, 1.0),
                         figures.decode_iterations / max(figures.encode_batch, 1e-9))
    least = enough_queries(estimate, least=LEAST_CHECKED, rounds=LEAST_ROUNDS, most=usual)
    return min(usual, max(least, math.ceil(CHECKED_STEPS / steps)))


def with_limit_length(outputs: IntArray, length: int) -> IntArray:
    """`outputs` with the nearest shorter ones set to `length`, so that enough requests have the
    length of the limit. WATCHED of them are set, or fewer of fewer than CHECKED_QUERIES; more would
    delay the others of their batches."""
    off = length - outputs
    rows = np.argsort(np.where(off >= 0, off, np.iinfo(np.int64).max), kind="stable")[
        :math.ceil(WATCHED * min(len(outputs) / CHECKED_QUERIES, 1.0))]
    changed = outputs.copy()
    changed[rows[off[rows] >= 0]] = length
    return np.asarray(changed)


def mean_prediction(results: Iterable[ReplayResult], num_queries: int | None = None,
                    deadlines_s: FloatArray | None = None, load_s: float | None = None,
                    clients: int | None = None) -> JobPrediction:
    """The mean prediction of replays of one job. num_queries: of the whole job, if the replays are
    of only some of its requests. deadlines_s: of those replayed, [requests]. load_s: before it.
    clients: of each replica, of a closed loop."""
    figures, ends_s = [], list[FloatArray]()
    for result in results:
        figures.append(_figures(result, num_queries))
        if deadlines_s is not None:
            longer = figures[-1]["wall_s"] / result.makespan_s
            ends_s.append(longer * result.times.last_token_s[np.isfinite(deadlines_s)])
    mean: dict[str, Any] = {name: float(np.mean([of[name] for of in figures]))
                            for name in figures[0]}
    for name in ("tpot_p50_s", "tpot_p99_s"):
        mean[name] = None if math.isnan(mean[name]) else mean[name]
    own_s = np.empty(0) if deadlines_s is None else deadlines_s[np.isfinite(deadlines_s)]
    replayed = len(result.times.start_s)
    return JobPrediction(
        **mean, load_s=load_s, loop_ttft_s=result.loop_ttft_s(clients), replicas=_of_replicas(
            result, mean["wall_s"] / result.makespan_s, (num_queries or replayed) / replayed),
        ends=None if not len(own_s) else EndTimes(
            np.concatenate(ends_s), np.tile(own_s, len(ends_s))))


def job_replays(replayer: JobReplayer, num_queries: int, rng: np.random.Generator, *,
                known: QueryLengths | None = None, order: IntArray | None = None,
                replays: int = 5) -> Iterator[ReplayResult]:
    """Yields the results of replays of a job of `num_queries` requests.

    known: lengths of its requests; unknown ones are sampled. order: indices of the requests in the
    order of the run (None: as they are); the same are sampled for each. With known outputs there is
    one replay. Raises XgptError for a request that never fits into the cache."""
    assert known is None or len(known.inputs) == num_queries, f"{num_queries = }"
    problem = replayer.problem
    is_sampled = known is None or known.outputs is None
    most = np.full(num_queries, planned_outputs(problem)) if known is None else known.most_outputs
    for _ in range(replays if is_sampled else 1):
        if known is not None and known.outputs is not None:
            inputs, outputs = known.inputs, known.outputs
        else:
            inputs, outputs = sample_job(problem.lengths, num_queries, rng,
                                         None if known is None else known.inputs)
        queries = QueryLengths(inputs=inputs, most_outputs=most, outputs=np.minimum(outputs, most))
        if known is not None:
            queries = replace(known, outputs=queries.outputs)
        yield replayer.run(queries if order is None else queries.take(order))


def makespan_s(result: ReplayResult, num_queries: int) -> float:
    """Makespan of a job of `num_queries` requests, some or all of which were replayed."""
    replayed, wall_s = len(result.times.arrival_s), result.makespan_s
    if num_queries > replayed:
        with np.errstate(invalid="ignore"):  # infinite: unknown times
            first_s, last_s = np.quantile(result.times.last_token_s, _MIDDLE)
        wall_s += (num_queries - replayed) * (last_s - first_s) / (
            replayed * (_MIDDLE[1] - _MIDDLE[0]))
    return wall_s


def _figures(result: ReplayResult, num_queries: int | None = None) -> dict[str, float]:
    """{name: figure} of a JobPrediction for one replay."""
    times, count = result.times, num_queries or len(result.times.arrival_s)
    wall_s = makespan_s(result, count)
    figures = {"throughput_qps": count / wall_s, "wall_s": wall_s,
               "output_tokens_per_s": result.output_tokens.mean() * count / wall_s,
               "encoded_tokens": sum(float(pool.tokens.sum()) for pool in result.pools) * (
                   count / max(len(times.arrival_s), 1))}
    for name, values in (
            ("latency", times.latency_s),
            ("ttft", times.ttft_s * (wall_s / result.makespan_s)),  # all arrive at the beginning
            ("tpot", times.tpot_s(result.output_tokens))):
        with np.errstate(invalid="ignore"):  # infinite: unknown times
            p50, p99 = np.quantile(values, [0.5, 0.99]) if len(values) else (np.nan, np.nan)
        figures |= {f"{name}_p50_s": p50, f"{name}_p99_s": p99}
    return figures


def _of_replicas(result: ReplayResult, longer: float, more: float) -> list[dict[str, float]]:
    """`longer`, `more`: factors on the seconds and requests of what was replayed."""
    found = [(len(own) * more, float(result.output_tokens[own].sum()) * more,
              float(result.times.last_token_s[own].max(initial=0.0)) * longer)
             for own in result.replicas]
    return [{"queries": count, "output_tokens": tokens, "wall_s": wall_s,
             "output_tokens_per_s": tokens / max(wall_s, 1e-9)} for count, tokens, wall_s in found]


def sample_job(lengths: JointLengths, count: int, rng: np.random.Generator,
               inputs: IntArray | None) -> tuple[IntArray, IntArray]:
    """(input tokens, output tokens) of `count` requests, drawn from `lengths`. If inputs are known
    and pairs were observed, outputs are drawn given the inputs."""
    if inputs is None:
        return lengths.sample(count, rng)
    known = np.asarray(inputs, np.int64)
    if lengths.pairs is None:
        return known, lengths.outputs.sample(count, rng)
    return known, _outputs_given_inputs(lengths.pairs, known, rng)


def steady_queries(problem: Problem, estimate: Estimate, count: int,
                   rng: np.random.Generator) -> QueryLengths:
    """`count` requests for the steady state of one replica (of all, if they are unlike), drawn at
    random. Those of an estimate that shares prefixes follow one another as in the job: a random
    sample would share less."""
    sharing = sharing_of(problem) if estimate.shares_prefixes else None
    if sharing is None:
        return planned_queries(problem, *sample_job(problem.lengths, count, rng, None))
    copies = 1 if estimate.others else problem.copies * estimate.deployment.replicas
    known = repeated(sharing.of_replica(problem, copies), count, rng)
    outputs = known.outputs
    if outputs is None:
        outputs = sample_job(problem.lengths, count, rng, known.inputs)[1]
    return replace(planned_queries(problem, known.inputs, outputs), prefixes=known.prefixes)


def _outputs_given_inputs(pairs: IntArray, inputs: IntArray, rng: np.random.Generator) -> IntArray:
    """[requests] output tokens of the sqrt(n) observed pairs whose inputs are nearest in rank."""
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    window = int(np.sqrt(len(ordered)))
    lowest = np.searchsorted(ordered[:, 0], inputs, side="left")
    highest = np.searchsorted(ordered[:, 0], inputs, side="right")
    first = np.clip((lowest + highest - window) // 2, 0, len(ordered) - window)
    return np.asarray(ordered[first + rng.integers(window, size=len(inputs)), 1], np.int64)
