"""Copies of another shape on what the others leave over: planned, kept, replayed, shown."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from toy_jobs import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.report.table import schedule_table, stage_table
from xrunner.replica import replicas_of
from xrunner.rules.routing import deal
from xscheduler.leftover import beside_left_over, left_over
from xscheduler.planner import Planner, PlanOptions
from xsimulator.replay.copies import replayer_of
from xsimulator.replay.job import planned_queries

OPTIONS = PlanOptions(horizon="steady", has_margin=False)


@lru_cache
def on(devices: int) -> Estimate:
    """One copy on so many devices, two of them a tensor-parallel group."""
    found: Estimate = estimate_of(toy_problem(per_node=devices), encode_batch=2 + devices,
                                  decode_iterations=4, tp_degree=2, tp_gpus=2)
    return found


@pytest.mark.slow  # plans for six GPUs, and for two of them
def test_what_the_best_copies_leave_over_has_a_copy_of_its_own() -> None:
    """At a tight bound the layers of a 13B model on six L4 are best shared by four of them."""
    from hand_problems import HandScenario, least_latency_s

    scenario = HandScenario(model="llama-2-13b", device="L4", nodes=1, per_node=6, task="G")
    timing = scenario.timing()
    least_s = least_latency_s(replace(scenario, per_node=4).problem(), timing)
    problem = scenario.problem(2 * least_s)
    found = Planner(problem, timing, OPTIONS).plan()
    (other,) = found.estimate.others
    assert (found.deployment.num_devices, other.deployment.num_devices) == (4, 2)
    assert found.estimate.beside(()).figures.throughput_qps < 0.9 * found.figures.throughput_qps
    assert found.proof.bound_qps >= found.figures.throughput_qps
    assert other.figures.latency_s <= problem.constraint.latency_s
    assert "leave over" in found.explanation[-1]
    fixed = replace(problem, fixed=FixedSchedule(replicas=1))
    assert Planner(fixed, timing, OPTIONS).plan().estimate.others == ()


def test_where_nothing_is_left_over_or_it_is_the_jobs_there_is_nothing_to_plan() -> None:
    problem, schedule = toy_problem(per_node=7), beside()
    one = schedule_of(problem, on(2))
    part = left_over(problem, one)
    assert part is not None and part.cluster.num_devices == 5
    assert left_over(problem, schedule) is None, "all seven are taken"
    for other in (toy_problem(per_node=7, fixed=FixedSchedule(replicas=1)),
                  replace(problem, observes=True), toy_problem(per_node=7, kind="cpu"),
                  toy_problem(per_node=7, nodes=2)):
        assert left_over(other, one) is None


def test_copies_that_would_not_take_every_query_are_not_put_there() -> None:
    problem = toy_problem(per_node=5)
    one = schedule_of(problem, on(2))
    found = beside_left_over(problem, one, lambda part: schedule_of(part, on(3)))
    assert found.estimate.others == (replace(on(3), notes=()),)
    short = on(3).changed(kv_tokens=on(3).deployment.num_groups * 50)
    assert beside_left_over(problem, one, lambda part: schedule_of(part, short)) == one
    slow = on(3).changed(throughput_qps=0.01 * on(2).figures.throughput_qps)
    assert beside_left_over(problem, one, lambda part: schedule_of(part, slow)) == one

    def refuses(part: Problem) -> Schedule:
        raise InfeasibleError("no schedule")

    assert beside_left_over(problem, one, refuses) == one


def test_a_schedule_of_two_shapes_is_read_as_it_was_written(tmp_path: Path) -> None:
    both = beside()
    save_schedule(both, tmp_path / "schedule.json")
    raw = json.loads((tmp_path / "schedule.json").read_text())
    assert raw["version"] == 5 and "others" not in raw["others"][0]
    assert load_schedule(tmp_path / "schedule.json") == both
    save_schedule(schedule_of(toy_problem(), on(2)), tmp_path / "alike.json")
    raw_alike = json.loads((tmp_path / "alike.json").read_text())
    assert raw_alike["version"] == 4 and "others" not in raw_alike


def test_a_mistake_in_the_other_shape_is_named(tmp_path: Path) -> None:
    save_schedule(beside(), tmp_path / "schedule.json")
    raw = json.loads((tmp_path / "schedule.json").read_text())
    raw["others"][0]["deployment"]["pools"][0]["stages"][0]["ranks"] = [1]
    (tmp_path / "schedule.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"others\[0\]\.deployment\.pools"):
        load_schedule(tmp_path / "schedule.json")


def beside() -> Schedule:
    """Two copies on two devices each beside one on three."""
    return schedule_of(toy_problem(per_node=7), on(2).in_copies(2).beside((on(3),)))


def test_throughputs_are_of_all_shapes_and_each_has_its_own_ranks() -> None:
    estimate = beside().estimate
    assert estimate.figures.throughput_qps == pytest.approx(
        2 * on(2).figures.throughput_qps + on(3).figures.throughput_qps)
    assert estimate.beside(()).figures.throughput_qps == pytest.approx(
        2 * on(2).figures.throughput_qps)
    replicas = replicas_of(estimate)
    assert [replica.ranks for replica in replicas] == [(0, 1), (2, 3), (4, 5, 6)]
    assert [replica.world_stage(0) for replica in replicas] == [0, 1, 2]
    assert estimate.num_devices == 7


def test_a_job_is_replayed_by_all_shapes_at_once() -> None:
    problem, estimate = toy_problem(per_node=7), beside().estimate
    timing = roofline_of(problem)
    inputs, outputs = problem.lengths.sample(300, np.random.default_rng(3))
    queries = planned_queries(problem, inputs, outputs)
    both = replayer_of(problem, timing, estimate).run(queries)
    alone = replayer_of(problem, timing, estimate.beside(())).run(queries)
    assert len(both.times.last_token_s) == 300 and both.makespan_s < alone.makespan_s
    stages = [stage for pool in both.pools for stage in pool.stages]
    assert stages == list(range(len(stages)))


def test_a_replica_that_is_twice_as_quick_is_dealt_twice_as_much() -> None:
    assert [len(share) for share in deal([1.0] * 30, 2, speeds=[2.0, 1.0])] == [20, 10]
    assert [len(share) for share in deal([1.0] * 30, 2, "round-robin", [2.0, 1.0])] == [20, 10]


def test_tables_say_what_stands_beside() -> None:
    both = beside()
    text = " ".join(schedule_table(both).split())
    assert "beside" in text and "of the queries/s" in text
    assert "copies of another shape" in stage_table(both)
