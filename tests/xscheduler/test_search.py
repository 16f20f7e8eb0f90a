"""find_schedule: over all policies, and what it says about what it found. That it is right:
test_against_brute_force.py, test_bounds.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from brute_force import evaluate_grid
from problems_suite import (
    POLICIES,
    SLOW,
    correlated,
    noisy_profile,
    planted,
    roofline_of,
    toy_problem,
)
from representative import some

from xgpt.core import catalog, policies
from xgpt.core.constraint import latency_constraint
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.json_values import estimate_keys
from xgpt.core.problem import Problem
from xgpt.core.schedule_file import from_json, to_json
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator
from xscheduler.search import Scheduler, find_schedule
from xscheduler.spaces.space import Effort
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig

QUERIES = 40  # of every job here that is compared with brute force


def paper_problem(*, fixed: FixedSchedule | None = None, **about) -> Problem:
    """What the job leaves open of the policies are the paper's own: brute force is over these."""
    own = fixed or FixedSchedule()
    return toy_problem(fixed=replace(own, policies=own.policies or POLICIES), **about)


def oracles(problem: Problem, timing, policies=POLICIES):
    """By policy."""
    batches = range(1, QUERIES + 1)
    if problem.fixed.encode_batch is not None:
        batches = [problem.fixed.encode_batch]
    iterations = range(1, max(problem.lengths.outputs.max - 1, 1) + 1)
    if problem.fixed.decode_iterations is not None:
        iterations = [problem.fixed.decode_iterations]
    return {policy: evaluate_grid(policy, problem, timing, encode_batches=batches,
                                  others=iterations if policy == "rra" else None)
            for policy in policies}


def optimum(grids, bound_s: float = math.inf) -> float:
    return max(grid.best(bound_s)[1] for grid in grids.values())


def tightest(grids) -> float:
    return min(grid.tightest_latency_s for grid in grids.values())


TOYS = {
    "fast link": {}, "slow link": {"link": SLOW}, "two devices": {"devices": 2},
    "tight memory": {"memory": 1.2e8}, "median": {"quantile": 0.5},
    "correlated": {"pairs": correlated(np.random.default_rng(0))},
    "a token at most": {"pairs": np.array([[30, 1], [60, 1]])},
}


@pytest.mark.parametrize("toy", some(TOYS, lambda toy: toy in (
    "slow link", "tight memory", "a token at most")))
def test_the_best_of_all_policies_equals_brute_force(toy):
    problem = paper_problem(**TOYS[toy], num_queries=QUERIES)
    timing = planted(np.random.default_rng(1), roofline_of(problem))
    grids = oracles(problem, timing)
    scheduler = Scheduler(problem, timing)
    for bound_s in (1.05 * tightest(grids), 1.7 * tightest(grids), math.inf):
        found, best = scheduler.find(bound_s), optimum(grids, bound_s)
        assert found.proof.bound_qps >= best
        assert best / 1.005 <= found.estimate.figures.throughput_qps <= best * (1 + 1e-9)
        assert found.estimate.figures.latency_s <= bound_s and found.estimate.figures.fits


def test_without_a_gap_it_is_the_optimum():
    problem = paper_problem(num_queries=QUERIES)
    grids = oracles(problem, roofline_of(problem))
    bound_s = 1.4 * tightest(grids)
    found = Scheduler(problem, roofline_of(problem), Effort(gap=0.0)).find(bound_s)
    assert found.estimate.figures.throughput_qps == pytest.approx(optimum(grids, bound_s), rel=1e-9)
    assert found.proof.status == "optimal" and found.proof.gap <= 1e-9


def test_a_bound_costs_throughput_and_the_schedule_says_how_much():
    problem = paper_problem(num_queries=QUERIES)
    grids = oracles(problem, roofline_of(problem))
    found = Scheduler(problem, roofline_of(problem)).find(1.02 * tightest(grids))
    assert found.proof.unbounded_qps == pytest.approx(optimum(grids), rel=0.02)
    assert found.proof.unbounded_qps > found.estimate.figures.throughput_qps
    label = found.rejected[-1]
    assert label.label.startswith("without a latency bound") and "latency above" in label.reason
    assert label.throughput_qps == found.proof.unbounded_qps
    labels = [row.label for row in found.rejected[:-1]]
    others = set(POLICIES) - {found.estimate.policy}
    assert others == {label.split()[1].rstrip(":") for label in labels
                      if label.startswith("policy")}
    degrees = {label.split()[1].rstrip(":") for label in labels if label.startswith("tp_degree")}
    assert degrees | {str(found.estimate.deployment.tp_degree)} == {"1", "2", "4"}


@pytest.mark.parametrize("policy", POLICIES)
def test_same_input_same_schedule_nodes_and_reasons(policy):
    problem = paper_problem(latency_s=0.05, num_queries=QUERIES,
                          fixed=FixedSchedule(policies=(policy,)))
    first, second = (find_schedule(problem, planted(np.random.default_rng(3), roofline_of(problem)))
                     for _ in range(2))
    assert first.proof.nodes > 0 and first.proof.pruned
    assert first.changed(seconds=0) == second.changed(seconds=0)


