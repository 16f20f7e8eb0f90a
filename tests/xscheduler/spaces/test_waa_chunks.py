"""WAA whose decode pools take chunks, searched: as much is found as all configurations have, and
chunks are left out where the job or the model has none. (test_bounds.py has their bounds.)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of
from refusing import Refusing

from xgpt.core import catalog
from xgpt.core.cluster import uniform_cluster
from xgpt.core.controls import WaaControls
from xgpt.core.errors import InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit
from xscheduler.search import GAP, Scheduler
from xscheduler.spaces.space import Effort
from xscheduler.tensor_plans import tensor_plans
from xscheduler.spaces.waa import WaaSpace
from xscheduler.spaces.waa_boxes import CHUNKS, WorkLeft, group_range
from xscheduler.spaces.waa_climb import Climber
from xscheduler.spaces.waa_examiner import LEFT
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.quick_bounds import QuickBounds


def all_points(problem: Problem, timing: TimingSource, bound_s: float,
               name: str = "waa-m") -> float:
    """The most throughput of any configuration with a chunk that is searched."""
    space = WaaSpace(name, problem, timing, tensor_plans(problem, timing))
    most = 0.0
    for plan, split in enumerate(space.splits):
        fewest, highest = group_range(problem, split)
        keys = [(plan, batch, groups, chunk) for batch in range(1, 61)
                for groups in range(fewest, highest + 1) for chunk in CHUNKS
                if space.is_modest(batch, groups, chunk)]
        most = max(most, *(qps for qps, latency_s, limit in space.evaluate(keys)
                           if not limit and latency_s <= bound_s), 0.0)
    return most


@pytest.mark.parametrize(("bound_s", "gain"), [(3.5, 1.0), (7.0, 1.1), (math.inf, 1.1)])
def test_the_search_finds_what_all_chunks_have(bound_s: float, gain: float) -> None:
    problem = replace(problem_of(lengths="S", latency_s=bound_s), fixed=FixedSchedule(
        policies=("waa-m",), encode_batch=None), num_queries=None)
    timing = roofline_of(problem)
    best = all_points(problem, timing, bound_s)
    found = Scheduler(problem, timing).find()
    alone = Scheduler(replace(problem, fixed=replace(
        problem.fixed, encode_chunk=0)), timing).find()
    assert best > 0
    assert found.figures.throughput_qps >= max(best, alone.figures.throughput_qps) / (1 + GAP)
    assert found.proof.bound_qps >= best
    assert found.estimate.variables["encode_chunk"] in CHUNKS
    assert alone.estimate.variables["encode_chunk"] == 0
    assert found.figures.throughput_qps > gain * alone.figures.throughput_qps


def test_where_chunks_would_take_too_much_they_are_left_open_and_the_bound_says_so(
        monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of(lengths="S", latency_s=7.0), fixed=FixedSchedule(
        policies=("waa-m",)), num_queries=None)
    timing = roofline_of(problem)
    whole = Scheduler(problem, timing).find()
    monkeypatch.setattr("xscheduler.spaces.waa.CHUNKED_WORK", 0)
    left = Scheduler(problem, timing).find()
    assert left.estimate.variables["encode_chunk"] == 0 < whole.estimate.variables["encode_chunk"]
    assert left.proof.bound_qps >= whole.figures.throughput_qps > left.figures.throughput_qps
    assert any(LEFT in reason for reason, _ in left.proof.pruned)
    asked = Scheduler(problem, timing, Effort(gap=GAP, keeps_gap=True)).find()
    assert asked.figures.throughput_qps >= whole.figures.throughput_qps / (1 + GAP)


def test_a_climb_finds_the_best_chunks_where_hardly_a_box_is_bounded(
        monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of(lengths="S", latency_s=7.0), fixed=FixedSchedule(
        policies=("waa-m",)), num_queries=None)
    timing = roofline_of(problem)
    best = all_points(problem, timing, 7.0)
    monkeypatch.setattr("xscheduler.spaces.waa.CHUNKED_WORK", 8)
    found = Scheduler(problem, timing).find()
    assert found.figures.throughput_qps >= 0.99 * best and found.estimate.variables["encode_chunk"]
    assert found.proof.bound_qps >= best


@pytest.mark.parametrize("bound_s", [3.5, 7.0, math.inf])
def test_chunks_by_computation_are_climbed_to_where_those_by_memory_are_bounded(
        bound_s: float) -> None:
    problem = replace(problem_of(lengths="S", latency_s=bound_s), fixed=FixedSchedule(
        policies=("waa-c", "waa-m")), num_queries=None)
    timing = roofline_of(problem)
    space = WaaSpace("waa-c", problem, timing, tensor_plans(problem, timing))
    best = all_points(problem, timing, bound_s, "waa-c")
    found = space.unproved(bound_s, GAP, 0.0)
    assert found is not None and found[0] >= 0.99 * best and found[2][2] in CHUNKS
    assert space.unproved(bound_s, GAP, 1.01 * best) is None, "no better than what is had elsewhere"
    assert WaaSpace("waa-m", problem, timing, space.plans).unproved(bound_s, GAP, 0.0) is None
    assert best <= space.most_unproved(bound_s) < 2 * space.most_unproved(math.inf)
    assert WaaSpace("waa-m", problem, timing, space.plans).most_unproved(bound_s) == 0, "in boxes"
    whole = Scheduler(problem, timing).find()
    assert whole.figures.throughput_qps >= 0.99 * best


def test_what_is_climbed_to_is_chosen_where_it_has_most() -> None:
    """70B on two nodes: by computation 2.6 % more than by memory on one copy of eight each."""
    cluster = uniform_cluster(
        name="2 x 8 A100", device=catalog.device("A100-80"), num_nodes=2, devices_per_node=8,
        intra_link=catalog.link("nvlink3"), inter_link=catalog.link("ib-400g"))
    problem = replace(
        problem_of(lengths="S", latency_s=7.0), cluster=cluster, num_queries=None,
        model=catalog.model("llama-3.1-70b"), fixed=FixedSchedule(
            policies=("waa-c", "waa-m"), tp_degree=2))
    found = Scheduler(problem, roofline_of(problem)).find(compares=False)
    assert found.estimate.policy == "waa-c" and found.estimate.variables["encode_chunk"]
    alone = Scheduler(replace(problem, fixed=replace(problem.fixed, policies=("waa-m",))),
                      roofline_of(problem)).find(compares=False)
    assert found.figures.throughput_qps > 1.02 * alone.figures.throughput_qps


def test_chunks_of_few_tokens_fill_what_a_bound_leaves() -> None:
    """13B on five A100: beside a group that decodes there is room for some tokens, not for 32."""
    cluster = uniform_cluster(
        name="1 x 5 A100", device=catalog.device("A100-80"), num_nodes=1, devices_per_node=5,
        intra_link=catalog.link("nvlink3"), inter_link=catalog.link("ib-400g"))
    problem = replace(
        problem_of(lengths="C2", latency_s=16.7), cluster=cluster, num_queries=None,
        fixed=FixedSchedule(policies=("waa-m",), tp_degree=4, tp_gpus=4))
    found = Scheduler(problem, roofline_of(problem)).find(compares=False)
    assert 0 < (found.estimate.variables["encode_chunk"] or 0) < 32
    for chunk in (0, 32):
        fixed = replace(problem.fixed, encode_chunk=chunk)
        other = Scheduler(replace(problem, fixed=fixed), roofline_of(problem)).find(compares=False)
        assert found.figures.throughput_qps > 1.02 * other.figures.throughput_qps


def test_of_points_their_own_division_says_what_they_have_at_most() -> None:
    problem = problem_of(lengths="S")
    timing = roofline_of(problem)
    rng = np.random.default_rng(16)
    for name in ("waa-c", "waa-m"):
        space = WaaSpace(name, problem, timing, tensor_plans(problem, timing))
        keys = [(int(rng.integers(len(space.plans))), int(rng.integers(1, 60)),
                 int(rng.integers(1, 7)), int(rng.choice((0, *CHUNKS)))) for _ in range(300)]
        keys = [key for key in keys if space.is_modest(*key[1:])]
        for bound_s in (10.0, math.inf):
            most = space.most(keys, bound_s)
            own = np.array([qps * (latency_s <= bound_s and not limit)
                            for qps, latency_s, limit in space.evaluate(keys)])
            assert (own <= most).all() and (own > 0.5 * most).any()


@pytest.mark.parametrize("name", ["waa-c", "waa-m"])
def test_plans_of_one_degree_are_bounded_together_as_one_by_one(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(cluster="a40-8")
    space = WaaSpace(name, problem, roofline_of(problem), tensor_plans(
        problem, roofline_of(problem)))
    rng, calls = np.random.default_rng(3), list[int]()
    keys = [(plan, int(rng.integers(1, 60)), int(rng.integers(1, 7)), int(rng.choice(CHUNKS)))
            for plan in range(len(space.plans)) for _ in range(20)]
    one_by_one = np.concatenate([space.most([key], 10.0) for key in keys])
    usual = QuickBounds.of_points
    monkeypatch.setattr(QuickBounds, "of_points", lambda self, splits, configs, *given: (
        calls.append(len(splits)) or usual(self, splits, configs, *given)))
    np.testing.assert_allclose(space.most(keys, 10.0), one_by_one, rtol=1e-12)
    degrees = {plan.tp_degree for plan in space.plans}
    assert len(calls) == len(degrees) < len(space.plans) == sum(calls)

    plan, batch, groups, chunk = np.array(keys).T
    boxes = WaaBoxes(least=batch, most=batch + 9, fewest=groups, highest=groups + 2, chunk=chunk,
                     largest_chunk=2 * chunk)
    together = space.quick(plan, boxes, 10.0)
    apart = [space.quick(plan[row:row + 1], boxes.take(np.array([row])), 10.0)
             for row in range(len(keys))]
    np.testing.assert_allclose(together, np.concatenate(apart, axis=1), rtol=1e-12)


def test_the_largest_batch_within_a_bound_is_where_the_quickest_way_ends() -> None:
    problem = problem_of()
    quick = WaaSpace("waa-m", problem, roofline_of(problem), tensor_plans(
        problem, roofline_of(problem))).bounds.quick
    found = [quick.largest_within(300, (1, 4), bound_s) for bound_s in np.geomspace(0.1, 60.0, 40)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 300
    assert len(set(found)) > 10
    for bound_s in (2.0, 4.0):
        assert quick.largest_within(300, (1, 4), bound_s) == max(
            quick.largest_within(300, (degree,), bound_s) for degree in (1, 4))


def test_a_climb_keeps_to_the_batches_that_the_job_asks_for() -> None:
    """Points beside the best without chunks have fewer: what they have would have been the floor
    of all others, and none of the job's."""
    climber = Climber(lambda keys: [(1 / key[1], 1.0, Limit.NONE) for key in keys],
                      lambda groups, chunk: 1, math.inf)
    found = climber.best(climber.beside(0, (20, 1)), {0: ((20, 20), (1, 2))})
    assert found is not None and found[1][:2] == (0, 20)
    assert climber.best(climber.beside(0, (20, 1)), {0: ((30, 30), (1, 2))}) is None


