"""Every generated problem's schedule against brute force over its whole space, under four latency
bounds each: 170 toy problems (times with planted dips and jumps, noisy profiles) and 30 of the
paper's models and tasks; some of both always, all with `-m slow`, which adds thousands of random
ones."""

from __future__ import annotations

import math
from functools import cache

import pytest
from brute_force import evaluate_grid
from problems_suite import PAPER, TASKS, Case, bounds_of, paper_case_at, paper_cases, toy_case

from xgpt.core.errors import InfeasibleError
from xscheduler.search import GAP, Scheduler

NUM_TOYS, ALWAYS, PAPER_STEP = 170, 24, 4
SLOW_CHUNK = 50  # problems a test
NUM_PAPER = len(PAPER) * len(TASKS)


@cache
def toy(seed):
    return toy_case(seed, largest=32)


@cache
def paper(place):
    return paper_case_at(place)


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


@pytest.mark.parametrize("seed", [
    seed if seed < ALWAYS else pytest.param(seed, marks=pytest.mark.slow)
    for seed in range(NUM_TOYS)])
def test_toy(seed):
    check(toy(seed), seed)


@pytest.mark.parametrize("place", [
    pytest.param(place, marks=() if place % PAPER_STEP == 0 else pytest.mark.slow)
    for place in range(NUM_PAPER)])
def test_paper_model(place):
    assert check(paper(place), place) >= 2


def test_there_are_two_hundred_of_all_kinds():
    assert NUM_TOYS + NUM_PAPER >= 200
    always = [toy(seed) for seed in range(ALWAYS)]
    papers = [paper(place) for place in range(0, NUM_PAPER, PAPER_STEP)]
    assert {case.policy for case in always} == {case.policy for case in papers} == {
        "rra", "waa-c", "waa-m"}
    assert {case.problem.model.name for case in papers} == PAPER.keys()
    assert {type(case.timing).__name__ for case in always} == {"Planted", "ProfileTiming"}
    assert {case.problem.model.is_encoder_decoder for case in always} == {True, False}
    assert {1, 2, 3} < {case.problem.lengths.outputs.max for case in always}
    assert any(case.problem.lengths.pairs is not None for case in always)
    assert {case.problem.constraint.kind for case in always} == {"sequence", "batch"}
    assert all(math.isinf(case.problem.constraint.latency_s) for case in always), "given to find()"


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
