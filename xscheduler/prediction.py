"""What a problem's finite job is expected to measure: its lengths as far as they are known, in the
order in which a run takes the queries up."""

from __future__ import annotations

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.query_lengths import QueryLengths
from xgpt.core.schedule import Estimate
from xgpt.core.workload import synthetic_lengths
from xprofiler.timing import TimingSource
from xrunner.rules.order import run_order, window_of
from xsimulator.replay.predict import JobPrediction, predict_job


def predict(problem: Problem, timing: TimingSource, estimate: Estimate, *,
            replays: int = 5) -> JobPrediction | None:
    """With fill and drain, the mean of so many replays where lengths are not all known; None
    without queries."""
    if problem.num_queries is None:
        return None
    rng = np.random.default_rng(problem.seed)
    known = job_lengths(problem, estimate)
    if known is None:
        return predict_job(problem, timing, estimate, problem.num_queries, rng, replays=replays)
    if not len(known.inputs):
        return None
    return predict_job(problem, timing, estimate, len(known.inputs), rng, known=known,
                       replays=replays)


def job_lengths(problem: Problem, estimate: Estimate) -> QueryLengths | None:
    """Lengths of the queries that the schedule can run (the others become error records, and take
    no time), in the order in which it takes them up; None where a model's tokenizer would have to
    say how long they are."""
    known = problem.queries
    if problem.is_synthetic and problem.num_queries is not None:
        inputs, outputs = synthetic_lengths(problem.lengths, problem.num_queries, problem.seed)
        known = QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs)
    if known is None:
        return None
    runs = known.reserves <= estimate.deployment.group_kv_tokens
    runs &= known.inputs < (problem.model.max_positions or np.inf)
    runs &= known.inputs <= (estimate.deployment.encoding.kv_tokens or np.inf)
    rows = np.flatnonzero(runs)
    return known.take(rows[in_run_order(problem, estimate, len(rows))])


def in_run_order(problem: Problem, estimate: Estimate, count: int) -> list[int]:
    """Places of `count` queries in the order in which a run takes them up."""
    window = window_of(problem.adjustment.shuffle, estimate.figures.encode_batch)
    return run_order(count, window, problem.seed)
