"""No point of a box is better than the box's bounds: random boxes of random problems, over the
paper's models and tasks and toys with planted dips and jumps (xsimulator.policies.rra.bounds,
waa_bounds)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from problems_suite import (
    PAPER,
    TASKS,
    Case,
    Defect,
    Planted,
    as_padded,
    captured,
    noisy_profile,
    paper_case,
    toy_case,
    toy_problem,
)
from problems_suite import roofline_of as toy_roofline
from representative import some

from xgpt.core.job import FixedSchedule
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import Operator
from xscheduler.tensor_plans import tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.rra.bounds import SIDES, RraBounds
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.config import WaaBoxes, WaaConfig, WaaConfigs
from xsimulator.policies.waa.quick_bounds import QuickBounds

BOXES, POINTS = 24, 30  # of a problem; of a box


def case_of(policy: str, seed: int) -> Case:
    """A toy or, by turns, a paper model with and without planted defects."""
    rng = np.random.default_rng([5, seed])
    if seed % 2:
        return toy_case(3 * seed + ("rra", "waa-c", "waa-m").index(policy))
    model, task = str(rng.choice(list(PAPER))), str(rng.choice(TASKS))
    planted = bool(rng.random() < 0.5)
    return (paper_case(model, task, policy, seed, is_planted=planted)
            or paper_case("opt-13b", "S", policy, seed, is_planted=planted))


def some_plan(case: Case, rng: np.random.Generator):
    problem = case.problem
    fixed = replace(problem.fixed, tp_degree=None, tp_gpus=None)
    plans = tensor_plans(replace(problem, fixed=fixed), case.timing)
    if case.policy != "rra":
        plans = [plan for plan in plans if plan.tp_gpus == (problem.fixed.tp_gpus or 0)
                 and plan.tp_degree == (problem.fixed.tp_degree or 1)]
    return plans[int(rng.integers(len(plans)))]


def ranges(rng: np.random.Generator, largest: float, widest: float):
    """([boxes] least, most) in even ratios, narrow and wide ones."""
    least = np.maximum(np.exp(rng.uniform(0, np.log(largest), BOXES)).astype(np.int64), 1)
    width = np.exp(rng.uniform(0, widest, BOXES) * rng.choice([0.02, 0.3, 1.0], BOXES))
    return least, np.maximum((least * width).astype(np.int64), least)


def inside(rng: np.random.Generator, least, most, corners):
    """[boxes, points] from `least` to `most`; the first ones as `corners` say (False: least)."""
    found = rng.integers(least[:, None], most[:, None] + 1, (len(least), POINTS))
    for place, is_most in enumerate(corners):
        found[:, place] = most if is_most else least
    return found


def some_always(count: int) -> list[Any]:
    """So many seeds, of which two thirds are left to `-m slow`; both kinds of case are in
    either."""
    return [pytest.param(seed, marks=pytest.mark.slow) if seed % 6 > 1 else seed
            for seed in range(count)]


def check_rra(case: Case, seed: int, *, groups: int = 0, is_line: bool) -> int:
    rng = np.random.default_rng([6, seed])
    problem, plan = replace(case.problem, num_queries=None), some_plan(case, rng)
    rra = Rra(problem, case.timing)
    bounds = RraBounds(rra)

    def configs(batch, iterations):
        batch, iterations = np.ravel(batch), np.ravel(iterations)
        return RraConfigs(
            encode_batch=batch, decode_iterations=iterations,
            tp_degree=np.full(len(batch), plan.tp_degree),
            tp_gpus=np.full(len(batch), plan.tp_gpus),
            decode_micro_batches=np.full(len(batch), groups))

    longest = rra.flow.max_iterations
    least, most = ranges(rng, 800, 3.0)
    most = np.where((least < SIDES) & (most >= SIDES), SIDES - 1, most)  # a box is on one side
    first, last = ranges(rng, longest + 0.5, 1.0)
    last = first if is_line else np.minimum(last + 1, longest)
    with_room = rra.room(configs(most, first)).stretch <= REFUSED_BEYOND
    with_room &= is_line | (last > first)
    least, most, first, last = (ends[with_room] for ends in (least, most, first, last))
    if not len(least):
        return 0
    batch = inside(rng, least, most, (True, False))
    iterations = inside(rng, first, last, (False, True))
    found = rra.evaluate(configs(batch, iterations))
    qps, latency_s, ttft_s, tpot_s = (figures.reshape(batch.shape) for figures in (
        found.throughput_qps, found.latency_s, found.ttft_s, found.tpot_s))
    upper = [bounds.throughput_qps(configs(most, first), least, None if is_line else last)]
    later = max(problem.lengths.outputs.quantile(problem.constraint.quantile) - 1, 1)
    own = None if is_line else first
    lower = [(latency_s, bounds.latency_s(configs(least, last), most, own)),
             (ttft_s, bounds.latency_s(configs(least, last), most, own, of="ttft")),
             (later * tpot_s, bounds.latency_s(configs(least, last), most, own, of="tpot"))]
    if is_line:
        upper.append(bounds.line_throughput_qps(configs(most, first), least))
        lower.append((latency_s, bounds.line_latency_s(configs(least, last), most)))
    where = f"{case.name} {plan} {groups = } {is_line = }"
    for bound in upper:
        row = int(np.argmax(qps.max(axis=1) / bound))
        assert qps[row].max() <= bound[row], (where, least[row], most[row], first[row], last[row])
    for seconds, bound in lower:
        row = int(np.argmax(bound - seconds.min(axis=1)))
        assert bound[row] <= seconds[row].min(), (where, least[row], most[row], first[row],
                                                  last[row])
    return len(least)


def check_waa(case: Case, seed: int) -> int:
    rng = np.random.default_rng([7, seed])
    problem, plan = replace(case.problem, num_queries=None), some_plan(case, rng)
    waa = make_policy(case.policy, problem, case.timing)
    split = waa.split(plan.tp_degree, plan.tp_gpus)
    least, most = ranges(rng, 500, 3.0)
    fewest, highest = ranges(rng, 2 * problem.cluster.num_devices, 2.0)
    # half of them with chunks, of which an encoder-decoder model takes none
    is_plain = problem.model.is_encoder_decoder | (rng.random(len(least)) < 0.5)
    smallest, largest = (np.where(is_plain, 0, size) for size in ranges(rng, 2000, 2.0))
    boxes = WaaBoxes(least=least, most=most, fewest=fewest, highest=highest, chunk=smallest,
                     largest_chunk=largest)
    is_modest = bool(seed % 3)
    bounds = WaaBounds(waa, is_modest=is_modest)
    limit, least_s, least_ttft, least_iteration, least_bytes = bounds.bound(split, boxes)
    low_qps = bounds.bound(split, boxes, worth_qps=math.inf)[0]  # loose, for nothing is worth more
    singles = {1} if plan.tp_gpus < problem.cluster.num_devices else set()
    degrees = sorted({plan.tp_degree} | singles)
    quick_qps, quick_s = bounds.quick.of_boxes([split], boxes, degrees)
    batch = inside(rng, least, most, (False, False, True, True))
    groups = inside(rng, fewest, highest, (False, True, False, True))
    chunk = inside(rng, smallest, largest, (False, True, True, False))
    found, slower_s = waa.evaluate_either_way([
        WaaConfig(encode_batch=int(b), decode_micro_batches=int(g), tp_degree=plan.tp_degree,
                  tp_gpus=plan.tp_gpus, encode_chunk=int(c)) for b, g, c in zip(
            batch.ravel(), groups.ravel(), chunk.ravel(), strict=True)])
    # points there is no room for are no business of a bound
    has_room = (found.fits & (found.stretch <= REFUSED_BEYOND)).reshape(batch.shape)
    if is_modest:
        has_room &= chunk <= waa.modest_chunk(batch.astype(float), groups.astype(float))
    divided = waa.division.divide(split, WaaConfigs(
        batch=batch.ravel().astype(float), groups=groups.ravel().astype(float),
        chunk=chunk.ravel().astype(float))).reshape(batch.shape)
    may_be = waa.division.possible(split, boxes, np.ones((len(split.encode_devices), BOXES), bool))
    where = f"{case.name} {plan}"
    # with a latency bound, no point that keeps it is better
    bound_s = float(np.median(slower_s[has_room.ravel()])) if has_room.any() else 1.0
    within_qps = np.minimum.reduce([
        bounds.bound(split, boxes, latency_bound_s=bound_s)[0],
        bounds.bound(split, boxes, latency_bound_s=bound_s, worth_qps=math.inf)[0],
        bounds.quick.of_boxes([split], boxes, degrees, bound_s)[0]])
    most_batch = bounds.quick.largest_within(1500, degrees, bound_s, int(largest.max()))
    for row in np.flatnonzero(has_room.any(axis=1)):
        own = has_room[row]
        box = (where, least[row], most[row], fewest[row], highest[row], smallest[row],
               largest[row])
        assert may_be[np.searchsorted(split.encode_devices, divided[row][own]), row].all(), box
        qps, latency_s, held = (figures.reshape(batch.shape)[row][own] for figures in (
            found.throughput_qps, slower_s, found.memory_bytes))
        assert qps.max() <= min(limit[row], low_qps[row], quick_qps[row]), box
        assert qps[latency_s <= bound_s].max(initial=0.0) <= within_qps[row], box
        assert batch[row][own][latency_s <= bound_s].max(initial=0.0) <= most_batch, box
        assert max(least_s[row], quick_s[row]) <= latency_s.min(), box
        assert least_bytes[row] <= held.min(), box
        ttft_s, iteration_s = (figures.reshape(batch.shape)[row][own] for figures in (
            found.ttft_s, found.period_s))
        assert least_ttft[row] <= ttft_s.min() and least_iteration[row] <= iteration_s.min(), box
    return int(has_room.any(axis=1).sum())


@pytest.mark.parametrize("seed", some_always(24))
@pytest.mark.parametrize("is_line", [True, False], ids=["lines", "ranges"])
def test_rra_boxes(seed, is_line):
    assert check_rra(case_of("rra", seed), seed, is_line=is_line) > 0 or seed % 2


@pytest.mark.parametrize(("groups", "is_line"), some(
    product([1, 2, 5, 20], [True, False]), lambda case: case[1] == (case[0] in (1, 5))))
def test_rra_boxes_of_a_given_number_of_groups(groups, is_line):
    """Fewer than stages, and more: the closed form is then further off (see rra_bounds)."""
    boxes = sum(check_rra(case_of("rra", seed), seed, groups=groups, is_line=is_line)
                for seed in range(40, 46))
    assert boxes > 20


@pytest.mark.parametrize("policy", ["waa-c", "waa-m"])
@pytest.mark.parametrize("seed", some_always(12))
def test_waa_boxes(seed, policy):
    check_waa(case_of(policy, seed), seed)


def test_waa_boxes_are_not_all_without_room():
    assert sum(check_waa(case_of(policy, seed), seed) for policy in ("waa-c", "waa-m")
               for seed in range(4)) > 20


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_rra_boxes_of_tiny_outputs(longest):
    pairs = np.stack([np.arange(100) % 70 + 5, np.arange(100) % longest + 1], axis=1)
    for padded in (False, True):
        problem = toy_problem(pairs=pairs)
        timing = noisy_profile(np.random.default_rng(longest), problem, noise=0.1)
        case = Case(name=f"tiny {longest}", problem=problem, policy="rra",
                    timing=as_padded(timing, padded))
        assert check_rra(case, longest, is_line=True) > 0


def test_a_query_is_there_for_certain_when_its_latency_is_bounded():
    """In a long phase of few queries nobody else may be left: the bound counts the steps of the one
    whose latency it is, where it was up to half too low."""
    case = paper_case("opt-13b", "C2", "rra", 1)
    assert case is not None
    rra = Rra(replace(case.problem, num_queries=None), case.timing)
    last = rra.flow.max_iterations
    first = rra.seen_iterations  # from here on one phase is enough
    bounds = RraBounds(rra)

    def configs(n_d):
        one = np.ones(len(n_d), np.int64)
        return RraConfigs(encode_batch=one, decode_iterations=n_d, tp_degree=one, tp_gpus=0 * one,
                          decode_micro_batches=one)

    n_d, one = np.arange(first, last + 1), np.ones(last - first + 1, np.int64)
    latency_s = rra.evaluate(configs(n_d)).latency_s
    of_all = bounds.latency_s(configs(n_d[-1:]), one[:1], n_d[:1])[0]
    assert 0.9 * latency_s.min() < of_all <= latency_s.min()
    assert (0.9 * latency_s < bounds.latency_s(configs(n_d), one)).all()


def test_where_the_corner_is_refused_nothing_is_claimed():
    problem = toy_problem(fixed=FixedSchedule(tp_degree=1))
    timing = noisy_profile(np.random.default_rng(0), problem, noise=0.02)
    rra = Rra(problem, timing)
    corner = RraConfigs(encode_batch=np.array([9000]), decode_iterations=np.array([4]),
                        tp_degree=np.array([1]), tp_gpus=np.array([0]),
                        decode_micro_batches=np.array([0]))
    assert rra.evaluate(corner).throughput_qps == 0
    bounds, smallest = RraBounds(rra), np.array([20])
    assert np.isinf(bounds.throughput_qps(corner, smallest)).all()
    assert np.isinf(bounds.line_throughput_qps(corner, smallest)).all()
    assert (bounds.latency_s(corner, corner.encode_batch) == 0).all()
    assert (bounds.line_latency_s(corner, corner.encode_batch) == 0).all()


def test_a_waa_c_box_whose_largest_batches_are_refused_keeps_its_others():
    check_waa(case_of("waa-c", 493), 493)


def test_a_waa_c_box_has_the_division_of_a_step_that_one_number_of_rows_alone_makes_longer():
    """Between two sizes 3 % apart it was not looked at, and the box was said to have nothing."""
    check_waa(case_of("waa-c", 3079), 3079)


def test_no_waa_batch_is_too_slow_by_a_step_of_one_row_where_those_of_more_are_quicker():
    """The largest batch within a latency bound was said to be none: steps of up to two rows alone
    had been looked at."""
    check_waa(case_of("waa-c", 3272), 3272)


def test_no_waa_batch_is_too_slow_where_that_of_most_tokens_is_the_quicker():
    """A latency is of the batch of most tokens, and the quick bound's was of the usual one."""
    check_waa(case_of("waa-m", 92083), 92083)


