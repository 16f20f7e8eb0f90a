"""Step times of stages: direct, by the replay's clock, by convex bounds, and over unequal links."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import problem_of, roofline_of, toy_problem
from published.runs import Shape, static_batch_s, superpod_link

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.model import ModelSpec
from xprofiler.roofline import Roofline, link_kind
from xprofiler.timing import MessageKind, Operator
from xrunner.comm.handover import transfers
from xscheduler.replicas import replica_problems
from xscheduler.tensor_plans import tensor_plans
from xsimulator.convex_steps import AN_OCTAVE, ConvexTimes
from xsimulator.layer_times import LayerTimes
from xsimulator.memory import kv_bytes, weight_bytes
from xsimulator.plans import PlanCache, StagePlans
from xsimulator.replay.step_clock import StepClock, StepSizes
from xsimulator.stage_times import HandoverCost, StageTimes, least_times, stage_kinds

POOLS = [("opt-13b", "a40-4", 1, 0), ("gpt3-39b", "a40-16", 2, 6), ("t5-11b", "a40-8", 4, 4)]
ONE = StepSizes(spans=[], tokens=0, encoded=0, decoded=0, context=0.0, longest=0.0, moved=0.0,
                handed=0)


@pytest.fixture(params=POOLS, ids=lambda of: of[0])
def plan(request):
    model, cluster, degree, gpus = request.param
    problem = problem_of(model, cluster, "S")
    return StagePlans(problem, roofline_of(problem)).both(degree, gpus)


@pytest.mark.parametrize(("queries", "context"), [(1, 17), (7, 300), (96, 129)])
def test_decode_steps(plan, queries, context):
    asked = plan.times.decode_s(queries, context)
    clock = StepClock(plan.times, max_context=600).seconds(ONE._replace(
        decoded=queries, context=float(context), longest=float(context)))
    assert clock == pytest.approx(asked, rel=1e-3)  # attention between contexts 2 % apart


@pytest.mark.parametrize("lengths", [[40], [5, 130, 64], [20] * 12])
def test_encode_steps(plan, lengths):
    each = plan.times.encode_attention_s(np.array(lengths), len(lengths))
    attention = {degree: seconds.sum() for degree, seconds in each.items()}
    asked = plan.times.encode_s(sum(lengths), len(lengths), attention)
    clock = StepClock(plan.times, max_context=600).seconds(ONE._replace(
        spans=[(0, n) for n in lengths], tokens=sum(lengths), encoded=len(lengths)))
    assert clock == pytest.approx(asked, rel=1e-12)


def test_convex_steps_are_never_above_the_times(plan):
    sizes, convex = np.geomspace(1, 300, 40), plan.convex_steps
    times = stage_kinds(least_times(plan.times)).times.encode_rows_s(sizes).T
    for least, usual in zip(convex.rows, times, strict=True):
        # between sizes that are looked at a line may lie above a bend by millionths
        assert (least.mean_s(sizes) <= usual * (1 + 1e-5)).all()


def test_a_pools_layers_are_the_problems():
    problem = problem_of()
    plans = StagePlans(problem, roofline_of(problem))
    plan = plans.both(1, 0)
    again = StageTimes(LayerTimes.of(problem, roofline_of(problem)), problem.cluster, plan.stages)
    assert plan.times.layers is plans.layers
    assert again.decode_s(8, 100) == pytest.approx(plan.times.decode_s(8, 100), rel=0)
    single = plans.of_stages((replace(plan.stages[0], num_layers=40),), "both")
    assert single.times.decode_s(8, 100) > plan.times.decode_s(8, 100).max()


def test_encoding_takes_the_inputs_ends_alone_through_the_end_of_the_last_layer(plan):
    """The difference between encoding 300 tokens of 10 inputs and 300 rows through all layers: the
    last layer's part after its attention for 290."""
    times, layers = plan.times, plan.times.layers
    nothing = {degree: np.zeros(1) for degree in times.degrees}
    encode = times.encode_s(np.array([300.0]), np.array([10.0]), nothing)[0]
    if times.is_encoder_decoder:
        assert times.ends_s(10.0) == times.first_tokens_s(10.0)
        return
    rows = times.decode_rows_s(np.array([300.0]))[0]
    assert encode[:-1] == pytest.approx(rows[:-1], rel=1e-12)
    rest_s = layers.decode_rest_s(np.array([300.0, 10.0]), times.stages[-1].tp_degree)
    spared = rows[-1] + times.first_tokens_s(10.0) - encode[-1]
    assert spared == pytest.approx(layers.after_attention * (rest_s[0] - rest_s[1]), rel=1e-9)
    assert 0.6 < layers.after_attention < 0.9


