"""RRA in chunks, searched: bounds hold for every configuration of a box, times monotone or not, and
the search finds what evaluating a whole ladder finds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of
from problems_suite import captured, noisy_profile, planted, toy_problem
from problems_suite import roofline_of as toy_roofline

from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.search import GAP, Scheduler
from xscheduler.spaces.continuous import ContinuousSpace
from xscheduler.spaces.rra import RraSpace
from xscheduler.spaces.rra_chunks import CHUNKS, ChunkPoints, ladder_of
from xscheduler.spaces.space import Effort, search_space
from xscheduler.tensor_plans import tensor_plans
from xsimulator.policies.rra.chunk_bounds import ChunkBounds, RateRanges
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig

BOXES, POINTS = 40, 12


def case_of(seed: int) -> tuple[Problem, TimingSource]:
    """A paper model, or a toy whose times have planted dips and jumps or come from noise."""
    rng = np.random.default_rng([3, seed])
    if seed % 3 == 0:
        problem = problem_of(("opt-13b", "gpt3-39b", "gpt3-175b")[seed // 3 % 3],
                             lengths=("S", "T", "C1")[seed // 3 % 3], quantile=0.9,
                             kind=("sequence", "queries")[seed % 2])
        return problem, roofline_of(problem, padded=bool(seed % 2))
    problem = toy_problem(outputs=(9 + 3 * seed, 4 + seed, 30 + 6 * seed), devices=1 + seed % 4)
    if seed % 3 == 1:
        return problem, planted(rng, toy_roofline(problem))
    return problem, noisy_profile(rng, problem, noise=0.1)


@pytest.mark.parametrize("seed", [*range(6), *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_no_configuration_of_a_box_betters_its_bounds(seed: int) -> None:
    check_boxes(seed, *case_of(seed))


@pytest.mark.parametrize("seed", [1, 4, *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(7, 40, 3))])
def test_nor_where_rows_decode_quicker_than_they_are_encoded(seed: int) -> None:
    problem, _ = case_of(seed)
    check_boxes(seed, problem, captured(toy_roofline(problem)))


def check_boxes(seed: int, problem: Problem, timing: TimingSource) -> None:
    rng, rra = np.random.default_rng([4, seed]), Rra(problem, timing)
    plans = tensor_plans(problem, timing)
    plan = plans[int(rng.integers(len(plans)))]
    held = rra.plans.both(*plan)
    groups = float(rng.choice([len(held.stages), 1 + rng.integers(8)]))
    chunk = rng.choice([*CHUNKS, 20], BOXES).astype(float)
    iterations = np.maximum(np.exp(rng.uniform(0, 5, (BOXES, POINTS))).astype(np.int64), 1)
    middle = np.exp(rng.uniform(-3, 4, (BOXES, 1)))
    spread = np.exp(rng.uniform(0, 1, (BOXES, POINTS)) * rng.choice([0.05, 1.0], (BOXES, 1)))
    batch = np.maximum((middle * spread * iterations).astype(np.int64), 1)
    mean = problem.lengths.inputs.mean
    batch = np.minimum(batch, np.maximum((chunk[:, None] * iterations * groups / mean).astype(
        np.int64), 1))
    rate = np.minimum(batch / iterations, chunk[:, None] * groups / mean)
    found = rra.evaluate([
        RraConfig(encode_batch=int(b), decode_iterations=int(n), encode_chunk=int(c),
                  decode_micro_batches=int(groups), tp_degree=plan.tp_degree,
                  tp_gpus=plan.tp_gpus)
        for row, c in enumerate(chunk) for b, n in zip(batch[row], iterations[row], strict=True)])
    is_timed = (found.stretch <= REFUSED_BEYOND).reshape(batch.shape)
    qps = np.where(is_timed, found.throughput_qps.reshape(batch.shape), 0.0)
    latency_s = np.where(is_timed, found.latency_s.reshape(batch.shape), np.inf)
    bounds, ranges = ChunkBounds(rra), RateRanges(
        rate.min(axis=1), rate.max(axis=1), batch.max(axis=1).astype(float), chunk,
        np.full(BOXES, groups))
    upper, lower = bounds.throughput_qps(held, ranges), bounds.latency_s(held, ranges)
    assert np.isfinite(upper).sum() > BOXES // 3 and (lower > 0).sum() > BOXES // 3
    row = int(np.argmax(qps.max(axis=1) / upper))
    assert qps[row].max() <= upper[row], (plan, groups, chunk[row], batch[row], iterations[row])
    row = int(np.argmax(lower / latency_s.min(axis=1)))
    assert lower[row] <= latency_s[row].min(), (plan, groups, chunk[row], batch[row],
                                                iterations[row])


def whole_ladder(problem: Problem, timing: TimingSource, bound_s: float) -> float:
    """The best throughput within the bound of every rung under every plan and chunk size, from the
    lowest that is searched to the last whose tokens the chunks hold."""
    space = RraSpace("rra", problem, timing, tensor_plans(problem, timing))
    chunks = space.chunks
    root, rung = (part.ravel() for part in np.meshgrid(
        np.arange(len(chunks.roots)), np.arange(len(chunks.ladder.batch)), indexing="ij"))
    qps, latency_s, crowded = chunks.evaluate(root, rung)
    groups = problem.fixed.decode_micro_batches
    held = np.array([one.chunk * (groups or len(space.points.rra.plans.both(
        *space.plans[one.plan]).stages)) for one in chunks.roots]) / problem.lengths.inputs.mean
    is_free = ((crowded == 0) & (latency_s <= bound_s) & (rung >= np.array(chunks.bottoms)[root])
               & (chunks.ladder.rate[rung] < held[root]))
    return float(np.max(qps[is_free], initial=0.0))


@pytest.mark.parametrize(("seed", "share"), [(1, 1.6), (2, math.inf), (4, 2.5), (5, 1.3)])
def test_the_search_finds_what_the_whole_ladder_has(seed: int, share: float) -> None:
    problem, timing = case_of(seed)
    problem = replace(problem, num_queries=200,
                      fixed=FixedSchedule(policies=("rra",), tp_degree=1))
    between = replace(problem, fixed=replace(problem.fixed, encode_chunk=0))
    tight = min(easy.latency_s for easy in RraSpace(
        "rra", between, timing, tensor_plans(between, timing)).easiest() if not easy.limit)
    bound_s = share * tight
    best, apart = whole_ladder(problem, timing, bound_s), Scheduler(between, timing).find(bound_s)
    most = max(best, apart.figures.throughput_qps)
    found = Scheduler(problem, timing).find(bound_s)
    assert best > 0 or share < 2
    assert found.figures.throughput_qps >= most / (1 + GAP) ** 2
    assert found.proof.bound_qps >= most and found.proof.gap <= GAP
    assert found.figures.latency_s <= bound_s


def test_rungs_that_are_shown_to_be_too_slow_are_not_evaluated(
        monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of(lengths="S"), fixed=FixedSchedule(policies=("rra",)))
    timing, evaluated = roofline_of(problem), list[tuple[int, int]]()
    usual = ChunkPoints.evaluate

    def noted(points, root, rung):
        evaluated.extend(zip(root.tolist(), rung.tolist(), strict=True))
        return usual(points, root, rung)

    monkeypatch.setattr(ChunkPoints, "evaluate", noted)
    space = RraSpace("rra", problem, timing, tensor_plans(problem, timing))
    bound_s = 11.5
    search_space(space, bound_s, Effort(gap=GAP))
    root, rung = np.array(sorted(set(evaluated)), np.int64).T
    least_s = space.chunks.limits(root, rung, rung, is_latency=True)
    assert len(root) > 20 and (least_s <= bound_s).all()


def test_a_space_has_its_roots_once() -> None:
    problem = problem_of(lengths="S")
    timing = roofline_of(problem)
    space = RraSpace("rra", problem, timing, tensor_plans(problem, timing))
    first, second = (space.examiner(bound_s, GAP, 0.0) for bound_s in (10.0, 5.0))
    assert len(first.roots) > 100 and all(
        one is other for one, other in zip(first.roots, second.roots, strict=True))
    sarathi = ContinuousSpace("sarathi", problem, timing, tensor_plans(problem, timing))
    assert sarathi.examiner(10.0, GAP, 0.0).roots is sarathi.examiner(5.0, GAP, 0.0).roots


@pytest.mark.parametrize(("batch", "iterations", "groups"), [(1, 16, 1), (4, 16, 4)])
def test_what_takes_up_more_than_its_chunks_hold_is_found_within_its_own_latency(
        batch: int, iterations: int, groups: int) -> None:
    """It was refused: bounded as if all of it were encoded as it came."""
    lengths = JointLengths(inputs=truncated_normal(1500, 100, 2000),
                           outputs=truncated_normal(400, 50, 800))
    problem = replace(problem_of("opt-13b", lengths=lengths), fixed=FixedSchedule(
        policies=("rra",), encode_batch=batch, decode_iterations=iterations, encode_chunk=32,
        decode_micro_batches=groups))
    timing = roofline_of(problem)
    free = Scheduler(problem, timing).find()
    found = Scheduler(problem, timing).find(1.01 * free.figures.latency_s)
    assert found.figures.throughput_qps == pytest.approx(free.figures.throughput_qps)


def test_chunks_are_searched_unless_the_job_or_the_model_has_none() -> None:
    problem = replace(problem_of(lengths="S", latency_s=11.5), fixed=FixedSchedule(
        policies=("rra",)))
    timing = roofline_of(problem)
    found = Scheduler(problem, timing).find()
    assert found.estimate.variables["encode_chunk"] in CHUNKS
    paper = replace(problem, fixed=replace(problem.fixed, encode_chunk=0))
    assert Scheduler(paper, timing).find().estimate.variables["encode_chunk"] == 0
    one = replace(problem, fixed=replace(problem.fixed, encode_chunk=200, decode_iterations=16))
    own = Scheduler(one, timing).find()
    assert own.estimate.variables["encode_chunk"] == 200 and own.figures.decode_iterations == 16
    t5 = replace(problem_of("t5-11b", latency_s=20.0), fixed=FixedSchedule(policies=("rra",)))
    space = RraSpace("rra", t5, roofline_of(t5), tensor_plans(t5, roofline_of(t5)))
    assert space.chunks.roots == [] and len(space.easiest()) > 0


def test_a_ladder_rises_evenly_and_keeps_what_the_job_fixes() -> None:
    problem = problem_of(lengths="S")
    rate = ladder_of(problem, 79, 4).rate
    assert (np.diff(rate) >= 0).all() and rate[0] <= 1 / 60
    within = rate[(rate > 2) & (rate < 64)]
    assert (np.diff(np.log(within)) < 0.017).all()
    fixed = replace(problem, fixed=FixedSchedule(encode_batch=12))
    assert set(ladder_of(fixed, 79, 4).batch.tolist()) == {12}
    both = replace(problem, fixed=FixedSchedule(encode_batch=12, decode_iterations=5))
    assert len(ladder_of(both, 79, 4).batch) == 1