def test_what_is_spent_under_a_bound_is_spent_for_all_its_searches() -> None:
    """One of which nothing is claimed gets no more where another has had its share."""
    work = WorkLeft()
    work.grant(10.0, is_claimed=True, work=500.0)
    work.spend(10.0, 480.0)
    work.grant(10.0, is_claimed=False, work=250.0)
    work.grant(9.0, is_claimed=False, work=250.0)
    assert work.left(10.0) == 20.0 and work.left(9.0) == 250.0
    work.grant(9.0, is_claimed=True, work=500.0)
    assert work.left(9.0) == 500.0


def test_climbs_go_together_and_ask_of_each_point_once() -> None:
    """From all points that are begun with to the only peak: those that meet go on as one."""
    asked: list[list[tuple[int, ...]]] = []

    def evaluate(keys: Sequence[tuple[int, ...]]) -> list[tuple[float, float, Limit]]:
        return [(1000.0 - abs(key[1] - 37) - abs(key[2] - 3), 1.0, Limit.NONE) for key in keys]

    def most(keys: Sequence[tuple[int, ...]]) -> FloatArray:
        asked.append(list(keys))
        return np.full(len(keys), np.inf)

    climber = Climber(evaluate, lambda groups, chunk: 1, math.inf, most, sizes=(8, 16, 32))
    grid = [(0, batch, groups, size) for batch in (1, 9, 70) for groups in (1, 6)
            for size in (8, 16, 32)]
    found = climber.best(grid, {0: ((1, 100), (1, 6))})
    assert found is not None and (found[0], found[1][:3]) == (1000.0, (0, 37, 3))
    every = [key for keys in asked for key in keys]
    assert len(every) == len(set(every)) and len(asked) <= 13, "the grid, and a step each"