def test_captured_decode_steps_have_their_own_times():
    problem = problem_of("opt-13b", "a40-4", "S")
    plain, captured = roofline_of(problem), roofline_of(problem)
    captured.facts = replace(captured.facts, captured_degrees=frozenset({1}))
    captured._rows[Operator.DECODE_REST] = lambda rows, degree: plain._rows[
        Operator.LAYER_REST](rows, degree) / 4
    usual, own = (StagePlans(problem, source).both(1, 0).times for source in (plain, captured))
    layers = problem.model.num_layers
    saved = 0.75 * plain.operator_s(Operator.LAYER_REST, 7.0) * layers
    assert usual.decode_s(7, 300).sum() - own.decode_s(7, 300).sum() == pytest.approx(saved)
    assert (usual.encode_rows_s(70) == own.encode_rows_s(70)).all()
    assert (usual.ends_s(3) == own.ends_s(3)).all()
    two, other = (StagePlans(problem, source).both(2, 4).times for source in (captured, plain))
    assert two.decode_s(7, 300) == pytest.approx(other.decode_s(7, 300)), "groups are not captured"
    by_rows = [LayerTimes.of(problem, source).decode_rest_s(np.array([1.0, 512, 513, 900]), 1)
               for source in (captured, plain)]
    assert by_rows[0] / by_rows[1] == pytest.approx([0.25, 0.25, 1, 1]), "so many rows are launched"


def test_bounds_use_the_quicker_of_encode_and_decode_rows():
    problem = problem_of("opt-13b", "a40-4", "S")
    source, sizes = roofline_of(problem), np.array([3.0, 40.0, 500.0])
    usual_times = StagePlans(problem, roofline_of(problem)).both(1, 0).times
    assert least_times(usual_times) is usual_times
    source.facts = replace(source.facts, captured_degrees=frozenset({1}))
    usual = source._rows[Operator.LAYER_REST]
    source._rows[Operator.DECODE_REST] = lambda rows, degree: usual(rows, degree) * np.where(
        rows < 100, 0.25, 1.5)
    plan = StagePlans(problem, source).both(1, 0)
    encode, decode = (rows.T for rows in (plan.kinds.times.encode_rows_s(sizes),
                                          plan.kinds.times.decode_rows_s(sizes)))
    least = np.array([rows.mean_s(sizes) for rows in plan.convex_steps.rows])
    assert (least[:-1] <= np.minimum(encode, decode)[:-1] * (1 + 1e-9)).all()
    assert (encode[:, 0] > 2 * least[:, 0]).all() and (decode[:-1, 2] > 1.2 * least[:-1, 2]).all()


# --- operators that are not there -------------------------------------------------------------


def test_a_model_without_a_head_needs_no_head_times(monkeypatch):
    """Sizes that a profile refuses take infinite time; that times zero is no number, and a
    warning."""
    problem = toy_problem()
    timing = roofline_of(problem)
    computed = timing.operator_s

    def refusing(operator: Operator, *sizes: object, **more: object) -> np.ndarray:
        seconds = computed(operator, *sizes, **more)
        return seconds * math.inf if operator is Operator.HEAD else seconds

    monkeypatch.setattr(timing, "operator_s", refusing)
    layers = LayerTimes.of(problem, timing)
    assert np.isinf(layers.head_s([1.0, 2.0], 1)).all()
    without = LayerTimes(problem.model, timing, problem.cluster.intra_link, problem.dtype,
                         problem.lengths.inputs, has_head=False)
    assert without.head_s([1.0, 2.0], 1).tolist() == [0.0, 0.0]


# --- convex times -----------------------------------------------------------------------------


