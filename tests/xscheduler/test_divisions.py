"""Copies of unlike sizes: chosen, kept, replayed, shown."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from test_partition import divisions
from toy_jobs import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.copies import devices_of_copies, devices_tried, sum_of
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, Status
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.launch.launcher import ranks_per_node
from xgpt.report.table import schedule_table, stage_table
from xrunner.replica import replicas_of
from xrunner.rules.routing import deal
from xscheduler.copies_shown import Looked
from xscheduler.copy_sizes import CopySizes
from xscheduler.divisions import (
    ANY_SIZES,
    EQUAL_ALONE,
    LEAST_SHARE,
    Divider,
    may_divide,
    takes_all,
)
from xscheduler.evaluator import Evaluator
from xscheduler.over_copies import CopiesSearch
from xscheduler.planner import Planner, PlanOptions
from xscheduler.search import FIRST_GAP
from xscheduler.spaces.space import Effort
from xscheduler.spaces.tensor_plans import left_out
from xsimulator.replay.copies import replayer_of
from xsimulator.replay.job import planned_queries

CLIMBED_ALONE = r"; by WAA-C in chunks, on equal copies, (\S+) queries/s at most \(a looser bound\)"
OPTIONS = PlanOptions(horizon="steady", has_margin=False)


@lru_cache
def on(devices: int) -> Estimate:
    """One copy on so many devices, two of them a tensor-parallel group."""
    found: Estimate = estimate_of(toy_problem(per_node=devices), encode_batch=2 + devices,
                                  decode_iterations=4, tp_degree=2, tp_gpus=2)
    return found


def best_of_each_size(problem: Problem) -> dict[int, float]:
    """Queries/s of the best copy on 1, 2, ... devices of the node, each planned by itself."""
    found = {}
    for size in range(1, problem.cluster.devices_per_node + 1):
        part = replace(problem, cluster=problem.cluster.with_nodes(devices_per_node=size),
                       fixed=FixedSchedule(replicas=1))
        try:
            schedule = CopiesSearch(part, roofline_of(problem), Effort(gap=0.001), is_brief=True
                                    ).best(problem.constraint.latency_s, has_margin=False)
        except InfeasibleError:
            continue
        if schedule.deployment.num_devices == size:  # else others idle: a smaller size
            found[size] = schedule.figures.throughput_qps
    return found


@pytest.mark.parametrize(("per_node", "memory", "latency_s", "replicas", "expected"), [
    (5, 130e6, 0.0436, None, (3, 2)),
    (3, 600e6, 0.0377, None, (2, 1)),  # of two, one left idle, hardly anything was seen
    pytest.param(5, 130e6, 0.0436, 2, (3, 2), marks=pytest.mark.slow),
    pytest.param(7, 100e6, 0.0425, None, (4, 3), marks=pytest.mark.slow),
    pytest.param(7, 130e6, math.inf, 2, (4, 3), marks=pytest.mark.slow),
    pytest.param(7, 200e6, math.inf, 3, (3, 2, 2), marks=pytest.mark.slow)])
def test_the_division_chosen_is_the_best_of_all(
        per_node: int, memory: float, latency_s: float, replicas: int | None,
        expected: tuple[int, ...]) -> None:
    """Every partition of the devices, each of its copies at its best, is worth no more."""
    problem = toy_problem(per_node=per_node, memory=memory, latency_s=latency_s,
                          fixed=FixedSchedule(replicas=replicas))
    worth = best_of_each_size(problem)
    by_hand = max(sum(worth[one] for one in sizes) for sizes in divisions(per_node)
                  if all(one in worth for one in sizes)
                  and replicas in (None, len(sizes)))
    planner = Planner(problem, roofline_of(problem), OPTIONS)
    found = planner.plan()
    assert devices_of_copies(found.estimate) == expected
    assert planner.of(problem).estimate == found.estimate, "what offers are compared with"
    assert found.figures.throughput_qps > (1 - 2 * FIRST_GAP) * by_hand
    row = next(row for row in found.over_copies if row.devices)
    assert row.devices == expected and row.throughput_qps == found.figures.throughput_qps
    assert row.bound_qps >= by_hand * (1 - 0.002) and found.proof.bound_qps >= row.bound_qps
    words = re.fullmatch(f"{ANY_SIZES}({CLIMBED_ALONE})?", found.proof.covers)
    assert words, "every size was looked at"
    assert not words[1] or float(words[2]) > 0.999 * found.proof.bound_qps, "else the bound says it"
    assert (found.proof.unbounded_qps or 0) >= found.figures.throughput_qps, "it is one without"
    equal = found.rejected[0]
    assert equal.label.startswith("equal copies") and equal.throughput_qps is not None
    assert equal.throughput_qps * (1 + LEAST_SHARE) < found.figures.throughput_qps
    assert all(shape.figures.latency_s <= latency_s for shape in found.estimate.shapes)
    assert sum_of(expected) in found.explanation[0]
    ranks = [rank for replica in replicas_of(found.estimate) for rank in replica.ranks]
    assert ranks == list(range(sum(expected)))


@pytest.mark.slow  # plans for six GPUs, with a margin too
@pytest.mark.parametrize("has_margin", [False, True])
def test_a_tight_bound_divides_six_gpus_into_four_and_two(has_margin: bool) -> None:
    """The layers of a 13B model on six L4 are best shared by four of them."""
    from hand_problems import HandScenario

    scenario = HandScenario(model="llama-2-13b", device="L4", nodes=1, per_node=6, task="G")
    timing = scenario.timing()
    problem = scenario.problem(43.5 if has_margin else 37.9)
    options = replace(OPTIONS, has_margin=has_margin)
    found = Planner(problem, timing, options).plan()
    (other,) = found.estimate.others
    assert (found.deployment.num_devices, other.deployment.num_devices) == (4, 2)
    alone = Planner(problem, timing, options).steady()
    assert alone.figures.throughput_qps < 0.95 * found.figures.throughput_qps
    assert found.proof.bound_qps >= found.figures.throughput_qps
    factor = found.margin.factor if has_margin else 1.0
    assert other.figures.latency_s * min(factor, 1.1) <= problem.constraint.latency_s


@pytest.mark.slow  # plans for eight GPUs
def test_where_a_bound_costs_a_third_five_gpus_may_be_worth_more_than_their_share() -> None:
    """One that encodes beside four that decode: found by hand before the planner did."""
    from hand_problems import HandScenario

    scenario = HandScenario(model="opt-13b", device="A100-80", nodes=1, per_node=8, task="C2")
    found = Planner(scenario.problem(16.7), scenario.timing(), OPTIONS).plan()
    assert devices_of_copies(found.estimate) == (5, 2, 1)
    assert found.estimate.controls.policy in ("waa-m", "waa-c")
    equal_qps = found.rejected[0].throughput_qps
    assert equal_qps is not None and found.figures.throughput_qps > 1.03 * equal_qps
    assert found.proof.covers.startswith(ANY_SIZES) and "on 3, 6 and 7" in found.proof.covers


@pytest.mark.parametrize(("nodes", "device", "latency_s", "expected", "more"), [
    (1, "H200", math.inf, (3, 3, 2), 1.018),  # two hold weights for a half
    pytest.param(1, "H200", 15.0, (6, 2), 1.007, marks=pytest.mark.slow),
    pytest.param(8, "A100-80", 23.9, 8 * (6, 2), 1.038, marks=pytest.mark.slow)])
def test_sizes_that_may_win_by_what_their_neighbours_show_are_looked_at(
        nodes: int, device: str, latency_s: float, expected: tuple[int, ...], more: float) -> None:
    """Found by hand, or missed by it."""
    from hand_problems import HandScenario

    scenario = HandScenario(model="llama-3.1-70b", device=device, nodes=nodes, per_node=8, task="T")
    found = Planner(scenario.problem(latency_s), scenario.timing(), OPTIONS).plan()
    assert devices_of_copies(found.estimate) == expected
    equal_qps = found.rejected[0].throughput_qps
    assert equal_qps is not None and found.figures.throughput_qps > more * equal_qps


@pytest.mark.slow  # plans for seven GPUs with a margin
def test_what_the_copies_chosen_keep_with_their_margin_is_promised_of_other_sizes() -> None:
    """Of what was seen under what every margin leaves of the bound, not of what there was without
    one: that margin would count twice, and copies on five and two be passed over."""
    from hand_problems import HandScenario

    scenario = HandScenario(model="qwen2.5-14b", device="A40", nodes=1, per_node=7, task="C2")
    found = Planner(scenario.problem(44.7), scenario.timing(), replace(
        OPTIONS, has_margin=True)).plan()
    assert devices_of_copies(found.estimate) == (5, 2)
    equal_qps = found.rejected[0].throughput_qps
    assert equal_qps is not None and found.figures.throughput_qps > 1.04 * equal_qps


def test_where_memory_is_ample_and_the_bound_loose_no_further_size_is_looked_at() -> None:
    from hand_problems import HandScenario

    scenario = HandScenario(model="opt-1.3b", device="A40", nodes=1, per_node=8, task="C2")
    found = Planner(scenario.problem(), scenario.timing(), OPTIONS).plan()
    assert "on 3, 5, 6 and 7 devices" in found.proof.covers


def test_a_bound_says_of_which_copies_it_is() -> None:
    """Sizes that divide the devices have been looked at, and no division into them has more than
    the bound of equal copies; of three devices of four nothing is known."""
    fixed = FixedSchedule(policies=("orca",))
    problem = toy_problem(per_node=4, fixed=fixed)
    found = Planner(problem, roofline_of(problem), OPTIONS).plan()
    assert found.proof.covers == (
        f"{ANY_SIZES}, but for those with copies on 3 devices, which were not looked at")
    assert f"proved of    {ANY_SIZES}, but for" in schedule_table(found)
    three = divider_of(toy_problem(per_node=5, fixed=replace(fixed, replicas=3)))
    sizes = CopySizes(three.problem, three.search, has_margin=False)
    assert three._not_looked_at(sizes) == [1, 2, 3], "beside one on four there are no two others"
    pair = toy_problem(per_node=2, fixed=fixed)
    assert not Planner(pair, roofline_of(pair), OPTIONS).plan().proof.covers, "none are unlike"
    nodes = toy_problem(per_node=2, nodes=2, fixed=replace(fixed, replicas=2))
    assert Planner(nodes, roofline_of(nodes), OPTIONS).plan().proof.covers == EQUAL_ALONE


def test_a_bound_of_equal_copies_names_what_unlike_ones_have_at_most() -> None:
    problem = toy_problem(per_node=5)
    divider, found = divider_of(problem), schedule_of(problem, on(2), throughput_qps=10.0)
    sizes = CopySizes(problem, divider.search, has_margin=False)
    sizes.most.update({size: 2.0 * size for size in (1, 2, 3, 4, 5)})
    assert divider._covering(found, sizes).proof.covers == ANY_SIZES
    sizes.most[3] = 6.5
    assert divider._covering(found, sizes).proof.covers == (
        f"{EQUAL_ALONE}; unlike ones have at most 10.5 queries/s")


def test_a_bound_says_which_tensor_plans_of_large_copies_were_not_looked_at() -> None:
    for nodes, words in ((2, ""), (4, "whole nodes"), (8, "one node or quarters of all")):
        problem = toy_problem(per_node=4, nodes=nodes, fixed=FixedSchedule(replicas=1))
        problem = replace(problem, model=replace(problem.model, num_layers=64))
        divider, found = divider_of(problem), schedule_of(toy_problem(), on(2))
        divider.search.gone_over[math.inf, False] = [
            (Looked(divider.search.on(4 * nodes), None, 0.0), None)]
        covers = divider.better(found).proof.covers
        assert re.sub(CLIMBED_ALONE, "", covers) == EQUAL_ALONE + (words and (
            f"; of copies on {nodes} nodes only with tensor-parallel groups on {words}"))
        assert not left_out(replace(problem, fixed=FixedSchedule(tp_degree=2, tp_gpus=6)))


def test_a_size_of_which_two_policies_were_seen_may_be_beaten_when_it_is_planned() -> None:
    problem = toy_problem(per_node=3)
    sizes = CopySizes(problem, divider_of(problem).search, has_margin=False)
    sizes.glance_at_some(3, ("waa-c", "waa-m"))
    assert 3 not in sizes.most, "nothing is proved of the others"
    seen_qps = sizes.worth[3]
    sizes.settle(3, 10 * seen_qps)
    assert not sizes.is_settled(3) and seen_qps < sizes.most[3] < 10 * seen_qps


def test_nodes_are_divided_alike_and_ranks_fill_one_after_the_other() -> None:
    problem = toy_problem(per_node=5, nodes=2, memory=130e6, latency_s=0.0436)
    found = Planner(problem, roofline_of(problem), OPTIONS).plan()
    assert devices_of_copies(found.estimate) == (3, 2, 3, 2)
    assert ranks_per_node(found.estimate, 5) == 5
    assert all(problem.cluster.node_of(min(replica.ranks)) == problem.cluster.node_of(
        max(replica.ranks)) for replica in replicas_of(found.estimate))


def test_two_copies_on_three_ranks_of_a_processor_are_unlike() -> None:
    problem = toy_problem(per_node=3, kind="cpu", fixed=FixedSchedule(
        replicas=2, policies=("sarathi",)))
    found = Planner(problem, roofline_of(problem), OPTIONS).plan()
    assert devices_of_copies(found.estimate) == (2, 1)
    assert [devices_tried(row) for row in found.over_copies] == [(1, 1), (2, 1)]


def test_whole_nodes_beside_divided_ones() -> None:
    """Three nodes, of which a copy on two answers most: the third has small copies."""
    problem = toy_problem(per_node=4, nodes=3)
    found = divider_of(problem).division({1: 1.0, 2: 1.5, 8: 20.0})
    assert found is not None and found.sizes == (8, 1, 1, 1, 1) and found.worth == 24.0
    assert divider_of(problem).division({3: 1.0, 8: 20.0}) is None, "ranks would not fill nodes"
    found = divider_of(problem).division({3: 5.0, 1: 0.5})
    assert found is not None and found.sizes == (3, 1, 3, 1, 3, 1)


def divider_of(problem: Problem) -> Divider:
    timing = roofline_of(problem)
    search = CopiesSearch(problem, timing, Effort(gap=0.001), is_brief=True)
    return Divider(problem=problem, search=search, evaluator=Evaluator(problem, timing),
                   has_margin=False, cuts=lambda: False)


def test_where_copies_must_be_alike_there_is_nothing_to_divide() -> None:
    problem = toy_problem(per_node=7)
    one = schedule_of(problem, on(2))
    assert may_divide(problem, one)
    for other in (replace(problem, observes=True), replace(problem, copies=2),
                  toy_problem(per_node=7, nodes=2, fixed=FixedSchedule(replicas=3)),
                  toy_problem(per_node=2)):
        assert not may_divide(other, one)
    for status in (Status.GRID, Status.BEGINNING, Status.BEST_SEEN):
        assert not may_divide(problem, one.changed(status=status))


def test_copies_that_would_not_take_every_query_are_not_put_there() -> None:
    problem = toy_problem(per_node=5)
    short = on(3).changed(kv_tokens=50 * on(3).deployment.num_groups)
    assert takes_all(on(2), on(3), problem) and not takes_all(on(2), short, problem)


@pytest.mark.slow  # some hundred replays
@pytest.mark.parametrize("num_queries", [100, 300])
def test_a_short_job_is_divided_where_it_is_done_sooner(num_queries: int) -> None:
    problem = toy_problem(per_node=5, memory=130e6, latency_s=0.0436, num_queries=num_queries)
    planner = Planner(problem, roofline_of(problem), replace(OPTIONS, horizon="job"))
    found, equal = planner.plan(), planner.steady()
    assert devices_of_copies(found.estimate) == (3, 2)
    assert devices_of_copies(equal.estimate) == (2, 2)
    own, other = (Evaluator(problem, planner.timing).job(one, 1)
                  for one in (found.estimate, equal.estimate))
    assert own is not None and other is not None and own.wall_s < other.wall_s
    assert f"this job's {num_queries} queries should take" in found.explanation[0]


def test_a_schedule_of_two_shapes_is_read_as_it_was_written(tmp_path: Path) -> None:
    both = beside()
    save_schedule(both, tmp_path / "schedule.json")
    raw = json.loads((tmp_path / "schedule.json").read_text())
    assert raw["version"] == 5 and "others" not in raw["others"][0]
    assert load_schedule(tmp_path / "schedule.json") == both and "covers" not in raw["proof"]
    save_schedule(both.changed(covers=EQUAL_ALONE), tmp_path / "covers.json")
    assert load_schedule(tmp_path / "covers.json").proof.covers == EQUAL_ALONE
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
