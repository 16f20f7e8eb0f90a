"""find_schedule against brute force, and what it says about what it found."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from xgpt import catalog
from xgpt.cluster import Cluster, Device, Link
from xgpt.errors import InfeasibleError, InputError
from xgpt.job import Constraint, FixedSchedule
from xgpt.lengths import JointLengths, joint_empirical, truncated_normal
from xgpt.model import ModelSpec
from xgpt.problem import Problem
from xgpt.schedule import schedule_from_dict
from xprofiler.roofline import Roofline
from xscheduler.brute_force import best_of_grid
from xscheduler.search import BATCH_TOLERANCE, find_schedule
from xsimulator.policies.rra import Rra, RraConfig

TOY = ModelSpec(name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16,
                vocab_size=8000, intermediate_size=4096, max_positions=512,
                has_learned_positions=True)
FAST = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
SLOW = Link(name="slow", bandwidth_bytes_per_s=10e9, latency_s=10e-6)


def toy_problem(*, latency_s=math.inf, devices=4, memory=6e8, link=FAST, fixed=None,
                inputs=(40, 20, 80), outputs=(9, 4, 20), num_queries=None,
                quantile=0.99, pairs=None):
    device = Device(name="toy", kind="gpu", memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    cluster = Cluster(name="toy", device=device, num_nodes=1, devices_per_node=devices,
                      intra_link=link, inter_link=SLOW)
    lengths = joint_empirical(pairs) if pairs is not None else JointLengths(
        inputs=truncated_normal(*inputs), outputs=truncated_normal(*outputs))
    return Problem(model=TOY, cluster=cluster, lengths=lengths, dtype="float16",
                   constraint=Constraint(latency_s=latency_s, quantile=quantile),
                   fixed=fixed or FixedSchedule(), num_queries=num_queries, default_max_tokens=20)


def roofline_of(problem):
    return Roofline(problem.model, problem.cluster.device, problem.dtype)


GRID = 40  # largest batch of the oracle


def oracle(problem, *, largest=GRID, padded=True):
    fixed, iterations = problem.fixed, problem.lengths.outputs.max - 1
    batches = range(1, largest + 1) if fixed.encode_batch is None else [fixed.encode_batch]
    return best_of_grid(
        problem, roofline_of(problem), encode_batches=batches, padded=padded,
        decode_iterations=range(1, iterations + 1) if fixed.decode_iterations is None else [
            fixed.decode_iterations])


def pairs_of(seed):
    rng = np.random.default_rng(seed)
    inputs = rng.integers(5, 80, 400)
    return np.stack([inputs, np.clip(inputs // 3 + rng.integers(-3, 4, 400), 1, 20)], axis=1)


TOYS = {
    "fast link": {}, "slow link": {"link": SLOW}, "two devices": {"devices": 2},
    "one device": {"devices": 1}, "tight memory": {"memory": 1.2e8},
    "long outputs": {"outputs": (20, 12, 50), "inputs": (10, 4, 20), "devices": 2},
    "correlated": {"pairs": pairs_of(0)}, "few queries": {"num_queries": 40},
    "median": {"quantile": 0.5},
}


@pytest.mark.parametrize(("tightness", "padded"), [(1.02, True), (1.7, False), (2.5, True)])
@pytest.mark.parametrize("toy", TOYS)
def test_equals_brute_force(toy, tightness, padded):
    problem = toy_problem(**TOYS[toy])
    tightest = oracle(problem, largest=1, padded=padded).tightest_latency_s
    latency_s = tightest * tightness
    problem = replace(problem, constraint=replace(problem.constraint, latency_s=latency_s))
    expected = oracle(problem, padded=padded)
    found = find_schedule(problem, roofline_of(problem), gap=0.0, padded=padded)
    if found.estimate.encode_batch <= GRID:  # else the optimum lies beyond the grid
        assert found.estimate.throughput_qps == pytest.approx(expected.throughput_qps, rel=1e-9)
    assert found.estimate.throughput_qps >= expected.throughput_qps * (1 - 1e-9)
    assert found.bound_qps >= expected.throughput_qps
    assert found.estimate.latency_s <= latency_s
    assert found.estimate.fits


@pytest.mark.parametrize("seed", range(6))
def test_gap_and_bound_hold_under_random_bounds(seed):
    rng = np.random.default_rng(seed)
    problem = toy_problem(link=(FAST, SLOW)[seed % 2], memory=rng.uniform(1.5e8, 3e8))
    tightest = oracle(problem, largest=1).tightest_latency_s
    problem = replace(problem, constraint=Constraint(latency_s=tightest * rng.uniform(1.05, 3)))
    expected = oracle(problem)
    found = find_schedule(problem, roofline_of(problem), gap=0.02)
    assert found.bound_qps >= expected.throughput_qps
    assert found.estimate.throughput_qps * (1 + found.gap) == pytest.approx(found.bound_qps)
    assert found.gap <= 0.02 + BATCH_TOLERANCE


def test_without_a_latency_bound_memory_decides():
    problem = toy_problem(memory=1.2e8)
    expected = oracle(problem)
    found = find_schedule(problem, roofline_of(problem), gap=0.0)
    assert found.estimate.throughput_qps == pytest.approx(expected.throughput_qps)
    assert found.unbounded_qps == found.estimate.throughput_qps
    assert max(found.estimate.memory_bytes) <= found.estimate.memory_capacity_bytes


def test_a_bound_costs_throughput_and_the_schedule_says_how_much():
    problem = toy_problem()
    tightest = oracle(problem, largest=1).tightest_latency_s
    tight = replace(problem, constraint=Constraint(latency_s=tightest * 1.5))
    found = find_schedule(tight, roofline_of(problem))
    assert found.unbounded_qps > 1.2 * found.estimate.throughput_qps
    label = found.rejected[-1]
    assert label.label.startswith("without a latency bound") and "latency above" in label.reason
    assert label.throughput_qps == found.unbounded_qps
    degrees = {row.label.split()[1].rstrip(":") for row in found.rejected[:-1]}
    assert degrees | {str(found.estimate.tp_degree)} == {"1", "2", "4"}


def test_same_input_same_schedule():
    problem = toy_problem(latency_s=0.05)
    first, second = (find_schedule(problem, roofline_of(problem)) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)


def test_an_impossible_bound_names_the_tightest_and_who_meets_it():
    problem = toy_problem()
    expected = oracle(problem, largest=1)
    impossible = replace(problem, constraint=Constraint(
        latency_s=0.9 * expected.tightest_latency_s))
    with pytest.raises(InfeasibleError, match="latency binds") as raised:
        find_schedule(impossible, roofline_of(problem))
    named_s = float(str(raised.value).split("can be met is ")[1].split(" s,")[0])
    assert expected.tightest_latency_s <= named_s <= 1.001 * expected.tightest_latency_s
    met = replace(problem, constraint=Constraint(latency_s=named_s))
    assert find_schedule(met, roofline_of(problem)).estimate.latency_s <= named_s
    assert "encode_batch 1," in str(raised.value)
    # and the bound it names can in fact be met
    possible = replace(problem, constraint=Constraint(
        latency_s=1.0001 * expected.tightest_latency_s))
    assert find_schedule(possible, roofline_of(problem)).estimate.encode_batch >= 1


def test_a_model_too_large_names_memory():
    with pytest.raises(InfeasibleError, match="memory binds"):
        problem = toy_problem(memory=3e7)
        find_schedule(problem, roofline_of(problem))


def test_fixed_values_are_kept():
    fixed = FixedSchedule(policy="rra", encode_batch=7, decode_iterations=5, tp_degree=2, tp_gpus=2)
    problem = toy_problem(fixed=fixed)
    found = find_schedule(problem, roofline_of(problem))
    config = RraConfig(encode_batch=7, decode_iterations=5, tp_degree=2, tp_gpus=2)
    assert found.estimate == Rra(problem, roofline_of(problem)).estimate(config)


@pytest.mark.parametrize(("field", "value"), [
    ("encode_batch", 7), ("decode_iterations", 5), ("tp_degree", 2), ("tp_gpus", 2),
    ("decode_micro_batches", 3)])
def test_one_fixed_value_is_kept_and_the_rest_searched(field, value):
    problem = toy_problem(fixed=FixedSchedule(**{field: value}))
    found = find_schedule(problem, roofline_of(problem), gap=0.0)
    assert getattr(found.estimate, field) == value
    expected = oracle(problem).throughput_qps
    assert found.estimate.throughput_qps >= expected * (1 - 1e-9)
    if found.estimate.encode_batch <= GRID:
        assert found.estimate.throughput_qps == pytest.approx(expected)


@pytest.mark.parametrize(("fixed", "what"), [
    (FixedSchedule(policy="waa"), "left out"),
    (FixedSchedule(tp_degree=3), "attention heads"),
    (FixedSchedule(tp_degree=2, tp_gpus=3), "multiple"),
    (FixedSchedule(tp_gpus=3), "multiple")])
def test_fixed_values_that_cannot_be_held_are_wrong_input(fixed, what):
    problem = toy_problem(fixed=fixed)
    with pytest.raises(InputError, match=what):
        find_schedule(problem, roofline_of(problem))


def test_a_finite_job_never_plans_more_queries_than_it_has():
    problem = toy_problem(num_queries=25)
    found = find_schedule(problem, roofline_of(problem))
    assert found.estimate.decode_batch <= 25
    assert found.estimate.encode_batch <= 25


def test_a_node_limit_is_reported():
    problem = toy_problem(latency_s=0.05)
    found = find_schedule(problem, roofline_of(problem), gap=0.0, max_nodes=1)
    assert found.status == "stopped at its limit"
    assert found.bound_qps >= oracle(problem).throughput_qps


def test_schedule_survives_its_file_format():
    problem = toy_problem(latency_s=0.05)
    found = find_schedule(problem, roofline_of(problem))
    assert schedule_from_dict(found.to_dict()) == found


def opt_13b(latency_s):
    return Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"),
        lengths=catalog.task("S"), dtype="float16", num_queries=None, default_max_tokens=80,
        constraint=Constraint(latency_s=latency_s), fixed=FixedSchedule())


def test_opt_13b_summarising_on_four_a40_trades_as_in_the_papers_case_study():
    """Looser bounds: larger encode batches first; without one, far more frequent encoding."""
    schedules = [find_schedule(opt_13b(bound), roofline_of(opt_13b(bound)))
                 for bound in (3.1, 5.9, 11.5, math.inf)]
    rates = [s.estimate.throughput_qps for s in schedules]
    assert rates == sorted(rates)
    batches = [s.estimate.encode_batch for s in schedules[:3]]
    assert batches == sorted(batches) and batches[0] < batches[2]
    iterations = [s.estimate.decode_iterations for s in schedules]
    assert iterations[3] <= iterations[2] / 2
    assert all(s.estimate.latency_s <= s.latency_bound_s and s.gap <= 0.007 for s in schedules)
    # summed over four searches: a machine-independent stand-in for "well under two seconds"
    assert sum(s.nodes for s in schedules) < 4000