def test_a_waa_box_is_as_quick_as_the_quickest_of_either_pool():
    """Single GPUs decode captured here, and groups encode quicker: a division has both. Its latency
    was bounded by encoding and decoding of the same degree, 5 % too high."""
    problem = toy_problem(devices=3, outputs=(3, 1, 6), fixed=FixedSchedule(
        policies=("waa-c",), tp_degree=2, tp_gpus=2))
    case = Case(name="captured", problem=problem, policy="waa-c",
                timing=captured(toy_roofline(problem)))
    assert sum(check_waa(case, seed) for seed in range(3)) > 20


def test_a_waa_step_may_be_the_quicker_for_its_chunk():
    """Where larger steps are quicker: the latency was bounded by that of steps without."""
    problem = toy_problem(devices=2, inputs=(200, 50, 300), fixed=FixedSchedule(
        policies=("waa-m",)))
    waa = make_policy("waa-m", problem, Planted(toy_roofline(problem), {
        Operator.LAYER_REST: (Defect(low=40.0, high=120.0, factor=0.3),)}))
    bounds, split, one = QuickBounds(waa, is_modest=False), waa.split(1, 0), np.ones(1, np.int64)
    found, slower_s = waa.evaluate_either_way([WaaConfig(
        encode_batch=1, decode_micro_batches=1, tp_degree=1, tp_gpus=0, encode_chunk=64)])
    boxes = WaaBoxes(least=one, most=one, fewest=one, highest=one, chunk=64 * one,
                     largest_chunk=64 * one)
    most_qps, least_s = bounds.of_boxes([split], boxes, [1], float(slower_s[0]))
    assert least_s <= slower_s and most_qps >= found.throughput_qps > 0
    assert bounds.largest_within(1, [1], float(slower_s[0]), 64) == 1