def test_of_several_bounds_each_has_the_answer_it_has_alone():
    problem = paper_problem(num_queries=QUERIES, fixed=FixedSchedule(policies=("rra",)))
    timing = roofline_of(problem)
    one = tightest(oracles(problem, timing, ["rra"]))
    swept, total = Scheduler(problem, timing), 0
    for bound_s in (1.1 * one, 2 * one, math.inf, 1.3 * one):
        ours, alone = (s.find(bound_s) for s in (swept, Scheduler(problem, timing)))
        assert ours.estimate.figures.throughput_qps == pytest.approx(
            alone.estimate.figures.throughput_qps, rel=0.005)
        total += alone.proof.nodes
        assert ours.proof.nodes <= total, "what was evaluated for one serves the next"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_limit_is_repeatable_and_leaves_a_valid_bound(policy):
    problem = paper_problem(num_queries=400, outputs=(20, 12, 50), fixed=FixedSchedule(
        policies=(policy,)))
    timing = planted(np.random.default_rng(5), roofline_of(problem))
    whole = find_schedule(problem, timing, Effort(gap=0.0))
    cut, again = (find_schedule(problem, timing, Effort(gap=0.0, max_nodes=1)) for _ in range(2))
    assert cut.proof.status == "stopped at its limit"
    assert cut.changed(seconds=0) == again.changed(seconds=0)
    # what is beside it is looked into likewise
    assert cut.proof.nodes <= 1.1 * whole.proof.nodes
    assert (
        cut.estimate.figures.throughput_qps
        <= whole.estimate.figures.throughput_qps
        <= cut.proof.bound_qps
    )
    assert cut.proof.gap == pytest.approx(
        cut.proof.bound_qps / cut.estimate.figures.throughput_qps - 1
    )


def test_an_impossible_bound_names_the_tightest_and_who_meets_it():
    problem = paper_problem(num_queries=QUERIES)
    grids = oracles(problem, roofline_of(problem))
    scheduler = Scheduler(problem, roofline_of(problem))
    with pytest.raises(InfeasibleError, match="every one takes longer") as raised:
        scheduler.find(0.9 * tightest(grids))
    named_s = float(str(raised.value).split("can be met is ")[1].split(" s,")[0])
    assert tightest(grids) <= named_s <= 1.001 * tightest(grids)
    assert scheduler.find(named_s).estimate.figures.latency_s <= named_s


def test_a_model_too_large_names_memory():
    problem = paper_problem(memory=3e7, num_queries=QUERIES)
    with pytest.raises(InfeasibleError, match="too little memory.*it takes more devices"):
        find_schedule(problem, roofline_of(problem))


def test_a_fixed_value_too_large_for_the_memory_is_named():
    fixed = FixedSchedule(policies=("rra",), encode_batch=1_000_000, tp_degree=1)
    problem = paper_problem(fixed=fixed, num_queries=None)
    with pytest.raises(InfeasibleError, match=(
            r"too little memory.*it takes smaller values than the job fixes "
            r"\(schedule\.encode_batch = 1000000\), more devices")):
        find_schedule(problem, roofline_of(problem))


def test_fixed_values_are_kept():
    fixed = FixedSchedule(policies=("rra",), encode_batch=7, decode_iterations=5,
                          tp_degree=2, tp_gpus=2)
    problem = paper_problem(fixed=fixed)
    found = find_schedule(problem, roofline_of(problem))
    config = RraConfig(encode_batch=7, decode_iterations=5, tp_degree=2, tp_gpus=2)
    assert found.estimate == Rra(problem, roofline_of(problem)).estimate(config)


@pytest.mark.parametrize(("field", "value"), [
    ("encode_batch", 7), ("decode_iterations", 5), ("tp_degree", 2), ("tp_gpus", 2),
    ("decode_micro_batches", 3)])
def test_one_fixed_value_is_kept_and_the_rest_searched(field, value):
    problem = paper_problem(num_queries=QUERIES, fixed=FixedSchedule(**{field: value}))
    policies = ["rra"] if field == "decode_iterations" else POLICIES
    best = optimum(oracles(problem, roofline_of(problem), policies))
    found = find_schedule(problem, roofline_of(problem))
    assert estimate_keys(found.estimate)[field] == value
    assert best / 1.005 <= found.estimate.figures.throughput_qps <= best * (1 + 1e-9) <= (
        found.proof.bound_qps * (1 + 2e-9))


@pytest.mark.parametrize(("fixed", "what"), [
    (FixedSchedule(tp_degree=3), "attention heads"),
    (FixedSchedule(tp_degree=2, tp_gpus=3), "multiple"),
    (FixedSchedule(tp_gpus=3), "multiple")])
