"""Which admission rule a plan chooses: RRA, WAA and Orca on OPT-13B, four A40, task T."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from problems import roofline_of, uniform_problem

from xgpt.core import catalog
from xgpt.core.controls import Adjustment, Admission, AdmissionRule, FixedSchedule, Forecasting
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import from_json, to_json
from xscheduler.admission_choice import TIE, room_words
from xscheduler.cache_sizing import with_room
from xscheduler.live.fixed_stages import FixedStages
from xscheduler.planner import PlanOptions, plan

WAA = ("waa-c", "waa-m")


def task_t(*policies: str, latency_s: float = math.inf, rule: AdmissionRule | None = None,
           forecast: str = "cap", model: str = "opt-13b") -> Problem:
    problem = uniform_problem(model, "A40", 4, catalog.task("T"), latency_s,
                              FixedSchedule(policies=policies), link="pcie4-x16")
    return replace(problem, adjustment=Adjustment(
        admission=Admission(rule=rule, forecast=Forecasting(kind=forecast))))


@cache
def planned(*policies: str, **asked) -> Schedule:
    problem = task_t(*policies, **asked)
    return plan(problem, roofline_of(problem), PlanOptions(horizon="steady", has_margin=False))


def rule_of(schedule: Schedule) -> set[AdmissionRule | None]:
    return {shape.controls.admission.rule for shape in schedule.estimate.shapes}


@pytest.mark.parametrize(("policies", "gain"), [(("rra",), 1.15), (("orca",), 1.08), (WAA, 1.2)])
def test_a_peak_is_looked_for_where_memory_binds(policies, gain):
    schedule, reserving = planned(*policies), planned(*policies, rule="reserve")
    assert rule_of(schedule) == {"future-peak"} and rule_of(reserving) == {"reserve"}
    qps = schedule.figures.throughput_qps
    assert qps > gain * reserving.figures.throughput_qps
    assert schedule.figures.fits and qps <= schedule.proof.bound_qps
    assert from_json(to_json(schedule)) == schedule


def test_rra_answers_as_many_requests_as_the_rule_allows():
    """22.5 requests/s by reserve; 25.6 with nothing forecast and 27.3 by known lengths."""
    assert planned("rra").figures.throughput_qps >= 25.2
    assert planned("rra", forecast="known").figures.throughput_qps >= 27.3
    assert planned("rra").proof.bound_qps >= planned("rra", forecast="known").figures.throughput_qps


@pytest.mark.parametrize("latency_s", [28.0, 32.0])
def test_a_peak_keeps_the_latency_limit(latency_s):
    schedule = planned("rra", latency_s=latency_s)
    assert rule_of(schedule) == {"future-peak"} and schedule.figures.latency_s <= latency_s
    assert schedule.figures.throughput_qps > 1.02 * planned(
        "rra", latency_s=latency_s, rule="reserve").figures.throughput_qps


@pytest.mark.parametrize("policies", [("rra",), ()])
def test_what_is_reserved_is_kept_where_latency_binds(policies):
    """With 25 s memory does not bind: the schedule is as good as by `admission: reserve`."""
    schedule = planned(*policies, latency_s=25.0)
    assert rule_of(schedule) <= {"reserve", "greedy"}
    if policies:
        reserving = planned(*policies, latency_s=25.0, rule="reserve")
        assert schedule.figures.throughput_qps == pytest.approx(
            reserving.figures.throughput_qps, rel=TIE)


def test_rules_that_page_or_cannot_evict_keep_theirs():
    assert rule_of(planned("sarathi")) == {"greedy"}
    assert rule_of(planned(*WAA, forecast="known")) == {"reserve"}  # a handed request stays
    assert rule_of(planned("rra", model="t5-11b")) == {"reserve"}  # KV cache in rows


@pytest.mark.parametrize("rule", ["greedy", "reserve-static", "reserve-dynamic"])
def test_a_rule_that_is_named_is_planned(rule):
    schedule = planned("rra", rule=rule, forecast="known")
    assert rule_of(schedule) == {rule}
    reserving = planned("rra", rule="reserve")
    assert schedule.figures.throughput_qps > 1.1 * reserving.figures.throughput_qps


def test_a_change_of_a_running_schedule_keeps_its_admission():
    schedule = planned("rra")
    problem = task_t("rra", latency_s=30.0)
    found = FixedStages(schedule.estimate, problem, roofline_of(problem)).best(
        problem.constraint, has_margin=False)
    assert found.reason is None and found.estimate is not None
    assert found.estimate.controls.admission == schedule.controls.admission
    assert found.estimate.controls != schedule.controls
    assert found.estimate.figures.latency_s <= 30


def test_the_longest_request_has_room():
    schedule = planned("rra")
    reserves = np.array([100, schedule.estimate.longest_query + 500])
    roomy = with_room(schedule, replace(task_t("rra"), queries=QueryLengths(
        inputs=np.full(2, 100), most_outputs=reserves - 100)))
    assert roomy.estimate.longest_query in (schedule.estimate.longest_query, reserves.max())
    assert roomy.controls == schedule.controls


def test_the_gain_is_said_in_requests_at_a_time():
    words = room_words(planned("rra").estimate, task_t("rra"))
    before, _, after, *rest = words.split()
    assert 1.35 < int(after) / int(before) < 1.5
    assert " ".join(rest) == "requests at a time (peak look-ahead, by each request's cap)"
    assert words in planned("rra").explanation[1]
    assert room_words(planned("rra", rule="reserve").estimate, task_t("rra")) == ""
