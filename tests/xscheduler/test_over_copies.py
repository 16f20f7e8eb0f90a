"""Copies of the model: how a cluster is cut, what the search over their number finds and proves,
and how several copies replay a job."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from representative import some
from toy_jobs import MEMORY, roofline_of, toy_problem

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.job import ROUTINGS, Adjustment, FixedSchedule
from xgpt.core.schedule import Status
from xgpt.report.table import copies_table
from xprofiler.roofline import Roofline
from xscheduler.alternatives import NOT_LOOKED_INTO, POLICY_ROW, not_looked_into
from xscheduler.copies import most_copies, problem_for, problems_of_copies, slicings
from xscheduler.copies_shown import why_so_many
from xscheduler.copy_planner import CopyPlanner, ProblemSearch
from xscheduler.evaluator import Evaluator, predict
from xscheduler.planner import Planner, PlanOptions
from xscheduler.search import GAP, Scheduler
from xscheduler.spaces.space import Effort
from xsimulator.replay.copies import replayer_of, taken_over
from xsimulator.replay.job import planned_queries, replay_job

BARE = PlanOptions(horizon="steady", has_margin=False)
RRA = FixedSchedule(policies=("rra",))


def cut(nodes: int, per_node: int, copies: int | None = None) -> dict[int, int]:
    cluster = toy_problem(nodes=nodes, per_node=per_node).cluster
    return {parts[0].copies: parts[0].part.num_devices for parts in slicings(cluster, copies)}


def planned(problem, options=BARE):
    return Planner(problem, roofline_of(problem), options).plan()


def test_each_number_of_copies_has_the_largest_part_there_is_and_stays_within_nodes():
    assert cut(1, 8) == {8: 1, 4: 2, 2: 4, 1: 8}
    assert cut(2, 8) == {16: 1, 8: 2, 4: 4, 2: 8, 1: 16}
    assert cut(1, 7) == {7: 1, 3: 2, 2: 3, 1: 7}
    assert cut(3, 2) == {6: 1, 3: 2, 1: 6}, "two nodes of three leave one, as does one copy on all"
    assert cut(1, 8, copies=3) == {3: 2} and cut(3, 2, copies=2) == {2: 2}
    for nodes, per_node in ((1, 8), (2, 3), (4, 4)):
        cluster = toy_problem(nodes=nodes, per_node=per_node).cluster
        for one in (one for parts in slicings(cluster) for one in parts):
            assert one.part.num_nodes == 1 or one.part.devices_per_node == per_node
            assert most_copies(cluster, one.part.num_devices) >= one.copies


def test_a_copy_has_its_share_of_the_queries_and_is_known_again():
    problem = toy_problem(num_queries=10)
    own = [parts[0] for parts in problems_of_copies(problem)]
    assert [(one.copies, one.cluster.num_devices, one.num_queries) for one in own] == [
        (4, 1, 3), (2, 2, 5), (1, 4, 10)]
    assert own[-1] is problem
    assert [one[0].copies for one in problems_of_copies(toy_problem(num_queries=2))] == [2, 1]
    for one in own:
        (rra,) = Scheduler(replace(one, fixed=RRA),
                           roofline_of(one)).spaces
        estimate = rra.estimate(0, (2, 4)).in_copies(one.copies)
        assert problem_for(problem, estimate) == one and problem_for(one, estimate) is one


def alone_on_each_part(problem) -> dict[int, float]:
    """Queries/s of so many copies on each part that they may have, by its devices."""
    found = {}
    for parts in problems_of_copies(problem):
        for one in parts:
            try:
                alone = Scheduler(one, roofline_of(one), Effort(gap=GAP)).find(compares=False)
            except (InfeasibleError, InputError):
                continue
            found[one.cluster.num_devices] = alone.figures.throughput_qps
    return found


def test_a_copy_that_is_asked_for_may_leave_devices_idle_where_it_is_better_off_without():
    problem = toy_problem(latency_s=0.024, per_node=3, fixed=FixedSchedule(
        policies=("rra", "waa-c"), replicas=1))
    found, each = planned(problem), alone_on_each_part(problem)
    assert each[2] > 1.1 * each[3] and each[2] > each[1], "two of three are best"
    assert found.figures.throughput_qps * (1 + GAP) >= each[2]
    assert each[2] <= found.proof.bound_qps * (1 + 1e-9)
    assert found.deployment.devices_per_replica == 2
    assert "1 GPU idles: no further copy on 2 GPUs fits" in found.estimate.notes
    assert [(one.replicas, one.devices_per_replica) for one in found.over_copies] == [
        (1, 3), (1, 2), (1, 1)]


def test_where_devices_do_not_divide_evenly_auto_leaves_some_idle_if_that_is_better():
    """One copy on two of three GPUs beats one on three, and no copy fits one GPU."""
    problem = toy_problem(latency_s=0.03, memory=150e6, per_node=3, fixed=FixedSchedule(
        policies=("rra", "waa-c")))
    found, each = planned(problem), alone_on_each_part(replace(
        problem, fixed=replace(problem.fixed, replicas=1)))
    tried = [(one.replicas, one.devices_per_replica) for one in found.over_copies]
    assert tried == [(3, 1), (1, 3), (1, 2)]
    best = max(each[2], each[3], 3 * each.get(1, 0.0))
    assert found.figures.throughput_qps * (1 + GAP) >= best
    assert found.proof.bound_qps * (1 + 1e-9) >= best
    assert found.deployment.devices_per_replica == 2
    assert "1 GPU idles: no further copy on 2 GPUs fits" in found.estimate.notes
    assert copies_table(found).count("chosen") == 1


def test_a_policy_that_needs_all_ranks_hides_none_that_is_better_on_fewer():
    """WAA-C keeps the bound on two ranks, and RRA does on one alone."""
    problem = toy_problem(kind="cpu", per_node=2, latency_s=0.0247, fixed=FixedSchedule(
        policies=("rra", "waa-c"), replicas=1, tp_degree=1))
    problem = replace(problem, model=replace(problem.model, num_layers=2))
    alone = {name: planned(replace(problem, fixed=replace(problem.fixed, policies=(name,))))
             for name in ("rra", "waa-c")}
    assert (alone["rra"].deployment.num_devices, alone["waa-c"].deployment.num_devices) == (1, 2)
    found = planned(problem)
    best = max(one.figures.throughput_qps for one in alone.values())
    assert best == alone["rra"].figures.throughput_qps > alone["waa-c"].figures.throughput_qps
    assert found.figures.throughput_qps * (1 + GAP) >= best
    assert found.proof.bound_qps * (1 + 1e-9) >= best


def test_devices_that_idle_because_no_more_copies_are_asked_for_are_said_to():
    problem = toy_problem(per_node=2, fixed=FixedSchedule(
        policies=("rra", "waa-c"), replicas=1, tp_degree=1))
    problem = replace(problem, model=replace(problem.model, num_layers=1))
    found = planned(replace(problem, fixed=replace(problem.fixed, replicas=2)))
    assert found.deployment.num_devices == 2 and not found.over_copies
    found = planned(problem)
    assert found.deployment.devices_per_replica == 1
    assert found.estimate.notes[-1] == (
        "1 GPU idles: the job asks for 1 copy, and there is room for more")


@pytest.mark.parametrize(("latency_s", "memory", "nodes", "per_node"), some(
    [(math.inf, MEMORY, 1, 4), (0.025, MEMORY, 1, 4), (0.022, MEMORY, 2, 2),
     (math.inf, 150e6, 1, 4), (0.03, 150e6, 1, 3)],
    lambda case: case[0] in (0.022, 0.03) or case[:2] == (math.inf, 150e6)))
def test_the_choice_is_that_of_all_numbers_searched_one_by_one(latency_s, memory, nodes, per_node):
    problem = toy_problem(latency_s=latency_s, memory=memory, nodes=nodes, per_node=per_node,
                          fixed=FixedSchedule(policies=("rra", "waa-c", "waa-m")))
    found, each = planned(problem), {}
    for parts in problems_of_copies(problem):
        try:
            alone = Scheduler(parts[0], roofline_of(problem), Effort(gap=GAP)).find(compares=False)
        except (InfeasibleError, InputError):
            continue
        each[parts[0].copies] = alone
        assert alone.deployment.replicas == parts[0].copies
        assert alone.figures.throughput_qps <= found.proof.bound_qps * (1 + 1e-9)
    best = max(one.figures.throughput_qps for one in each.values())
    assert found.figures.throughput_qps * (1 + GAP) >= best, "never below copies of smaller plans"
    assert found.proof.bound_qps >= found.figures.throughput_qps * (1 - 1e-9)
    assert found.fingerprint == problem.fingerprint
    rows = {row.replicas: row for row in reversed(found.over_copies)}  # on the largest part
    assert set(each) <= set(rows)
    for copies, alone in each.items():
        assert rows[copies].bound_qps >= alone.figures.throughput_qps * (1 - 1e-9)
        assert (rows[copies].throughput_qps or 0.0) <= alone.figures.throughput_qps * (1 + GAP)


def test_copies_that_the_job_names_are_kept_and_devices_left_over_are_named():
    """On several nodes all alike: on one they may be unlike (test_divisions.py)."""
    found = planned(toy_problem(per_node=5, nodes=2, fixed=replace(RRA, replicas=4)))
    assert (found.deployment.replicas, found.deployment.devices_per_replica) == (4, 2)
    assert found.deployment.num_devices == 8
    tried = [(row.replicas, row.devices_per_replica) for row in found.over_copies]
    assert tried == [(4, 2), (4, 1)]
    assert any("2 GPUs idle" in note for note in found.estimate.notes)
    assert not any("idle" in note for note in planned(toy_problem(fixed=RRA)).estimate.notes)


@pytest.mark.usefixtures("short_replays")
def test_a_margin_is_kept_over_all_numbers_of_copies():
    problem = toy_problem(latency_s=0.03, fixed=RRA)
    problem = replace(problem, constraint=replace(problem.constraint, drift=0.15))
    sure, kept = planned(problem), planned(problem, PlanOptions(horizon="steady"))
    assert kept.figures.latency_s * kept.margin.factor <= 0.03
    assert kept.figures.throughput_qps <= sure.figures.throughput_qps <= kept.proof.bound_qps
    assert kept.margin.cost == pytest.approx(
        1 - kept.figures.throughput_qps / sure.figures.throughput_qps)
    assert kept.proof.status in (Status.WITHIN_GAP, Status.OPTIMAL) and kept.explanation


@pytest.mark.usefixtures("short_replays")
def test_what_every_computed_time_may_be_off_by_is_left_of_the_bound_before_the_search(
        monkeypatch: pytest.MonkeyPatch):
    """What a certificate holds for are schedules with that margin, which all have."""
    problem = toy_problem(latency_s=0.05, per_node=2, fixed=RRA)
    problem = replace(problem, constraint=replace(problem.constraint, confidence=0.95))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype, engine="xgpt")
    own, searched = ProblemSearch.find, []

    def find(self: ProblemSearch, latency_bound_s: float, floor_qps: float = 0.0, **given):
        searched.append(latency_bound_s)
        return own(self, latency_bound_s, floor_qps, **given)

    least = timing.errors().least_factor(0.95)
    sure = Planner(problem, timing, BARE).plan()
    monkeypatch.setattr(ProblemSearch, "find", find)
    kept = Planner(problem, timing, PlanOptions(horizon="steady")).plan()
    assert kept.figures.latency_s * kept.margin.factor <= 0.05 == kept.bound.limit_s
    assert kept.margin.factor >= least > 1.1
    assert kept.figures.throughput_qps <= kept.proof.bound_qps <= sure.proof.bound_qps
    # what the margin cost is of what there is without one, searched for once at the end
    assert searched.count(0.05) <= 1
    assert all(bound_s <= 0.05 / least * (1 + 1e-9) for bound_s in searched if bound_s != 0.05)
    tight = replace(problem, constraint=problem.constraint.with_latency(
        limit_s=1.01 * tightest_s(problem, timing)))
    with pytest.raises(InfeasibleError, match="with its margin.*computed times may be off") as why:
        Planner(tight, timing, PlanOptions(horizon="steady")).plan()
    (needed,) = re.findall(r"that takes a bound of (\S+) s", str(why.value))
    within = replace(problem, constraint=problem.constraint.with_latency(
        limit_s=1.01 * float(needed)))
    assert Planner(within, timing, PlanOptions(horizon="steady")).plan().margin.factor >= least


def tightest_s(problem, timing) -> float:
    bound = problem.constraint.with_latency(limit_s=1e-6)
    with pytest.raises(InfeasibleError) as refused:
        Planner(replace(problem, constraint=bound), timing, BARE).plan()
    return refused.value.tightest_s


def test_where_no_number_of_copies_keeps_the_bound_the_tightest_of_any_is_told():
    with pytest.raises(InfeasibleError, match="tightest that can be met") as refused:
        planned(toy_problem(latency_s=1e-4, fixed=RRA))
    least_s = refused.value.tightest_s
    problem = toy_problem(latency_s=1.001 * least_s, fixed=RRA)
    assert planned(problem).figures.latency_s <= 1.001 * least_s


def test_copies_share_a_job_and_its_drain():
    problem = toy_problem(num_queries=90)
    timing = roofline_of(problem)
    (two,) = (parts[0] for parts in problems_of_copies(problem) if parts[0].copies == 2)
    (rra,) = Scheduler(replace(two, fixed=RRA), timing).spaces
    one = rra.estimate(0, (4, 4))
    queries = planned_queries(problem, *problem.lengths.sample(90, np.random.default_rng(1)))
    both = replayer_of(problem, timing, one.in_copies(2)).run(queries)
    alone = replay_job(two, timing, one, queries)
    assert [pool.name for pool in both.pools] == ["copy 1", "copy 2"]
    assert [pool.stages for pool in both.pools] == [(0, 1), (2, 3)]
    assert both.output_tokens.tolist() == queries.outputs.tolist()
    assert len(both.times.last_token_s) == 90 and (both.latency_s > 0).all()
    assert 0.45 * alone.makespan_s < both.makespan_s < 0.65 * alone.makespan_s
    ends_s = [pool.end_s.max() for pool in both.pools]
    assert max(ends_s) < 1.15 * min(ends_s), "they end together"
    found = predict(problem, timing, one.in_copies(2), replays=1)
    assert found is not None and found.wall_s < 0.7 * alone.makespan_s
    whole = Evaluator(problem, timing).estimate(one.in_copies(2))
    assert whole.figures.throughput_qps == pytest.approx(2 * one.figures.throughput_qps)


def test_the_replay_shares_out_as_the_job_says():
    """The first input is as long as eight of the others."""
    problem = toy_problem(num_queries=60)
    two = next(one for (one, *_) in problems_of_copies(problem) if one.copies == 2)
    timing = roofline_of(problem)
    (rra,) = Scheduler(replace(two, fixed=RRA), timing).spaces
    estimate = rra.estimate(0, (4, 4)).in_copies(2)
    inputs, outputs = np.array([80] + [2] * 59), np.full(60, 2)
    starts = {routing: replayer_of(replace(
        problem, adjustment=Adjustment(routing=routing)), timing, estimate).run(
            planned_queries(problem, inputs, outputs)).times.start_s for routing in ROUTINGS}
    at_once = {routing: np.flatnonzero(start_s == 0) for routing, start_s in starts.items()}
    assert at_once["round-robin"].tolist() == list(range(len(at_once["round-robin"])))
    assert at_once["least-tokens"].tolist() != at_once["round-robin"].tolist()


def test_a_copy_that_is_early_takes_over_and_no_query_is_lost():
    rows = [list(range(0, 40)), list(range(40, 80))]
    moved = taken_over(rows, [4.0, 8.0])
    assert sorted(moved[0] + moved[1]) == list(range(80)) and len(moved[0]) == 53
    assert moved[1] == list(range(40, 67)), "who is late keeps what comes first"
    assert taken_over(rows, [4.0, 4.01]) == rows


@pytest.mark.parametrize(("qps", "words"), [
    (8.0, "answer 20.0% less (8 queries/s)"),
    (10.0, "answer as many, but without the margin (10 queries/s)"),
    (13.2, "answer 32.0% more, but without the margin (13.2 queries/s)")])
def test_the_next_best_number_of_copies_is_said_to_have_what_it_has(qps: float, words: str):
    schedule = SimpleNamespace(
        deployment=SimpleNamespace(replicas=1, devices_per_replica=4),
        figures=SimpleNamespace(throughput_qps=10.0))
    other = SimpleNamespace(
        planner=SimpleNamespace(problem=SimpleNamespace(
            copies=2, cluster=SimpleNamespace(num_devices=2))),
        found=SimpleNamespace(figures=SimpleNamespace(throughput_qps=qps)))
    assert why_so_many(schedule, [other]) == (
        f"One copy of the model on 4 devices: the next best, 2 on 2 devices each, {words}.")


@pytest.mark.parametrize("latency_s", [0.05, 0.07])
def test_what_is_said_of_a_policy_not_looked_into_is_what_was_proved_of_it(latency_s: float):
    problem = toy_problem(latency_s=latency_s, per_node=4)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    schedule = Planner(problem, timing, PlanOptions(horizon="steady")).plan()
    bounds = dict(schedule.proof.policy_bounds)
    rows = [one for one in schedule.rejected if one.label.startswith(POLICY_ROW)
            and one.reason.startswith(NOT_LOOKED_INTO)]
    assert rows
    for one in rows:
        name = one.label.removeprefix(POLICY_ROW)
        assert name not in bounds or one.reason == not_looked_into(bounds[name]), one


def test_without_a_bound_there_is_no_margin_that_numbers_of_copies_are_put_in_order_by(monkeypatch):
    asked: list[float] = []
    usual = CopyPlanner.promised
    monkeypatch.setattr(CopyPlanner, "promised", lambda self, bound_s, floor_qps: asked.append(
        bound_s) or usual(self, bound_s, floor_qps))
    options = PlanOptions(horizon="steady")
    found = [planned(toy_problem(latency_s=bound_s), options) for bound_s in (0.03, math.inf)]
    assert asked and set(asked) == {0.03}
    bare = planned(toy_problem(latency_s=math.inf))
    assert found[1].figures.throughput_qps >= bare.figures.throughput_qps / (1 + GAP)


def test_who_saw_nothing_above_a_floor_does_not_look_again_for_one_a_little_lower(monkeypatch):
    problem = toy_problem(latency_s=0.03)
    search = ProblemSearch.of(problem, roofline_of(problem), Effort(gap=GAP)).alone("rra")
    asked: list[float] = []
    usual = Scheduler.find
    monkeypatch.setattr(Scheduler, "find", lambda self, bound_s, **given: asked.append(
        given["floor_qps"]) or usual(self, bound_s, **given))
    for floor_qps in (1e6, 2e6, 1e6, 0.95e6):
        with pytest.raises(BeatenError):
            search.glance(0.03, floor_qps)
    assert asked == [1e6]
    assert search.glance(0.03, 0.0).figures.throughput_qps > 0 and asked == [1e6, 0.0]
    for floor_qps in (10.0, 0.0):
        with pytest.raises(InfeasibleError):
            search.glance(1e-9, floor_qps)
    assert asked[2:] == [10.0], "there is nothing at all"
