"""Bounds are kept with their margins: what a replay shows, times the factor."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, replay_checked

from xgpt.core.constraint import Bound
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xprofiler.roofline import Roofline
from xscheduler.copies import problem_for
from xscheduler.planner import PlanOptions, plan
from xsimulator.replay.steady import SteadyFigures

SCATTER = 1.02  # of a latency over seeds of a replay
FIXED = FixedSchedule(policies=("rra", "waa-m", "sarathi"), tp_degree=1, tp_gpus=0)


def problem(latency_s: float, confidence: float = 0.8, *further: Bound, drift: float = 0.0,
            ) -> Problem:
    own = problem_of("opt-13b", "a40-4", latency_s=latency_s)
    constraint = replace(own.constraint, confidence=confidence, drift=drift)
    return replace(own, fixed=FIXED, constraint=replace(
        constraint, bounds=(*constraint.bounds, *further)))


def planned(own: Problem, *, has_margin: bool = True) -> Schedule:
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    return plan(own, timing, PlanOptions(
        horizon="steady", is_brief=True, has_margin=has_margin))


def replayed(own: Problem, schedule: Schedule) -> SteadyFigures:
    """With other queries than the search saw."""
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    found = replay_checked(problem_for(own, schedule.estimate.one_copy), timing,
                           schedule.estimate.one_copy, seed=77)
    assert found is not None
    return found


def test_a_margin_grows_with_the_confidence_and_costs_throughput() -> None:
    found = [planned(problem(12.0, confidence)) for confidence in (0.5, 0.8, 0.95)]
    factors = [schedule.margin.factor for schedule in found]
    qps = [schedule.figures.throughput_qps for schedule in found]
    assert 1.0 == factors[0] < factors[1] < factors[2]
    assert qps[2] < 0.98 * min(qps[:2]) and found[2].margin.cost > 0


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_the_replayed_latency_keeps_the_bound_with_its_margin(confidence: float) -> None:
    own = problem(12.0, confidence)
    schedule = planned(own)
    assert schedule.figures.latency_s * schedule.margin.factor <= 12.0 * (1 + 1e-9)
    assert replayed(own, schedule).latency_s * schedule.margin.factor <= 12.0 * SCATTER


def test_longer_outputs_than_planned_have_a_margin() -> None:
    rra = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, replicas=1)
    own, drifting = (planned(replace(problem(7.0, 0.5, drift=drift), fixed=rra))
                     for drift in (0.0, 0.2))
    assert drifting.margin.factor > 1.05 * own.margin.factor
    assert drifting.figures.throughput_qps < own.figures.throughput_qps


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_a_bound_on_the_tokens_pace_is_kept_beside_the_latencys(metric: str) -> None:
    free = problem(12.0, 0.5)
    shown = replayed(free, planned(free))
    limit_s = 0.8 * getattr(shown, f"{metric}_s")
    if not np.isfinite(limit_s):  # of no bound a replay says nothing
        limit_s = {"ttft": 1.0, "tpot": 0.1}[metric]
    own = problem(12.0, 0.5, Bound(metric=metric, limit_s=limit_s))  # type: ignore[arg-type]
    schedule = planned(own)
    again = replayed(own, schedule)
    assert getattr(again, f"{metric}_s") <= SCATTER * limit_s
    assert again.latency_s <= SCATTER * 12.0
    assert schedule.figures.throughput_qps <= 1.02 * planned(free).figures.throughput_qps


def test_without_a_bound_nothing_is_kept() -> None:
    schedule = planned(problem(math.inf, 0.95))
    assert schedule.margin.factor == 1.0 and schedule.margin.cost == 0.0
