"""What a session's finite job is expected to measure: its lengths as far as they are known, in the
order in which a run takes the queries up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xgpt.app.session import Session, reserve_tokens
from xgpt.core.lengths import IntArray
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.workload import synthetic_lengths
from xprofiler.timing import TimingSource
from xrunner.rules.order import run_order, window_of

if TYPE_CHECKING:
    from xsimulator.replay.predict import JobPrediction


class JobLengths(NamedTuple):
    """Tokens of each query that runs, in the order in which it is taken up, [queries]. `outputs`:
    None where they depend on what the model says."""

    inputs: IntArray
    most_outputs: IntArray
    outputs: IntArray | None


def predict(session: Session, timing: TimingSource, schedule: Schedule, *,
            replays: int = 5) -> JobPrediction | None:
    """With fill and drain, the mean of so many replays where lengths are not all known; None
    without queries."""
    from xsimulator.replay.predict import predict_job

    problem, rng = session.problem, np.random.default_rng(session.job.run.seed)
    if problem.num_queries is None:
        return None
    known = job_lengths(session, schedule)
    if known is None:
        return predict_job(problem, timing, schedule.estimate, problem.num_queries, rng,
                           replays=replays)
    if not len(known.inputs):
        return None
    return predict_job(problem, timing, schedule.estimate, len(known.inputs), rng,
                       replays=replays, inputs=known.inputs, outputs=known.outputs,
                       max_outputs=known.most_outputs.tolist())


def job_lengths(session: Session, schedule: Schedule) -> JobLengths | None:
    """Of the requests that the schedule can run (the others become error records, and take no
    time); None where a model's tokenizer would have to say how long they are."""
    job, problem, estimate = session.job, session.problem, schedule.estimate
    if job.workload.requests is None:
        if problem.num_queries is None:
            return None
        inputs, most = synthetic_lengths(problem.lengths, problem.num_queries, job.run.seed)
        is_forced = True
    else:
        reserves = reserve_tokens(session)
        if reserves is None or session.input_lengths is None:
            return None
        inputs, most = session.input_lengths, reserves - session.input_lengths
        is_forced = all(r.forced_tokens is not None and not r.stop for r in session.requests)
    runs = inputs + most <= estimate.deployment.group_kv_tokens
    runs &= inputs < (problem.model.max_positions or np.inf)
    runs &= inputs <= (estimate.deployment.encoding.kv_tokens or np.inf)
    order = in_run_order(session, estimate, int(runs.sum()))
    inputs, most = inputs[runs][order], most[runs][order]
    return JobLengths(inputs, most, most if is_forced else None)


def in_run_order(session: Session, estimate: Estimate, count: int) -> list[int]:
    """Places of `count` queries in the order in which a run takes them up."""
    window = window_of(session.problem.adjustment.shuffle, estimate.figures.encode_batch)
    return run_order(count, window, session.job.run.seed)
