"""The rough formulas beside replays and the memory model: random points of every policy."""

import zlib
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from problems import as_given, problem_of, roofline_of

from xgpt.core.controls import WaaControls
from xgpt.core.deployment import Pool
from xgpt.core.lengths import FloatArray, JointLengths, truncated_normal
from xgpt.core.policies import policies, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import from_json, to_json
from xprofiler.roofline import Roofline
from xscheduler.replays import Replays
from xscheduler.tensor_plans import tensor_plans
from xsimulator import memory
from xsimulator.replay.prediction import num_checked_queries
from xsimulator.replay.steady_state import SteadyFigures
from xsimulator.rough.formulas import Formulas
from xsimulator.rough.workload import Workload

OFF = 0.15  # what the formulas are off by at most, in the median
POINTS = 9
SHORT = JointLengths(inputs=truncated_normal(256, 81, 512), outputs=truncated_normal(32, 13, 80))
LONG = JointLengths(inputs=truncated_normal(192, 93, 512), outputs=truncated_normal(192, 93, 400))
PROBLEMS = {"opt-13b": ("opt-13b", "a40-4", SHORT), "opt-1.3b": ("opt-1.3b", "a40-4", LONG),
            "t5-11b": ("t5-11b", "a40-4", SHORT)}
NAMES = tuple(row.name for row in policies() if row.is_searched)


class Point(NamedTuple):
    """One configuration, its estimate, and the formula's memory."""

    estimate: Estimate
    memory_bytes: float
    replayed: SteadyFigures | None


def of_model(name: str) -> tuple[Problem, Roofline]:
    model, cluster, lengths = PROBLEMS[name]
    problem = problem_of(model, cluster, lengths)
    return problem, roofline_of(problem)


def drawn(model: str, name: str) -> list[Point]:
    """Replays of random points that fit, over all tensor plans; [] if the policy has none for the
    model."""
    problem, timing = of_model(model)
    rng = np.random.default_rng(zlib.crc32(f"{model} {name}".encode()))
    formula = Formulas(problem, timing, Workload(problem)).of(name)
    plans = [plan for plan in tensor_plans(problem, timing) if formula.can_allocate(plan)]
    replays, found = Replays(problem, timing), []
    for plan in [plans[row] for row in rng.integers(len(plans), size=POINTS)]:
        points = formula.points(plan)
        rough = formula.rough(plan, points)
        able = np.flatnonzero((rough.throughput_qps > 0) & (
            rough.memory_bytes <= memory.capacity_bytes(problem.cluster.device)))
        if not len(able):
            continue
        row = int(rng.choice(able))
        estimate = formula.estimate(plan, tuple(points[row].tolist()))
        found.append(Point(estimate, float(rough.memory_bytes[row]), replays.of(
            estimate, num_checked_queries(problem, estimate)).figures))
    return found


def is_for(name: str, model: str) -> bool:
    return not (policy(name).is_decoder_only and of_model(model)[0].model.is_encoder_decoder)


CASES = [(model, name) for model in PROBLEMS for name in NAMES if is_for(name, model)]


@pytest.fixture(scope="module")
def points():
    return cache(drawn)


@pytest.mark.parametrize(("model", "policy"), CASES)
def test_throughput_and_latency_are_near_those_of_replays(points, model, policy):
    off = np.array([(estimate.figures.throughput_qps / found.throughput_qps - 1,
                     estimate.figures.latency_s / found.latency_s - 1)
                    for estimate, _, found in points(model, policy) if found is not None])
    assert len(off) and (np.nanmedian(np.abs(off), axis=0) < OFF).all(), off


@pytest.mark.parametrize(("model", "policy"), CASES)
def test_estimates_can_be_executed(points, model, policy):
    own = points(model, policy)
    assert all(one.replayed is not None for one in own) and own
    assert all(one.estimate.figures.fits for one in own)


@pytest.mark.parametrize("name", ["waa-c", "waa-m"])
def test_a_schedule_in_chunks_is_one_that_ranks_take(name):
    """Also if the encode pool keeps up by itself: then little is left for the decode pool."""
    problem, timing = of_model("opt-13b")
    formula = Formulas(problem, timing, Workload(problem)).of(name)
    points = formula.points((1, 0))
    stocks = []
    for point in points[points[:, 2] > 0][::5].tolist():
        estimate = formula.estimate((1, 0), tuple(point))
        schedule = as_given(problem, estimate)
        assert from_json(to_json(schedule)) == schedule, f"{point = }"
        assert isinstance(estimate.controls, WaaControls)
        stocks.append(estimate.controls.stock_tokens)
    assert min(stocks) == 1 < max(stocks)


@pytest.mark.parametrize(("model", "policy"), CASES)
def test_memory_is_that_of_the_memory_model(points, model, policy):
    problem = of_model(model)[0]
    for estimate, fullest, _ in points(model, policy):
        assert max(estimate.figures.memory_bytes) == pytest.approx(fullest, rel=1e-6)
        for pool in estimate.deployment.pools:
            rows = rows_of(problem, estimate, pool)
            assert rows.min() >= 1 and rows == pytest.approx(rows[0], rel=0.2)


def rows_of(problem: Problem, estimate: Estimate, pool: Pool) -> FloatArray:
    """[stages but the last] about the rows of a step that fit beside weights and KV cache. A pool
    that only decodes also has room for a request that is handed over. The last stage has logits,
    and in an encode pool the output that it hands over."""
    stages = pool.stages
    rest = memory.weight_bytes(problem.model, stages, problem.dtype, problem.weight_dtype)
    if pool.role != "encode" or not problem.model.is_encoder_decoder:
        rest = rest + memory.kv_bytes(problem, stages, pool.kv_tokens)
    none, one = (memory.StageBytes(problem, stages).step(rows, 0.0) for rows in (0.0, 1.0))
    held = np.array([estimate.figures.memory_bytes[stage.ranks[0]] for stage in stages], float)
    rows = (held - rest - none) / (one - none)
    assert rows[-1] >= 1
    return np.asarray(rows[:-1] if len(rows) > 1 else rows)
