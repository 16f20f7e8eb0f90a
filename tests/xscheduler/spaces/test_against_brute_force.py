"""Every generated problem's schedule against brute force over its whole space, under four latency
bounds each: 170 toy problems (times with planted dips and jumps, noisy profiles) and 30 of the
paper's models and tasks. `-m slow` adds thousands of random ones."""

from __future__ import annotations

import math

import pytest
from brute_force import evaluate_grid
from problems_suite import Case, bounds_of, paper_cases, toy_case

from xgpt.core.errors import InfeasibleError
from xscheduler.search import GAP, Scheduler

NUM_TOYS = 170
SLOW_CHUNK = 50  # problems a test
PAPER_CASES = list(paper_cases())


def check(case: Case, seed: int) -> int:
    """Asserts what issue 6 promises; the number of bounds that something satisfied."""
    batches, others = case.ranges()
    grid = evaluate_grid(case.policy, case.problem, case.timing, encode_batches=batches,
                         others=others)
    scheduler = Scheduler(case.problem, case.timing)
    found = 0
    for bound_s in bounds_of(grid, seed):
        config, optimum = grid.best(bound_s)
        where = f"{case.name} within {bound_s} s: {optimum} by {config}"
        if config is None:
            with pytest.raises(InfeasibleError):
                scheduler.find(bound_s)
            continue
        schedule = scheduler.find(bound_s)
        estimate = schedule.estimate
        assert schedule.proof.bound_qps >= optimum, where
        assert optimum / (1 + GAP) <= estimate.figures.throughput_qps <= optimum * (1 + 1e-9), where
        assert schedule.proof.gap <= GAP and schedule.proof.status in ("optimal", "within gap"), (
            where
        )
        assert estimate.figures.throughput_qps * (1 + schedule.proof.gap) >= optimum, where
        assert estimate.figures.latency_s <= bound_s * (1 + 1e-12) and estimate.figures.fits, where
        assert max(estimate.figures.memory_bytes) <= estimate.figures.memory_capacity_bytes, where
        found += 1
    return found


@pytest.mark.parametrize("seed", range(NUM_TOYS))
def test_toy(seed):
    check(toy_case(seed, largest=32), seed)


@pytest.mark.parametrize("place", range(len(PAPER_CASES)),
                         ids=[case.name for case in PAPER_CASES])
def test_paper_model(place):
    assert check(PAPER_CASES[place], place) >= 2


def test_there_are_two_hundred_of_all_kinds():
    toys = [toy_case(seed, largest=32) for seed in range(NUM_TOYS)]
    assert len(toys) + len(PAPER_CASES) >= 200
    assert {case.policy for case in toys} == {case.policy for case in PAPER_CASES} == {
        "rra", "waa-c", "waa-m"}
    assert {type(case.timing).__name__ for case in toys} == {"Planted", "ProfileTiming"}
    assert {case.problem.model.is_encoder_decoder for case in toys} == {True, False}
    assert {1, 2, 3} < {case.problem.lengths.outputs.max for case in toys}
    assert any(case.problem.lengths.pairs is not None for case in toys)
    assert {case.problem.constraint.kind for case in toys} == {"sequence", "batch"}
    assert all(math.isinf(case.problem.constraint.latency_s) for case in toys), "given to find()"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(40))
def test_many_toys(chunk):
    for seed in range(1000 + SLOW_CHUNK * chunk, 1000 + SLOW_CHUNK * (chunk + 1)):
        check(toy_case(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.parametrize("turn", range(1, 9))
def test_many_paper_models(turn, is_planted):
    for place, case in enumerate(paper_cases(30 * turn, is_planted=is_planted, points=6000)):
        check(case, place)
