"""Two readings of one pool's step times agree: asked, and by the replay's clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes
from xsimulator.plans import StagePlans
from xsimulator.replay.step_clock import StepClock, StepSizes
from xsimulator.stage_times import StageTimes, at_least, stage_kinds

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
    times = stage_kinds(at_least(plan.times)).times.encode_rows_s(sizes).T
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
    """What encoding 300 tokens of 10 inputs is short of 300 rows through all layers: the last
    layer's part after its attention for 290."""
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


def test_steps_that_decode_captured_take_their_own_time_and_others_theirs():
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


def test_steps_of_more_rows_than_are_captured_are_launched():
    problem = problem_of("opt-13b", "a40-4", "S")
    plain, captured = roofline_of(problem), roofline_of(problem)
    captured.facts = replace(captured.facts, captured_degrees=frozenset({1}))
    captured._rows[Operator.DECODE_REST] = lambda rows, degree: plain._rows[
        Operator.LAYER_REST](rows, degree) / 4
    rows = np.array([1.0, 512.0, 513.0, 900.0])
    usual, own = (LayerTimes.of(problem, source).decode_rest_s(rows, 1)
                  for source in (plain, captured))
    assert own / usual == pytest.approx([0.25, 0.25, 1, 1])


def test_bounds_take_rows_for_no_slower_than_in_either_kind_of_step():
    problem = problem_of("opt-13b", "a40-4", "S")
    source, sizes = roofline_of(problem), np.array([3.0, 40.0, 500.0])
    usual_times = StagePlans(problem, roofline_of(problem)).both(1, 0).times
    assert at_least(usual_times) is usual_times
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