def test_chunks_are_searched_once_and_as_the_job_and_the_model_have_them() -> None:
    def chunks(name: str, model: str = "opt-13b", **fixed: object) -> tuple[int, ...]:
        problem = replace(problem_of(model), fixed=FixedSchedule(**fixed))  # type: ignore[arg-type]
        timing = roofline_of(problem)
        return WaaSpace(name, problem, timing, tensor_plans(problem, timing)).chunks

    assert chunks("waa-m") == (0, *CHUNKS) and chunks("waa-c") == (0,), "both are searched"
    assert chunks("waa-c", policies=("rra", "waa-c")) == (0, *CHUNKS)
    assert chunks("waa-c", encode_chunk=50) == (50,) and chunks("waa-m", encode_chunk=0) == (0,)
    assert chunks("waa-m", model="t5-11b") == (0,)


def test_a_chunk_that_the_job_fixes_is_taken_however_large() -> None:
    problem = replace(problem_of(lengths="S"), fixed=FixedSchedule(
        policies=("waa-c",), encode_chunk=700, encode_batch=3, decode_micro_batches=2))
    found = Scheduler(problem, roofline_of(problem)).find()
    controls = found.estimate.controls
    assert found.estimate.variables["encode_chunk"] == 700
    assert isinstance(controls, WaaControls)
    assert controls.planned_active == math.ceil(3 * problem.lengths.outputs.mean)
    assert controls.stock_tokens >= 2 * 2 * 700
    assert np.isfinite(found.figures.latency_s) and found.proof.gap <= GAP


