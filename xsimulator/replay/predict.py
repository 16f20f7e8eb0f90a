"""What one finite job will measure: RRA's own rule on sampled lengths, fill and drain included.

The closed form describes a job without end; one of a few hundred queries is mostly ramp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.lengths import IntArray, JointLengths
from xgpt.problem import Problem
from xgpt.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.rra import rra_rule
from xrunner.rules.steps import BatchingRule
from xsimulator.replay.timeline import ReplayResult, step_seconds, timeline
from xsimulator.replay.trace import trace
from xsimulator.stage_times import StageTimes

MIN_NEIGHBOURS = 8  # observed pairs near a known input among which its output is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrediction:
    """Means over replays; percentiles are over one job's queries."""

    throughput_qps: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    wall_s: float


def replay(rule: BatchingRule, times: StageTimes, *, inputs: IntArray, outputs: IntArray,
           reserve_tokens: IntArray, is_encoder_decoder: bool, padded: bool) -> ReplayResult:
    """Run a finite job of these lengths, in this order, by `rule`."""
    iterations = outputs - (0 if is_encoder_decoder else 1)
    assert (iterations >= 0).all() and len(inputs) == len(outputs), f"{outputs.min() = }"
    steps = trace(rule, inputs, iterations, reserve_tokens)
    return timeline(steps, step_seconds(times, steps, inputs, padded=padded))


def predict_job(problem: Problem, timing: TimingSource, estimate: Estimate, num_queries: int,
                rng: np.random.Generator, *, replays: int = 5, inputs: IntArray | None = None,
                max_outputs: Sequence[int] | None = None, padded: bool = True) -> JobPrediction:
    """Predict a job of `num_queries` executed by `estimate`.

    inputs: [num_queries] known input lengths in order, else sampled. max_outputs: [num_queries]
    most tokens each query may generate (what it reserves), else what the problem plans with.
    Raises XgptError for a query that the schedule's KV budget can never hold.
    """
    assert inputs is None or len(inputs) == num_queries, f"{num_queries = }"
    lengths = problem.lengths
    times = StageTimes(problem.model, problem.cluster, timing, problem.dtype, estimate.stages,
                       mean_input=lengths.inputs.mean)
    planned = max(lengths.outputs.max, problem.default_max_tokens)
    most = np.full(num_queries, planned) if max_outputs is None else np.asarray(
        max_outputs, np.int64)
    figures = []
    for _ in range(replays):
        own, outputs = _sample(lengths, num_queries, rng, inputs)
        outputs = np.minimum(outputs, most)
        result = replay(rra_rule(estimate), times, inputs=own, outputs=outputs,
                        reserve_tokens=own + most, padded=padded,
                        is_encoder_decoder=problem.model.is_encoder_decoder)
        p50, p99 = np.quantile(result.latency_s, [0.5, 0.99])
        wall_s = result.makespan_s
        figures.append((num_queries / wall_s, outputs.sum() / wall_s, p50, p99, wall_s))
    mean = np.mean(figures, axis=0)
    return JobPrediction(throughput_qps=float(mean[0]), output_tokens_per_s=float(mean[1]),
                         latency_p50_s=float(mean[2]), latency_p99_s=float(mean[3]),
                         wall_s=float(mean[4]))


def _sample(lengths: JointLengths, count: int, rng: np.random.Generator,
            inputs: IntArray | None) -> tuple[IntArray, IntArray]:
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