def test_the_function_is_convex_below_the_times_and_touches_them():
    sizes = np.append(2.0**-10, np.outer(2.0 ** np.arange(12), 1 + np.arange(AN_OCTAVE)
                                         / AN_OCTAVE).ravel())
    for seed in range(20):
        rng = np.random.default_rng(seed)
        # they rise, and fall in relation to the size
        bends = np.maximum.outer(sizes, rng.uniform(1, 3000, 6)) @ rng.uniform(1e-6, 1e-5, 6)
        seconds = bends + rng.uniform(1e-4, 1e-3)
        times = ConvexTimes(sizes, seconds)
        asked = 10 ** rng.uniform(-2, 3.5, (7, 30))
        own = times.mean_s(asked)
        assert (own <= np.interp(asked, sizes, seconds) * (1 + 1e-12)).all()
        low, high = np.sort(10 ** rng.uniform(-2, 3.5, (2, 500)), axis=0)
        middle = times.mean_s((low + high) / 2)
        assert (middle <= (times.mean_s(low) + times.mean_s(high)) / 2 * (1 + 1e-12)).all()
        # a convex function is its own: within the tangents' distance of it
        assert (own >= 0.9 * np.interp(asked, sizes, seconds))[asked >= 1].all()
        pieces = rng.uniform(1, 9, asked.shape)
        np.testing.assert_allclose(times.whole_s(asked, pieces),
                                   pieces * times.mean_s(asked / pieces))


# --- replicas -----------------------------------------------------------------------------------


def test_copies_on_parts_of_any_size_share_what_is_asked_of_a_layer():
    problem = toy_problem()
    plans, kept = PlanCache(roofline_of(problem)), []
    for one in replica_problems(problem):
        layers = plans.of(one).layers
        kept.append(layers)
        assert layers is kept[0]
    assert len(kept) > 2
    other = StagePlans(problem, roofline_of(problem))
    assert other.layers is not kept[0], "another source has other times"


# --- unlike links -----------------------------------------------------------------------------


BRIDGE, BUS = catalog.link("nvlink3-bridge"), catalog.link("pcie4-x16")
A40 = replace(catalog.cluster("a40-4"), intra_link=BUS)
PAIRS = replace(A40, island_link=BRIDGE, island_size=2)
# Published: FasterTransformer's guide (docs/gpt_guide.md of 2022), Megatron 530B on nodes of eight
# A100-80, NVSwitch inside and 8 x 200 Gb/s between; ms of 60 tokens in and 20 out, by batch
MEGATRON = ModelSpec(name="megatron-530b", family="gpt2", num_layers=105, hidden_size=20480,
                     num_heads=128, vocab_size=51200, intermediate_size=4 * 20480)
PUBLISHED_MS = {16: {1: 1379, 4: 1512, 16: 1868, 64: 3383, 128: 5406},
                32: {1: 1037, 4: 1198, 16: 1454, 64: 2646, 128: 4099, 256: 7203}}


def _step_s(cluster: Cluster, degree: int) -> NDArray[np.float64]:
    """[stages] seconds of a step that decodes 64 requests."""
    problem = replace(toy_problem(), cluster=cluster)
    plan = StagePlans(problem, roofline_of(problem)).both(degree, 4 if degree > 1 else 0)
    return plan.times.decode_s(64.0, 99.0)


def test_sums_of_a_pair_go_over_its_bridge_and_those_of_four_over_the_bus():
    bus, pairs = A40, PAIRS
    assert (_step_s(pairs, 2) < _step_s(bus, 2)).all()
    assert _step_s(pairs, 4).tolist() == _step_s(bus, 4).tolist()
    # single devices: two of three edges go over a bridge, and the way back over the bus
    single, faster = _step_s(bus, 1), _step_s(pairs, 1)
    assert [a < b for a, b in zip(faster, single, strict=True)] == [True, False, True, False]


@pytest.mark.parametrize(("degree", "at_first", "at_last"), [(1, 0, 0), (2, 1, 1), (4, 2, 2)])
def test_groups_exchange_each_step_and_its_tokens(
        degree, at_first, at_last):
    problem = replace(toy_problem(), cluster=PAIRS)
    plain, ours = roofline_of(problem), roofline_of(problem)
    ours.facts = replace(ours.facts, sends_in_groups=True)
    added = []
    for work in (lambda times: times.decode_s(64.0, 99.0), lambda times: times.encode_s(
            64.0, 64.0, {degree: np.zeros(())})):
        without, with_them = (work(StagePlans(problem, timing).both(
            degree, 4 if degree > 1 else 0).times) for timing in (plain, ours))
        added.append(with_them - without)
    link = BRIDGE if degree == 2 else BUS
    message_s = float(plain.message_s(MessageKind.TRANSFER, 8 * 64.0, link))
    for each in added:
        assert each[0] == pytest.approx(at_first * message_s, abs=1e-12)
        assert each[-1] == pytest.approx(at_last * message_s, abs=1e-12)
        assert (each[1:-1] == 0).all() or degree == 4, "what is passed on was charged before"


def test_a_bridge_of_four_lanes_counts_as_nvlink():
    assert link_kind(BRIDGE) == "nvlink" and link_kind(BUS) == "pcie"
    assert link_kind(catalog.link("ib-400g")) == "network"


