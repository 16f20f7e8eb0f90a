"""The search by replays finds the best schedule, compared with random configurations by the same
replay."""

import math

import numpy as np
import pytest
from best_by_hand import best_drawn, replayed
from problems import Shaken, roofline_of, uniform_problem

from xgpt.core import catalog
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule, devices_of_copies
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.planner import PlanOptions, plan
from xsimulator.native import native

DRAWN, BETTER = 200, 1.02
STEADY = PlanOptions(horizon="steady", is_brief=True)
SHORT = JointLengths(inputs=truncated_normal(256, 81, 512), outputs=truncated_normal(32, 13, 80))
LONG = JointLengths(inputs=truncated_normal(128, 68, 256), outputs=truncated_normal(128, 68, 320))
EVEN = JointLengths(inputs=truncated_normal(300, 100, 600), outputs=truncated_normal(300, 100, 600))


def found(problem: Problem, timing: TimingSource | None = None) -> Schedule:
    return plan(problem, timing or roofline_of(problem), STEADY)


@pytest.mark.parametrize(("model", "device", "devices", "lengths", "latency_s"), [
    ("opt-1.3b", "L4", 1, SHORT, 2.5), ("opt-1.3b", "L4", 3, LONG, math.inf),
    ("llama-3.1-8b", "A40", 2, LONG, 16.0), ("opt-13b", "A40", 4, SHORT, 4.0),
    ("opt-13b", "L4", 4, LONG, math.inf)])
def test_no_random_configuration_is_much_better(model, device, devices, lengths, latency_s):
    problem = uniform_problem(model, device, devices, lengths, latency_s)
    schedule, timing = found(problem), roofline_of(problem)
    assert schedule.figures.latency_s <= latency_s
    own_qps = replayed(problem, timing, schedule.estimate).throughput_qps
    best, count = best_drawn(problem, timing, own_qps, DRAWN, np.random.default_rng(devices))
    assert 0 < best.throughput_qps <= BETTER * own_qps and count, best.words


@pytest.mark.parametrize("outputs", [1000, 500])
def test_no_other_policy_is_better_where_all_lengths_are_equal(outputs):
    """Short replays of Sarathi promise 7 % too much there for all of its points: requests that
    began together end together."""
    lengths = JointLengths(inputs=truncated_normal(1000, 0, 1000),
                           outputs=truncated_normal(outputs, 0, outputs))
    problem = uniform_problem("llama-3.1-8b", "H100", 1, lengths)
    timing = Roofline(problem.model, problem.cluster.device, "float16", engine="tensorrt-llm")
    schedule = plan(problem, timing, PlanOptions(horizon="steady"))
    others = [row.throughput_qps or 0.0 for row in schedule.rejected if row.kind == "policy"]
    assert max(others) <= 1.005 * schedule.figures.throughput_qps


def test_one_replica_may_leave_a_device_idle():
    """One on five of the six devices is best; two on three each have 9.1 requests/s."""
    problem = uniform_problem("qwen2.5-32b", "A100-80", 6, EVEN, 16.94)
    schedule = found(problem)
    assert schedule.figures.throughput_qps >= 0.98 * 12.35
    assert schedule.figures.latency_s <= 16.94


def test_one_odd_point_does_not_tell_of_a_whole_cell():
    """The first point replayed without tensor parallelism is a fifth below its formula. Others
    reach it, 41 requests/s; with tensor parallelism there are 34."""
    problem = uniform_problem("opt-13b", "A40", 4, catalog.task("S"), 12.0, FixedSchedule(
        policies=("sarathi",), replicas=1), link="pcie4-x16-p2p")
    schedule = found(problem)
    assert schedule.figures.throughput_qps >= 0.98 * 40.85
    assert schedule.figures.latency_s <= 12


def test_unequal_replicas_are_chosen_if_they_are_best():
    """Four devices and one, rather than five equal replicas or two and two."""
    problem = uniform_problem("opt-13b", "A40", 5, SHORT, 4.5, link="pcie4-x16")
    schedule = plan(problem, roofline_of(problem), PlanOptions(horizon="steady"))
    alike = max(row.throughput_qps or 0.0 for row in schedule.over_copies if not row.devices)
    assert len(set(devices_of_copies(schedule.estimate))) > 1
    assert schedule.figures.throughput_qps > 1.05 * alike > 0


@pytest.mark.parametrize(("nodes", "devices", "replicas"), [
    (1, 5, 2), (1, 3, 3), (2, 4, 1), (2, 4, 3), (2, 2, 2)])
def test_the_number_of_replicas_is_the_one_that_the_job_fixes(nodes, devices, replicas):
    fixed = FixedSchedule(replicas=replicas, policies=("rra", "orca"), encode_chunk=0)
    problem = uniform_problem("opt-1.3b", "L4", devices, SHORT, fixed=fixed, nodes=nodes)
    sizes = devices_of_copies(found(problem).estimate)
    assert len(sizes) == replicas and sum(sizes) == nodes * devices


@pytest.mark.parametrize("seed", range(3))
def test_times_that_differ_in_the_last_digits_change_no_plan(seed):
    problem = uniform_problem("opt-1.3b", "L4", 3, SHORT, 2.5)
    own, other = found(problem), found(problem, Shaken(roofline_of(problem), seed))
    assert own.estimate.controls == other.estimate.controls
    assert own.deployment == other.deployment
    assert own.figures.throughput_qps == pytest.approx(other.figures.throughput_qps, rel=1e-6)


def test_without_the_library_as_much_is_found(monkeypatch):
    problem = uniform_problem("opt-1.3b", "L4", 1, SHORT)
    own = found(problem)
    monkeypatch.setenv("XGPT_NATIVE", "off")
    native.cache_clear()
    try:
        other = found(problem)
    finally:
        native.cache_clear()
    assert other.figures.throughput_qps == pytest.approx(own.figures.throughput_qps, rel=0.02)
