"""The best configuration of a grid and its neighbours, against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from taken_as_true import TakenAsTrue

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xscheduler.spaces import grid
from xscheduler.tensor_plans import all_tensor_plans
from xsimulator.policies.continuous.closed_form import orca, sarathi, vllm
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.figures import EstimateArrays
from xsimulator.policies.static.closed_form import dsi, ft
from xsimulator.policies.static.config import StaticConfig

PLANS = [(1, 0), (4, 4)]


def problem_of(num_queries, kind="sequence"):
    return Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), dtype="float16",
        lengths=catalog.task("S"), num_queries=num_queries, fixed=FixedSchedule(),
        constraint=latency_constraint(latency_s=math.inf, kind=kind), default_max_tokens=1)


def static_of(policy, num_queries, kind="sequence"):
    problem = problem_of(num_queries, kind)
    return policy(problem, TakenAsTrue(problem.model, problem.cluster.device, problem.dtype))


def all_static(policy, num_queries):
    parts = range(1, 9) if policy is dsi else (None,)
    return [StaticConfig(encode_batch=batch, decode_micro_batches=groups, encode_parts=part,
                         tp_degree=degree, tp_gpus=gpus)
            for batch, groups, part, (degree, gpus) in itertools.product(
                range(1, num_queries + 1), range(1, 9), parts, PLANS)]


@pytest.mark.parametrize("kind", ["sequence", "queries"])
@pytest.mark.parametrize("policy", [ft, dsi])
def test_nothing_that_brute_force_finds_is_better(policy, kind):
    ours = static_of(policy, 75, kind)
    configs = all_static(policy, 75)
    figures = ours.evaluate(configs)
    bounds_s = [*np.quantile(figures.latency_s, [0.02, 0.1, 0.3, 0.7]), math.inf]
    for bound_s in bounds_s:
        found = grid.best(ours, bound_s, plans=PLANS)
        is_admissible = figures.fits & (figures.latency_s <= bound_s)
        most = figures.throughput_qps[is_admissible].max()
        assert found is not None and found.figures.fits and found.figures.latency_s <= bound_s
        assert found.policy == ours.name and found.figures.encode_batch <= 75
        assert policy is dsi or found.controls.encode_micro_batches == found.deployment.num_groups
        # climbing may end on another top: never more than half a percent below the highest
        assert found.figures.throughput_qps >= 0.995 * most, f"{bound_s = }"


@pytest.mark.parametrize("policy", [orca, vllm, pytest.param(sarathi, marks=pytest.mark.slow)])
def test_nothing_that_a_finer_grid_finds_is_better(policy):
    ours = static_of(policy, 90)
    budgets = [0] if policy is orca else [64, 96, 128, 160, 200, 256, 320, 400, 512, 640, 800, 1024,
                                          1280, 1600, 2048, 3000, 4096, 8192]
    configs = [ContinuousConfig(max_active=most, token_budget=budget, tp_degree=degree,
                                tp_gpus=gpus)
               for most, budget, (degree, gpus) in itertools.product(range(1, 91), budgets, PLANS)]
    figures = ours.evaluate(configs)
    for bound_s in (*np.quantile(figures.latency_s, [0.05, 0.3, 0.7]), math.inf):
        found = grid.best(ours, bound_s, plans=PLANS)
        is_admissible = (figures.fits & (figures.latency_s <= bound_s)
                         & (figures.present <= 90 + 1e-9))
        assert found is not None and found.figures.fits and found.figures.latency_s <= bound_s
        assert found.figures.throughput_qps >= 0.99 * figures.throughput_qps[is_admissible].max()


def test_what_is_ruled_out_by_limits_is_not_evaluated():
    hill = LimitedHill()
    assert grid.best(hill, math.inf, plans=PLANS) == Point(
        size=137, parts=8, tp_degree=4, tp_gpus=4)
    all_seen = Hill()
    grid.best(all_seen, math.inf, plans=PLANS)
    assert len(hill.seen) < 0.7 * len(all_seen.seen)


def test_none_where_no_configuration_is_quick_enough():
    ours = static_of(ft, 50)
    assert grid.best(ours, 0.01, plans=PLANS) is None


def test_all_plans_are_considered_by_default():
    ours = static_of(ft, 75)
    assert all_tensor_plans(ours.problem, ours.timing) == [(1, 0), (2, 2), (2, 4), (4, 4)]
    found, of_few = grid.best(ours, math.inf), grid.best(ours, math.inf, plans=PLANS)
    assert found is not None and of_few is not None
    assert found.figures.throughput_qps >= of_few.figures.throughput_qps


def test_a_wider_bound_is_never_worse_and_dsi_never_below_ft():
    last = 0.0
    for bound_s in (6.0, 9.0, 14.0, math.inf):
        slow = grid.best(static_of(ft, 200), bound_s, plans=PLANS)
        quick = grid.best(static_of(dsi, 200), bound_s, plans=PLANS)
        assert slow is not None and quick is not None
        assert slow.figures.throughput_qps >= last and (
            quick.figures.throughput_qps >= 0.999 * slow.figures.throughput_qps)
        last = slow.figures.throughput_qps


@dataclass(frozen=True, kw_only=True)
class Point:
    size: int
    parts: int
    tp_degree: int = 1
    tp_gpus: int = 0
    unused: int = 0


class Hill:
    """A known top off the grid; `latency` is the size."""

    def __init__(self):
        self.problem = problem_of(None)
        self.timing = None
        self.seen = set()

    def grid(self, max_queries, plans):
        return [Point(size=size, parts=4, tp_degree=d, tp_gpus=g)
                for size in (100, 110, 121) for d, g in plans]

    def evaluate(self, configs):
        self.seen |= set(configs)
        size, parts, gpus = (np.array([getattr(c, key) for c in configs], float)
                             for key in ("size", "parts", "tp_gpus"))
        zeros = np.zeros(len(configs))
        return EstimateArrays(**dict.fromkeys(EstimateArrays.__dataclass_fields__, zeros) | {
            "throughput_qps": 1000 - abs(size - 137) - abs(parts - 9) + gpus, "latency_s": size,
            "fits": parts < 9})

    def estimate(self, config):
        return config


class LimitedHill(Hill):
    """Says beforehand what no point exceeds."""

    def limits(self, configs):
        figures = Hill().evaluate(configs)
        return figures.throughput_qps + 2, figures.latency_s - 1


def test_climbs_to_the_top_that_the_constraints_leave():
    hill = Hill()
    assert grid.best(hill, math.inf, plans=PLANS) == Point(
        size=137, parts=8, tp_degree=4, tp_gpus=4)
    assert grid.best(hill, 117.5, plans=PLANS).size == 117
    assert all(point.size >= 1 and point.parts >= 1 and point.unused == 0 for point in hill.seen)
