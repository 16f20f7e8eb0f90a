"""Replays by forecasts: those of a job are the ones that its run keeps, and caps read none."""

from dataclasses import replace

import numpy as np
import pytest
from problems import estimate_of, roofline_of, toy_problem

from xgpt.core.controls import Admission, Forecasting
from xgpt.core.problem import QueryLengths
from xrunner.files.forecasts import keep_forecasts, load_forecasts
from xscheduler.evaluator import job_lengths
from xsimulator.replay.job import replay_job

RNG = np.random.default_rng(3)
INPUTS = RNG.integers(1, 60, 200)
OUTPUTS = np.clip(INPUTS // 3 + RNG.integers(1, 30, 200), 1, 45)
QUERIES = QueryLengths(inputs=INPUTS, outputs=OUTPUTS, most_outputs=np.full(200, 60))


def tight(forecasting, rule="future-peak"):
    """A job of RRA in little memory, and its schedule."""
    admission = Admission(rule=rule, forecast=forecasting)
    problem = toy_problem(pairs=np.stack([INPUTS, OUTPUTS], axis=1), num_queries=200)
    problem = replace(problem, queries=QUERIES, adjustment=replace(
        problem.adjustment, admission=admission))
    estimate = estimate_of(problem, "rra", encode_batch=8, decode_iterations=4)
    return problem, estimate.changed(kv_tokens=900)


def test_who_is_forecast_at_the_cap_reads_no_other_forecast():
    problem, estimate = tight(Forecasting())
    given = replace(QUERIES, forecasts=np.repeat(OUTPUTS[:, None], 3, axis=1))
    found, plain = (replay_job(problem, roofline_of(problem), estimate, queries)
                    for queries in (given, QUERIES))
    assert found.makespan_s == plain.makespan_s and found.preemptions == 0
    known, estimate = tight(Forecasting(kind="known"))
    assert replay_job(known, roofline_of(known), estimate, given).makespan_s < found.makespan_s


@pytest.mark.parametrize("asked", [
    Forecasting(kind="class", width=7, accuracy=0.6), Forecasting(kind="known"),
    Forecasting(kind="distribution", use="expected")], ids=lambda asked: asked.kind)
def test_a_jobs_forecasts_are_those_that_its_run_keeps(tmp_path, asked):
    problem, estimate = tight(asked)
    keep_forecasts(tmp_path, problem, QUERIES, np.arange(200), is_continued=False)
    lengths, kept = job_lengths(problem, estimate), load_forecasts(tmp_path).forecasts
    assert sorted(zip(lengths.inputs, lengths.outputs, lengths.forecasts.tolist(), strict=True)
                  ) == sorted(zip(INPUTS, OUTPUTS, kept.tolist(), strict=True))


def test_better_forecasts_end_a_job_sooner():
    ends = []
    for asked in (Forecasting(), Forecasting(kind="class", width=20, accuracy=1.0),
                  Forecasting(kind="known")):
        problem, estimate = tight(asked)
        ends.append(replay_job(problem, roofline_of(problem), estimate, QUERIES).makespan_s)
    assert ends == sorted(ends, reverse=True) and ends[2] < 0.8 * ends[0]
