"""A bound on a share of a job's queries is one on a sample."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import CONFIG, doubts_of, estimate_of, roofline_of, toy_problem

from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import truncated_normal
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xscheduler.job_sample import levels_of
from xscheduler.planner import plan
from xscheduler.uncertainty import Doubts
from xsimulator.replay.job import planned_queries, replay_job

BOUND_S = 0.16


def job_of(count: int | None, *, kind: str = "queries", quantile: float = 0.99,
           latency_s: float = 0.1, **changes: object) -> Problem:
    return replace(toy_problem(), num_queries=count, constraint=latency_constraint(
        latency_s, kind=kind, quantile=quantile), **changes)  # type: ignore[arg-type]


def test_the_slowest_of_few_queries_has_to_keep_the_bound_of_nearly_all() -> None:
    """P(all of 32 are below level u) = u^32."""
    levels = levels_of(job_of(32))
    for place, level in enumerate(levels):
        assert level == pytest.approx(((place + 0.5) / len(levels)) ** (1 / 32), rel=1e-9)
    near = levels_of(job_of(200_000))
    assert near[0] > 0.989 and near[-1] < 0.991


def test_copies_share_one_bound() -> None:
    one, copy = levels_of(job_of(64)), levels_of(job_of(16, copies=4))
    assert one == pytest.approx(copy)


@pytest.mark.parametrize("problem", [
    job_of(None), job_of(32, kind="sequence"), job_of(32, latency_s=math.inf)])
def test_a_bound_that_is_not_on_a_share_of_the_jobs_queries_knows_no_sample(
        problem: Problem) -> None:
    assert not len(levels_of(problem))
    assert doubts_of(problem).margin(estimate_of(problem, **CONFIG)).factor == 1


@pytest.mark.parametrize(("lengths", "level"), [
    ([20] * 31 + [60], 60), ([20] * 32, 20), ([1] + [40] * 31, 40)])
def test_of_outputs_that_are_known_the_own_one_counts(lengths: list[int], level: int) -> None:
    outputs = truncated_normal(32, 15, 80)
    problem = job_of(32, queries=QueryLengths(
        inputs=np.full(32, 8), most_outputs=np.array(lengths), outputs=np.array(lengths)))
    problem = replace(problem, lengths=replace(problem.lengths, outputs=outputs))
    (found,) = levels_of(problem)
    assert outputs.quantile(found) == level


def test_a_margin_for_the_sample_keeps_the_bound_of_as_many_jobs_as_was_promised() -> None:
    """Jobs of 200 queries drawn anew, of which 95 % are to keep it, with a confidence of 0.9: more
    than that do, and fewer where the quantile of all queries ever is planned for."""
    of_all = replace(
        toy_problem(per_node=1, outputs=(60, 30, 200), memory=3e9,
                    fixed=FixedSchedule(policies=("sarathi",))),
        constraint=latency_constraint(BOUND_S, kind="queries", quantile=0.95, confidence=0.9))
    timing = roofline_of(of_all)
    kept = []
    for problem in (replace(of_all, num_queries=200), of_all):
        schedule, is_kept = plan(problem, timing), 0
        for seed in range(40):
            drawn = of_all.lengths.sample(200, np.random.default_rng(seed))
            replayed = replay_job(of_all, timing, schedule.estimate,
                                  planned_queries(of_all, *drawn))
            is_kept += int((replayed.times.latency_s > BOUND_S).sum()) <= 10
        kept.append(is_kept)
    assert kept[0] >= 36 and kept[1] < kept[0]


def test_what_is_left_of_a_job_is_no_sample_of_its_own() -> None:
    problem = job_of(32)
    estimate = estimate_of(problem, **CONFIG)
    whole = doubts_of(problem)
    left = Doubts(problem, whole.evaluator, is_of_job=False)
    assert left.margin(estimate).factor == 1 < whole.margin(estimate).factor
    assert "sample" in whole.margin(estimate).sentence