@pytest.mark.parametrize("degree", PUBLISHED_MS)
def test_groups_over_nodes_take_what_was_published_of_megatron_530b(degree):
    source = Roofline(MEGATRON, catalog.device("A100-80"), "float16", engine="fastertransformer")
    found = np.array([static_batch_s(source, MEGATRON, superpod_link(degree), Shape(
        degree, batch, 60, 20)) for batch in PUBLISHED_MS[degree]])
    errors = 1e3 * found / np.array([*PUBLISHED_MS[degree].values()]) - 1
    assert np.abs(errors).mean() < 0.12, errors
    assert abs(errors.mean()) < 0.05, errors


FEW_HEADS = replace(toy_problem().model, num_heads=16, num_kv_heads=2)


def test_degrees_beyond_the_kv_heads_are_planned_where_they_are_multiples_of_them():
    problem = toy_problem(model=FEW_HEADS)
    plans = tensor_plans(problem, roofline_of(problem))
    assert {plan.tp_degree for plan in plans} == {1, 2, 4}
    three = replace(problem, model=replace(FEW_HEADS, num_heads=12, num_kv_heads=3))
    assert {plan.tp_degree for plan in tensor_plans(three, roofline_of(problem))} == {1}
    with pytest.raises(InputError, match="neither a divisor nor a multiple of the model's 3 key"):
        tensor_plans(replace(three, fixed=FixedSchedule(tp_degree=4)), roofline_of(problem))


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_memory_of_a_rank_is_that_of_its_kv_heads(degree):
    problem = toy_problem(per_node=8, model=FEW_HEADS)
    stage = StageAssignment(index=0, ranks=tuple(range(degree)), first_layer=0,
                            num_layers=FEW_HEADS.num_layers)
    each = FEW_HEADS.num_layers * FEW_HEADS.head_dim * 2  # keys, or values, of 2 bytes
    heads = max(2 / degree, 1)
    assert kv_bytes(problem, (stage,), 10.0)[0] == 10 * 2 * each * heads
    held = weight_bytes(FEW_HEADS, (stage,), "float16")[0]
    evenly = weight_bytes(replace(FEW_HEADS, num_kv_heads=16), (stage,), "float16")[0]
    less = 2 * each * FEW_HEADS.hidden_size * (16 / degree - heads)
    assert evenly - held == pytest.approx(less + 2 * each * (
        16 / degree - heads) * FEW_HEADS.qkv_bias)


@pytest.mark.parametrize(("encode", "decode"), [
    *product(([1], [2], [4], [8], [1, 4]), repeat=2)])
def test_no_rank_hands_over_more_than_is_planned(encode, decode):
    problem = toy_problem(per_node=16, model=FEW_HEADS)
    pools, layers = list[list[StageAssignment]](), FEW_HEADS.num_layers
    first = 0
    for degrees in (encode, decode):
        pools.append([])
        for place, degree in enumerate(degrees):
            begin, end = (layers * i // len(degrees) for i in (place, place + 1))
            pools[-1].append(StageAssignment(
                index=place, ranks=tuple(range(first, first + degree)), first_layer=begin,
                num_layers=end - begin))
            first += degree
    moved: Counter[tuple[str, int]] = Counter()
    for one in transfers(*pools, FEW_HEADS):
        count = (one.source_layers.stop - one.source_layers.start) * (
            one.source_heads.stop - one.source_heads.start)
        moved["from", one.source] += count
        moved["to", one.target] += count
    planned = HandoverCost(problem, roofline_of(problem), *pools).bytes_per_token
    assert max(moved.values()) * 2 * FEW_HEADS.head_dim * 2 <= planned


def test_a_group_over_nodes_is_looked_at_where_it_is_asked_for_or_needed():
    problem = toy_problem(nodes=2, per_node=2)
    timing = roofline_of(problem)
    assert {plan.tp_degree for plan in tensor_plans(problem, timing)} == {1, 2}
    asked = replace(problem, fixed=FixedSchedule(tp_degree=4))
    assert {plan.tp_degree for plan in tensor_plans(asked, timing)} == {4}
    device = replace(problem.cluster.device, memory_bytes=500_000_000)
    wide = replace(problem.model, hidden_size=8192, intermediate_size=4 * 8192, num_layers=1)
    full = replace(problem, model=wide, cluster=replace(problem.cluster, device=device))
    assert 4 in {plan.tp_degree for plan in tensor_plans(full, timing)}
