"""What keeps a bound with its margin is found where nothing but the quickest does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import evaluate_grid
from problems_suite import toy_case

from xprofiler.roofline import Roofline
from xscheduler.evaluator import Evaluator
from xscheduler.planner import Planner, PlanOptions
from xscheduler.uncertainty import Doubts
from xsimulator.policies import make_policy


@pytest.mark.parametrize("seed", [70014, *(pytest.param(
    seed, marks=pytest.mark.slow) for seed in (70013, 70028, 70017, 70021))])
def test_the_quickest_is_found_where_it_alone_keeps_the_bound_with_its_margin(seed: int) -> None:
    """Searches under tightened bounds go in steps, and ended above it: no schedule was found."""
    case = toy_case(seed)
    timing = Roofline(case.problem.model, case.problem.cluster.device, case.problem.dtype)
    free = replace(case.problem, num_queries=None, fixed=replace(case.problem.fixed, replicas=1))
    batches, others = case.ranges()
    grid = evaluate_grid(case.policy, free, timing, encode_batches=batches, others=others)
    form, order = make_policy(case.policy, free, timing), np.argsort(grid.latency_s)
    doubts = Doubts(replace(free, constraint=free.constraint.with_latency(
        limit_s=1.5 * grid.tightest_latency_s)), Evaluator(free, timing), replays=True)
    quick = [form.estimate(grid.configs[row]) for row in order if grid.is_roomy[row]][:3]
    bound_s = 1.001 * min(one.figures.latency_s * doubts.margin(one).factor for one in quick)
    problem = replace(free, constraint=free.constraint.with_latency(limit_s=bound_s))
    found = Planner(problem, timing, PlanOptions(horizon="steady")).plan()
    assert found.figures.latency_s * found.margin.factor <= bound_s * (1 + 1e-12)
