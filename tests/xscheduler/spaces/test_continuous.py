"""The space of continuously batching policies: bounds over every point of small problems, whatever
their step times are like, and the search against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from problems_suite import (
    SLOW,
    captured,
    correlated,
    noisy_profile,
    planted,
    roofline_of,
    toy_problem,
)
from representative import some

from xgpt.core.job import FixedSchedule
from xscheduler.spaces.continuous import ContinuousSpace
from xscheduler.spaces.space import Effort, search_space
from xscheduler.tensor_plans import tensor_plans

POLICIES = ("orca", "vllm", "sarathi")
BUDGETS = (24, 80, 130, 300, 1000)
TOYS = {
    "fast": {}, "slow link, median": {"link": SLOW, "quantile": 0.5},
    "tight memory": {"memory": 1.2e8}, "little memory": {"memory": 7e7, "outputs": (30, 20, 80)},
    "correlated": {"pairs": correlated(np.random.default_rng(0))},
    "long outputs": {"outputs": (60, 20, 120)}, "a token at most": {"pairs": np.array([[30, 1]])},
    "short": {"outputs": (2.0, 0.8, 4)}, "all equal": {"pairs": np.array([[30, 40]])},
    "all equal, short": {"pairs": np.array([[60, 3]])},
    "all equal, short, tight memory": {"memory": 8e7, "pairs": np.array([[60, 3]])},
    "all equal, tight memory": {"memory": 1.2e8, "pairs": np.array([[30, 40]])},
}
TIMES = {"smooth": lambda problem: roofline_of(problem),
         "bumpy": lambda problem: planted(np.random.default_rng(4), roofline_of(problem)),
         "noisy": lambda problem: noisy_profile(np.random.default_rng(2), problem, noise=0.1),
         "captured": lambda problem: captured(roofline_of(problem))}
MOST = 60  # queries at a time


def points_of(space: ContinuousSpace):
    """(line, its points) over every max_active and some budgets."""
    for row, line in enumerate(space.lines):
        budgets = [budget for budget in BUDGETS if line.least <= budget <= line.most] or (
            [0] if line.most == 0 else [line.budget])
        yield row, [(line.plan, active, budget)
                    for active, budget in product(range(1, MOST + 1, 3), budgets)]


# every policy, kind of times and narrow case with one of the others
ALWAYS = {("little memory", "smooth", "orca"), ("a token at most", "smooth", "vllm"),
          ("short", "smooth", "sarathi"), ("tight memory", "bumpy", "orca"),
          ("tight memory", "bumpy", "sarathi"), ("slow link, median", "noisy", "vllm"),
          ("long outputs", "captured", "sarathi"), ("short", "captured", "vllm"),
          ("fast", "captured", "orca"), ("all equal", "smooth", "orca"),
          ("all equal, short", "bumpy", "orca"), ("all equal", "bumpy", "sarathi"),
          ("all equal, short", "smooth", "sarathi"), ("all equal", "smooth", "vllm"),
          ("all equal, short", "noisy", "vllm"),
          ("all equal, short, tight memory", "smooth", "vllm"),
          ("all equal, tight memory", "smooth", "sarathi")}


@pytest.mark.parametrize(("toy", "times", "policy"), some(
    product(TOYS, TIMES, POLICIES), lambda case: case in ALWAYS))
def test_no_point_is_better_than_its_line_s_bound(toy, times, policy):
    problem = toy_problem(num_queries=MOST, **TOYS[toy])
    timing = TIMES[times](problem)
    space = ContinuousSpace(policy, problem, timing, tensor_plans(problem, timing))
    of_line = {row: space.evaluate(keys) for row, keys in points_of(space)}
    every = [point for points in of_line.values() for point in points if not point.limit]
    assert any(point.throughput_qps > 0 for point in every)
    latencies = np.array([point.latency_s for point in every])
    for bound_s in (math.inf, *np.quantile(latencies[np.isfinite(latencies)], (0.05, 0.5))):
        limit, _ = space.limits(float(bound_s))
        for row, points in of_line.items():
            best = max((point.throughput_qps for point in points
                        if not point.limit and point.latency_s <= bound_s), default=0.0)
            assert best <= limit[row] * (1 + 1e-9), f"{space.lines[row]} {bound_s = }"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("toy", ["fast", "long outputs"])
def test_few_queries_at_a_time_are_bounded_closely(toy, policy):
    problem = toy_problem(num_queries=MOST, **TOYS[toy])
    timing = roofline_of(problem)
    space = ContinuousSpace(policy, problem, timing, tensor_plans(problem, timing))
    points = [point for _, keys in points_of(space) for point in space.evaluate(keys)
              if not point.limit and point.throughput_qps > 0]
    least_s = min(point.latency_s for point in points)
    # budgets are looked at in one line with those of a few tokens more
    limit, _ = space.limits((0.95 if policy == "orca" else 0.88) * least_s)
    assert not limit.any()
    limit, _ = space.limits(least_s)
    assert limit.any()


@pytest.mark.parametrize(("inputs", "outputs"), [((2000.0, 900.0, 4000), (5.0, 2.0, 12)),
                                                 ((900.0, 100.0, 1500), (34.0, 9.0, 60)),
                                                 ((30.0, 5.0, 60), (1.0, 0.0, 1))])
def test_sarathi_works_no_more_tokens_than_its_steps_have_room_for(inputs, outputs):
    problem = toy_problem(num_queries=MOST, inputs=inputs, outputs=outputs, memory=2e9)
    timing = roofline_of(problem)
    space = ContinuousSpace("sarathi", problem, timing, tensor_plans(problem, timing))
    lengths = problem.lengths
    each = lengths.inputs.mean + max(lengths.outputs.mean - 1, 0.0)
    keys = [(0, active, budget) for active in (1, 8, 60) for budget in (24, 63, 130)]
    loads = [held.load for plan, *point in keys
             for held in space.form._held([space.config(plan, tuple(point))])]
    for (_, active, budget), load in zip(keys, loads, strict=True):
        assert 0 < load.per_step[0] * each <= budget * (1 + 1e-9), f"{active = } {budget = }"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("toy", ["tight memory", *(pytest.param(
    toy, marks=pytest.mark.slow) for toy in ("fast", "long outputs", "correlated"))])
def test_the_search_finds_what_brute_force_does_and_its_bound_holds(toy, policy):
    problem = toy_problem(num_queries=MOST, fixed=FixedSchedule(tp_degree=1), **TOYS[toy])
    timing = planted(np.random.default_rng(1), roofline_of(problem))
    space = ContinuousSpace(policy, problem, timing, tensor_plans(problem, timing))
    every = [point for _, keys in points_of(space) for point in space.evaluate(keys)
             if not point.limit and point.throughput_qps > 0]
    for bound_s in (1.3 * min(point.latency_s for point in every), math.inf):
        best = max(point.throughput_qps for point in every if point.latency_s <= bound_s)
        found = search_space(ContinuousSpace(policy, problem, timing, space.plans), bound_s,
                             Effort(gap=0.005))
        assert found.outcome.best is not None
        assert found.outcome.best.objective >= best / 1.01
        assert found.outcome.upper_bound >= best


def test_what_the_job_fixes_is_kept():
    problem = toy_problem(num_queries=MOST, fixed=FixedSchedule(max_active=7, token_budget=96))
    timing = roofline_of(problem)
    space = ContinuousSpace("sarathi", problem, timing, tensor_plans(problem, timing))
    found = search_space(space, math.inf, Effort(gap=0.005))
    assert found.outcome.best is not None and found.outcome.best.point == (7, 96)
    other = replace(problem, fixed=FixedSchedule(max_active=7))
    space = ContinuousSpace("sarathi", other, timing, space.plans)
    again = search_space(space, math.inf, Effort(gap=0.005)).outcome.best
    assert again is not None and again.point[0] == 7
    assert again.objective >= found.outcome.best.objective


def test_what_another_policy_has_is_not_looked_into():
    problem = toy_problem(num_queries=MOST)
    timing = roofline_of(problem)
    space = ContinuousSpace("sarathi", problem, timing, tensor_plans(problem, timing))
    limit, _ = space.limits(math.inf)
    found = search_space(space, math.inf, Effort(gap=0.005), floor_qps=float(limit.max()))
    assert found.outcome.best is None and space.num_evaluated == 0
    assert found.outcome.upper_bound == pytest.approx(limit.max())


def test_a_bound_that_few_queries_at_a_time_keep_is_met():
    """Of short outputs the latency hardly bounds how many there may be, and a thousandth of that
    was the least looked at: no schedule was said to keep the bound."""
    problem = toy_problem(pairs=np.array([[4, 2]]), memory=1e11, devices=6)
    timing = captured(roofline_of(problem))
    space = ContinuousSpace("vllm", problem, timing, tensor_plans(problem, timing))
    alone = min(space.evaluate([(plan, 1, 512) for plan in range(len(space.plans))]),
                key=lambda point: point.latency_s)
    found = search_space(space, 1.001 * alone.latency_s, Effort(gap=0.005))
    assert found.outcome.best is not None
    assert found.outcome.best.objective >= alone.throughput_qps


@pytest.mark.parametrize(("policy", "seed", "options"), [
    ("sarathi", 17, {"devices": 1, "memory": 5e9}), ("sarathi", 22, {"devices": 1, "memory": 5e9}),
    ("vllm", 10, {"devices": 1, "memory": 5e9}),
    ("vllm", None, {"memory": 1e8, "inputs": (9, 3, 19), "outputs": (7, 2, 16),
                    "fixed": FixedSchedule(tp_degree=2, tp_gpus=2)})])
def test_the_quickest_is_found_where_it_alone_keeps_the_bound(policy, seed, options):
    """No schedule was said to keep it where some queries more than the fewest are quicker, or where
    memory has no room for a query beside what a step of the line's budget takes."""
    problem = toy_problem(num_queries=MOST, **{"outputs": (20, 8, 50)} | options)
    timing = roofline_of(problem)
    if seed is not None:
        timing = planted(np.random.default_rng(seed), timing)
    space = ContinuousSpace(policy, problem, timing, tensor_plans(problem, timing))
    keys = product([0], (*range(1, 9), 12, 16, 30), (24, 40, 64, 128, 256, 300, 512, 1024))
    quickest = min((point for point in space.evaluate(list(keys)) if not point.limit),
                   key=lambda point: point.latency_s)
    bound_s = 1.0001 * quickest.latency_s
    found = search_space(ContinuousSpace(policy, problem, timing, space.plans), bound_s,
                         Effort(gap=0.005))
    assert found.outcome.best is not None
    assert found.outcome.best.objective >= 0.99 * quickest.throughput_qps
    least_s = min(one.latency_s for one in space.easiest() if not one.limit)
    assert least_s <= bound_s, "it is what a refusal says can be met"