def test_fixed_values_that_cannot_be_held_are_wrong_input(fixed, what):
    problem = paper_problem(fixed=fixed)
    with pytest.raises(InputError, match=what):
        find_schedule(problem, roofline_of(problem))


def test_a_policy_without_a_space_is_left_out(monkeypatch):
    own = policies.policy("ft")
    monkeypatch.setitem(policies._OWN, "ft", replace(own, space=None, is_searched=False))
    problem = paper_problem(fixed=FixedSchedule(policies=("ft",)))
    with pytest.raises(InputError, match="left out.*without a space is not searched"):
        find_schedule(problem, roofline_of(problem))


def test_one_device_cannot_be_divided():
    problem = paper_problem(devices=1, fixed=FixedSchedule(policies=("waa-c",)))
    with pytest.raises(InputError, match="cannot be divided"):
        find_schedule(problem, roofline_of(problem))
    alone = find_schedule(replace(problem, fixed=FixedSchedule(policies=POLICIES),
                                  num_queries=QUERIES),
                          roofline_of(problem))
    assert alone.estimate.policy == "rra"


def test_a_finite_job_never_plans_more_queries_than_it_has():
    problem = paper_problem(num_queries=25)
    found = find_schedule(problem, roofline_of(problem))
    assert found.estimate.figures.decode_batch <= 25 and found.estimate.figures.encode_batch <= 25


def test_a_noisy_profile_is_searched_as_far_as_it_reaches():
    problem = paper_problem(fixed=FixedSchedule(policies=("rra",)))
    found = find_schedule(problem, noisy_profile(np.random.default_rng(2), problem, noise=0.1))
    assert found.proof.gap <= 0.005 and math.isfinite(found.estimate.figures.latency_s)


@pytest.mark.parametrize("policy", ["waa-c", "waa-m"])
def test_a_profile_without_compaction_or_too_small_for_the_job_ends_waa_s_search(policy):
    problem = paper_problem(fixed=FixedSchedule(policies=(policy,)))
    found = noisy_profile(np.random.default_rng(2), problem, noise=0.1)
    tables = {key: points for key, points in found.profile.tables.items()
              if key.name != Operator.KV_COMPACTION.value}
    assert len(tables) < len(found.profile.tables)
    timing = ProfileTiming(replace(found.profile, tables=tables), roofline_of(problem))
    assert find_schedule(problem, timing).estimate.policy == policy
    small = {key: points[:1] for key, points in tables.items()}
    timing = ProfileTiming(replace(found.profile, tables=small), roofline_of(problem))
    with pytest.raises(InfeasibleError, match="smaller sizes than this job's"):
        find_schedule(problem, timing)


def test_a_tail_of_next_to_no_queries_is_no_refused_size():
    problem = paper_problem(outputs=(6.53, 1.2, 20))
    config = RraConfig(encode_batch=6, decode_iterations=19, tp_degree=2, tp_gpus=2)
    assert Rra(problem, roofline_of(problem)).evaluate([config]).throughput_qps[0] > 0


def test_a_tail_of_next_to_no_queries_hides_no_better_schedule():
    problem = paper_problem(outputs=(6.53, 1.2, 20), num_queries=QUERIES,
                          fixed=FixedSchedule(policies=("rra",)))
    timing = roofline_of(problem)
    grids = oracles(problem, timing, ["rra"])
    bound_s = 1.25 * tightest(grids)
    found = Scheduler(problem, timing).find(bound_s)
    assert found.proof.bound_qps >= optimum(grids, bound_s)
    assert found.estimate.figures.throughput_qps >= optimum(grids, bound_s) / 1.005


def test_schedule_survives_its_file_format():
    problem = paper_problem(latency_s=0.05, num_queries=QUERIES)
    found = find_schedule(problem, roofline_of(problem))
    assert from_json(to_json(found)) == found


def opt_13b(latency_s):
    return Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"),
        lengths=catalog.task("S"), dtype="float16", num_queries=None, default_max_tokens=80,
        constraint=latency_constraint(latency_s=latency_s), fixed=FixedSchedule(policies=("rra",)))


def test_opt_13b_summarising_on_four_a40_trades_as_in_the_papers_case_study():
    """Looser bounds: larger encode batches first; without one, far more frequent encoding."""
    schedules = [find_schedule(opt_13b(bound), roofline_of(opt_13b(bound)))
                 for bound in (3.1, 5.9, 11.5, math.inf)]
    rates = [s.estimate.figures.throughput_qps for s in schedules]
    assert rates == sorted(rates)
    batches = [s.estimate.figures.encode_batch for s in schedules[:3]]
    assert batches == sorted(batches) and batches[0] < batches[2]
    iterations = [s.estimate.figures.decode_iterations for s in schedules]
    assert iterations[3] <= iterations[2] / 2
    assert all(
        s.estimate.figures.latency_s <= s.bound.limit_s and s.proof.gap <= 0.005 for s in schedules
    )
    # summed over four searches: a machine-independent stand-in for "in a second"
    assert sum(s.proof.nodes for s in schedules) < 8000
