"""Predictions of a run: of a batch job by replays of its requests before it begins, of one whose
requests arrive over time by a replay of these afterwards."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.core.errors import XgptError, wrong
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job import Job
from xgpt.report.output import Output
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xscheduler.evaluator import job_lengths, predict, replays_of
from xscheduler.fallback import initial_reason
from xsimulator.replay.prediction import JobPrediction, mean_prediction
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.service_replay import ServiceReplayer


def arrival_times(job: Job, problem: Problem, schedule: Schedule,
                  count: int) -> FloatArray | None:
    """[requests] seconds at which `count` requests arrive in a run by `schedule`; None if they do
    not arrive at times of their own. Raises InputError where nothing tells their rate."""
    own = problem.arrivals
    if own is None or own.concurrency is not None:
        return None
    if own.times_s is not None and len(own.times_s) == count:
        return own.times_s
    rate = own.own_rate or (schedule.served.rate if schedule.served else None)
    if rate is None:
        raise wrong(job.source, "workload.arrivals.rate", None, "requests/s > 0: the schedule has "
                    "no rate of a service that its arrivals could have")
    return own.at_rate(rate, count, problem.seed)


def predicted(opened: OpenedJob, timing: TimingSource, schedule: Schedule,
              ) -> tuple[JobPrediction | None, ReplayResult | None, str]:
    """The run's predicted metrics, one replay of all its queries, and "" ; without a prediction the
    reason in words."""
    problem = opened.problem
    if (beginning := initial_reason(schedule)) is not None:
        return None, None, beginning
    if not engine_of(opened.job).is_predicted:
        return None, None, f"the step times of {opened.job.run.engine} are not known"
    if problem.arrivals is not None:
        return None, None, "its requests are replayed when they have come"
    replayed = replays_of(problem, timing, schedule.estimate)
    if replayed is None:
        return None, None, "no request of the job can run"
    first = next(replayed.results)
    prediction = mean_prediction(chain([first], replayed.results), replayed.num_queries,
                                 replayed.deadlines_s, replayed.load_s) if first.is_timed else None
    if prediction is None or not math.isfinite(prediction.wall_s):
        return None, None, (f"it may take steps of more than {REFUSED_BEYOND:g} times the sizes "
                            "that were measured (`xgpt profile JOB` measures more)")
    # curves of a sample of the queries are not those of all
    return prediction, first if replayed.is_whole else None, ""


def for_lengths(problem: Problem, timing: TimingSource, schedule: Schedule,
                output: Output) -> tuple[JobPrediction, ReplayResult | None] | None:
    """Predicts, by the output lengths of this run, a job that was planned as if every answer had
    its maximum length, or whose requests arrived over time (with latencies from there, and the
    replay). None for any other job, or if some requests were not run."""
    queries, known = output.queries, problem.queries if problem.observes else None
    if problem.arrivals is not None:
        known = job_lengths(problem, schedule.estimate)
    if known is None or len(queries) != len(known.inputs):
        return None
    came = np.minimum(np.maximum(queries.counts("output_tokens"), 1), known.most_outputs)
    try:
        if problem.arrivals is not None:
            clients = problem.arrivals.concurrency
            result = ServiceReplayer(problem, timing, schedule.estimate).run(
                replace(known, outputs=came), 0.0 if clients else queries.times("arrival_s"),
                concurrency=clients)
            since_arrival = replace(result.times, start_s=result.times.arrival_s)
            return (mean_prediction([replace(result, times=since_arrival)]), result) if (
                result.is_timed) else None
        told = replace(problem, observes=False, queries=known.that_became(came))
        found = predict(told, timing, schedule.estimate, replays=1)
        return None if found is None else (found, None)
    except XgptError:  # times that the profile refuses
        return None