def test_batches_that_are_refused_leave_the_bounds_of_the_others(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection of infinite time was taken from an encoding of infinite time: no bound was a
    number any more."""
    problem = toy_problem(model="encoder-decoder", devices=2)
    waa = make_policy("waa-c", problem, toy_roofline(problem))
    known = QuickBounds(waa, is_modest=False)._single(1, 8, 8.0)
    for owner, name, most in ((waa.times, "encode_query_s", 8.0),
                              (waa.times.single(1).times, "cross_kv_s",
                               8 * problem.lengths.inputs.mean)):
        seconds = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda sizes, *more, seconds=seconds, most=most: (
            np.where((sizes > most + 1).reshape(-1, *[1] * (seconds(sizes, *more).ndim - 1)),
                     np.inf, seconds(sizes, *more))))
    waa.times.kept.clear()
    found = QuickBounds(waa, is_modest=False)._single(1, 100, 8.0)
    assert found.encode_each[:9].tolist() == known.encode_each[:9].tolist()
    assert found.encode_step[:9].tolist() == known.encode_step[:9].tolist()


def test_chunks_of_a_size_that_is_refused_have_no_share():
    """It was divided by their rate, 0, which warns (and a warning is an error here)."""
    check_waa(case_of("waa-c", 7005), 7005)


def test_of_outputs_of_one_token_no_box_is_said_to_take_longer_than_no_time_each():
    """Its bound was what rounding left of a sum over unlike stages: 3e-19 s."""
    assert check_rra(case_of("rra", 7125), 7125, is_line=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(30))
def test_many_boxes(chunk):
    for seed in range(100 + 20 * chunk, 120 + 20 * chunk):
        for is_line in (True, False):
            check_rra(case_of("rra", seed), seed, is_line=is_line)
            check_rra(case_of("rra", seed), seed, groups=(1, 3, 9, 40)[seed % 4], is_line=is_line)
        for policy in ("waa-c", "waa-m"):
            check_waa(case_of(policy, seed), seed)
