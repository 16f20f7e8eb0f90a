"""What one finite job will measure: its policy's own rule on sampled lengths, from fill to drain.

The closed form describes a job without end; one of a few hundred queries is mostly ramp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import IntArray, JointLengths
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.job import Replayer, planned_outputs, replay_job
from xsimulator.replay.steady import steady_figures

# of a replay that checks a latency: queries at least and at most, and times what is in the system
CHECKED_QUERIES, MOST_CHECKED, CHECKED_ROUNDS = 8000, 50_000, 12
MIN_NEIGHBOURS = 8  # observed pairs near a known input among which its output is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrediction:
    """Means over replays; percentiles are over one job's queries."""

    throughput_qps: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    wall_s: float


def replay_latency_s(problem: Problem, timing: TimingSource, estimate: Estimate,
                     seed: int) -> float:
    """The steady state's latency of the bound's kind and quantile in a replay of sampled queries;
    nan where none is long enough to count."""
    present = estimate.most_in_system
    count = min(max(CHECKED_QUERIES, math.ceil(CHECKED_ROUNDS * present)), MOST_CHECKED)
    inputs, outputs = sample_job(problem.lengths, count, np.random.default_rng(seed), None)
    result = replay_job(problem, timing, estimate, inputs=inputs, outputs=outputs)
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    return float("nan") if steady is None else steady.latency_s


def predict_job(problem: Problem, timing: TimingSource, estimate: Estimate, num_queries: int,
                rng: np.random.Generator, *, replays: int = 5, inputs: IntArray | None = None,
                outputs: IntArray | None = None, max_outputs: Sequence[int] | None = None
                ) -> JobPrediction:
    """Predict a job of `num_queries` executed by `estimate`.

    inputs, outputs: [num_queries] lengths in order where they are known, else sampled (outputs
    are known only where inputs are, and need one replay). max_outputs: [num_queries] most tokens
    each query may generate (what it reserves), else what the problem plans with.
    Raises XgptError for a query that the schedule's KV budget can never hold.
    """
    assert inputs is None or len(inputs) == num_queries, f"{num_queries = }"
    lengths = problem.lengths
    most = np.full(num_queries, planned_outputs(problem)) if max_outputs is None else np.asarray(
        max_outputs, np.int64)
    replayer, figures = Replayer(problem, timing, estimate), []
    for _ in range(replays if outputs is None else 1):
        own, given = (inputs, outputs) if inputs is not None and outputs is not None else (
            sample_job(lengths, num_queries, rng, inputs))
        given = np.minimum(given, most)
        result = replayer.run(own, given, max_outputs=most)
        p50, p99 = np.quantile(result.latency_s, [0.5, 0.99])
        wall_s = result.makespan_s
        figures.append((num_queries / wall_s, given.sum() / wall_s, p50, p99, wall_s))
    mean = np.mean(figures, axis=0)
    return JobPrediction(throughput_qps=float(mean[0]), output_tokens_per_s=float(mean[1]),
                         latency_p50_s=float(mean[2]), latency_p99_s=float(mean[3]),
                         wall_s=float(mean[4]))


def sample_job(lengths: JointLengths, count: int, rng: np.random.Generator,
               inputs: IntArray | None) -> tuple[IntArray, IntArray]:
    """(inputs, outputs) of a job of `count` queries; outputs go with the inputs where those are
    known and the two are correlated."""
    if inputs is None:
        return lengths.sample(count, rng)
    known = np.asarray(inputs, np.int64)
    if lengths.pairs is None:
        return known, lengths.outputs.sample(count, rng)
    return known, _outputs_given_inputs(lengths.pairs, known, rng)


def _outputs_given_inputs(pairs: IntArray, inputs: IntArray, rng: np.random.Generator) -> IntArray:
    """Outputs drawn among the observed pairs whose inputs are nearest in rank: sqrt(n) of them,
    enough to blur no correlation and to repeat no single observation."""
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    window = min(max(int(np.sqrt(len(ordered))), MIN_NEIGHBOURS), len(ordered))
    lowest = np.searchsorted(ordered[:, 0], inputs, side="left")
    highest = np.searchsorted(ordered[:, 0], inputs, side="right")
    first = np.clip((lowest + highest - window) // 2, 0, len(ordered) - window)
    drawn: IntArray = ordered[first + rng.integers(window, size=len(inputs)), 1]
    return drawn