def test_an_encoder_decoder_model_has_none() -> None:
    problem = replace(problem_of("t5-11b"), fixed=FixedSchedule(
        policies=("waa-m",), encode_chunk=64))
    with pytest.raises(InputError, match="encode_chunk"):
        Scheduler(problem, roofline_of(problem)).find()


def test_where_every_batch_is_refused_the_search_without_a_bound_goes_on() -> None:
    """What is left of no bound after an encoding without end is no number."""
    problem = replace(problem_of(lengths="S"), fixed=FixedSchedule(policies=("waa-m",)))
    timing = Refusing(roofline_of(problem), 2100.0)
    space = WaaSpace("waa-m", problem, timing, tensor_plans(problem, timing))
    batches, chunk = (1, 11), space.chunks[1]
    one, size = np.ones(2, np.int64), np.full(2, chunk)
    with np.errstate(invalid="raise"):
        found = space.bounds.bound(space.splits[0], WaaBoxes(
            least=np.array(batches), most=np.array(batches), fewest=one, highest=one, chunk=size,
            largest_chunk=size), worth_qps=-1.0, latency_bound_s=math.inf)
    (own, _, _), (refused, _, _) = space.evaluate([(0, batch, 1, chunk) for batch in batches])
    assert found.most_qps[0] >= own > 0 and refused == 0
    assert not np.isnan(found.most_qps).any()


def test_layers_that_must_lie_on_the_quick_stages_bound_what_these_can_answer() -> None:
    """70B on two nodes, one group of eight beside single GPUs: within a bound that no single GPU
    keeps most layers are on the group, and what all sixteen could answer says nothing."""
    cluster = uniform_cluster(
        name="2 x 8 H100", device=catalog.device("H100"), num_nodes=2, devices_per_node=8,
        intra_link=catalog.link("nvlink4"), inter_link=catalog.link("ib-400g"))
    problem = replace(
        problem_of(lengths="S", latency_s=1.6), cluster=cluster, num_queries=None,
        model=catalog.model("llama-3.1-70b"), fixed=FixedSchedule(
            policies=("waa-m",), tp_degree=8, tp_gpus=8))
    space = WaaSpace("waa-m", problem, roofline_of(problem), tensor_plans(
        problem, roofline_of(problem)))
    keys = [(0, batch, groups, chunk) for batch in range(1, 40, 3) for groups in (1, 2, 3, 5)
            for chunk in (0, 32, 128)]
    plan, batch, groups, chunk = np.array(keys).T
    boxes = WaaBoxes(least=batch, most=batch, fewest=groups, highest=groups, chunk=chunk,
                     largest_chunk=chunk)
    for bound_s in (1.6, 4.0, math.inf):
        limit, latency_s, _ = space.quick(plan, boxes, bound_s)
        divided = space.divided(0, boxes, bound_s)
        own = np.array([qps * (seconds <= bound_s and not forbidding)
                        for qps, seconds, forbidding in space.evaluate(keys)])
        assert (own <= divided).all() and own.max() > 0
        at_most = np.minimum(limit, divided)[latency_s <= bound_s].max()
        is_closer = at_most < 0.7 * limit[latency_s <= bound_s].max()
        assert bool(is_closer) is (bound_s == 1.6)
