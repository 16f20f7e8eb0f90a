"""What to measure: a skeleton that spans a job's sizes, then where lines are furthest off."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import metadata

from xgpt.core import catalog
from xprofiler.interpolation import Grid
from xprofiler.points import (
    DECODE_ROWS_UP_TO,
    OWN_TABLE,
    STEP_CONTEXT,
    Kind,
    Needs,
    Point,
    _candidates,
    lacking,
    left_out,
    missing,
    quick_points,
    refinement,
    skeleton,
)
from xprofiler.profile import Profile, Sample, TableKey
from xprofiler.timing import Operator


def worst_error(tables: dict[Operator, list[Sample]]) -> float:
    """The largest estimated interpolation error of any interval, relative."""
    return max((error for error, _, _ in _candidates(tables)), default=0.0)


DECODER = catalog.model("opt-125m")  # 2048 positions
BOTH = catalog.model("t5-11b")
needs_of_jobs = st.builds(
    Needs, input_tokens=st.integers(8, 5000), context_tokens=st.integers(2, 5000),
    queries=st.integers(1, 1000), tokens=st.integers(1, 20_000))


def sizes(points: list[Point], kind: Kind) -> tuple[list[int], list[int]]:
    """(x, y) of the points of one kind, ascending and distinct."""
    mine = [p for p in points if p.kind is kind]
    return sorted({p.x for p in mine}), sorted({p.y for p in mine})


def samples(function: Callable[[float], float], *places: float, y: float = 0) -> list[Sample]:
    return [Sample(x=x, y=y, samples_s=(function(x),)) for x in places]


@given(needs=needs_of_jobs, is_both=st.booleans())
def test_the_skeleton_spans_what_is_needed_and_no_more(needs, is_both):
    model = replace(BOTH if is_both else DECODER, max_positions=None)
    points = skeleton(model, needs)
    decode, encode = (Kind.CROSS, Kind.ENCODER) if is_both else (Kind.DECODE, Kind.ENCODE)
    assert {p.kind for p in points} == {decode, encode, Kind.COMPACTION} | (
        set() if is_both else {Kind.REST})
    queries, contexts = sizes(points, decode)
    lengths, _ = sizes(points, encode)
    assert (queries[-1], contexts[-1]) == (needs.queries, needs.context_tokens)
    assert lengths[-1] == needs.input_tokens
    assert min(min(p.x for p in points), contexts[0]) >= 1
    # every batch at every context: the table has no gaps
    assert {(p.x, p.y) for p in points if p.kind is decode} == {
        (x, y) for x in queries for y in contexts}
    assert all(p.x * p.y <= max(needs.tokens, p.x) for p in points if p.kind is encode)
    found = [queries, contexts, lengths]
    if not is_both:
        found.append(sizes(points, Kind.REST)[0])
        assert found[-1][-1] == needs.tokens
    assert all(b / a < 12 for own in found for a, b in zip(own, own[1:], strict=False)), found
    assert len(points) == len(set(points)), "no point is asked for twice"


@pytest.mark.parametrize("kind", [Kind.DECODE, Kind.REST])
def test_products_are_measured_off_the_powers_of_two(kind):
    """Kernels are quicker there than at the sizes between, which are what a run meets."""
    found, _ = sizes(skeleton(DECODER, Needs()), kind)
    assert not [x for x in found if x > 8 and x & (x - 1) == 0]


def test_needs_are_cut_to_the_models_positions():
    short = replace(DECODER, max_positions=100)
    points = skeleton(short, Needs())
    assert sizes(points, Kind.ENCODE)[0][-1] == 100
    assert sizes(points, Kind.DECODE)[1][-1] == 99
    unlimited = replace(DECODER, max_positions=None)
    assert Needs().within(unlimited) == Needs()


def measured(points: list[Point], degree: int = 1) -> Profile:
    """A profile that has these points."""
    tables: dict[TableKey, tuple[Sample, ...]] = {}
    for point in points:
        key = TableKey(OWN_TABLE[point.kind].value, degree)
        tables[key] = (*tables.get(key, ()), Sample(x=point.x, y=point.y, samples_s=(1.0,)))
    return Profile(metadata=metadata(), tables=tables, model=DECODER)


def test_missing_is_what_the_skeleton_has_and_the_profile_has_not():
    points = skeleton(DECODER, Needs())
    assert missing(measured(points), 1, Needs()) == []
    assert missing(measured(points[2:]), 1, Needs()) == points[:2]
    assert missing(measured(points), 2, Needs()) == points, "of another degree"
    assert missing(measured([]), 1, Needs()) == points


def test_a_larger_job_lacks_points_that_a_smaller_one_does_not():
    small = Needs(queries=20, tokens=600, input_tokens=100, context_tokens=130)
    lacking = missing(measured(skeleton(DECODER, small)), 1, Needs())
    assert Point(Kind.DECODE, 130, 520) in lacking
    assert Point(Kind.REST, 2080) in lacking


@given(needs=needs_of_jobs, own=needs_of_jobs, is_both=st.booleans())
def test_a_quick_profile_has_few_points_of_the_skeleton_and_spans_its_job(needs, own, is_both):
    model = replace(BOTH if is_both else DECODER, max_positions=None)
    own = replace(own, queries=min(own.queries, needs.queries))
    whole, quick = skeleton(model, needs), quick_points(model, needs, own)
    assert set(quick) <= set(whole) and len(quick) <= 36
    assert {p.kind for p in quick} == {p.kind for p in whole}
    decode, encode = (Kind.CROSS, Kind.ENCODER) if is_both else (Kind.DECODE, Kind.ENCODE)
    queries, contexts = sizes(quick, decode)
    assert queries[-1] >= own.queries
    assert contexts[-1] >= min(own.context_tokens, needs.context_tokens)
    assert sizes(quick, encode)[0][-1] >= min(own.input_tokens, needs.input_tokens)
    if not is_both:
        assert sizes(quick, Kind.REST)[0][-1] >= min(own.tokens, needs.tokens)
    assert {(p.x, p.y) for p in quick if p.kind is decode} == {
        (x, y) for x in queries for y in contexts}


def test_a_quick_profile_of_many_queries_has_a_batch_between_few_and_many():
    needs = Needs(queries=500)
    batches = {p.x for p in quick_points(DECODER, needs, needs) if p.kind is Kind.DECODE}
    assert batches == {1, 9, 33, 130, 500}


def test_the_quick_points_of_a_usual_job():
    own = Needs(input_tokens=85, context_tokens=245, queries=72, tokens=2400)
    points = quick_points(DECODER, Needs(), own)
    assert sizes(points, Kind.DECODE) == ([1, 9, 33, 130], [17, 520])
    assert sizes(points, Kind.ENCODE) == ([5, 20, 64, 96], [1, 4])
    assert sizes(points, Kind.REST)[0] == [260, 700, 2080]
    small = quick_points(DECODER, Needs(), Needs(input_tokens=20, context_tokens=60, queries=3,
                                                 tokens=60))
    assert sizes(small, Kind.DECODE) == ([1, 3], [17, 130])
    assert sizes(small, Kind.REST)[0] == [75]


def test_what_a_profile_leaves_out_lies_within_its_own_sizes():
    own = Needs(input_tokens=85, context_tokens=245, queries=72, tokens=2400)
    whole, quick = skeleton(DECODER, Needs()), quick_points(DECODER, Needs(), own)
    assert lacking(measured(quick), 1, whole) == [p for p in whole if p not in quick]
    found = left_out(measured(quick), 1)
    assert found and set(found) <= set(whole) - set(quick)
    assert max(p.x for p in found if p.kind is Kind.ENCODE) < 96, "no input was longer"
    assert Point(Kind.DECODE, 3, 130) in found
    assert left_out(measured(whole), 1) == []
    assert left_out(measured([]), 1) == [], "nothing has no sizes"
    others = replace(measured(quick), metadata=metadata(origin="vidur"))
    assert left_out(others, 1) == [], "whose points are their own"


@given(needs=st.builds(
    Needs, input_tokens=st.integers(520, 5000), context_tokens=st.integers(520, 5000),
    queries=st.integers(9, 1000), tokens=st.integers(5000, 20_000)),
    positions=st.none() | st.integers(50, 3000), is_both=st.booleans())
def test_a_whole_profile_leaves_nothing_out(needs, positions, is_both):
    """Of the sizes that whole profiles have: the usual ones, or more."""
    model = replace(BOTH if is_both else DECODER, max_positions=positions)
    profile = replace(measured(skeleton(model, needs)), model=model)
    # a decoder's step serves its self-attention and its rows, too
    attention = profile.table((Operator.CROSS_ATTENTION if is_both
                               else Operator.DECODE_ATTENTION).value)
    rest = TableKey(Operator.LAYER_REST.value)
    rows = {p.x: Sample(x=p.x, samples_s=(1.0,)) for p in (*profile.table(rest.name), *attention)}
    profile = replace(profile, tables={
        **profile.tables, TableKey(Operator.DECODE_ATTENTION.value): attention,
        rest: tuple(rows.values())})
    assert left_out(profile, 1) == []


def bent(x: float) -> float:
    """A step of three times between 33 and 40."""
    return 1e-3 * (1 + 2 * min(max(x - 33, 0) / 7, 1))


def test_the_next_point_lies_in_the_middle_of_the_interval_that_is_furthest_off():
    times = {1.0: 1e-3, 10: 0.01, 30: 0.015, 100: 0.1, 300: 0.3, 900: 0.9}
    point = refinement({Operator.LAYER_REST: samples(times.__getitem__, *times)}, set(), 0.01)
    # 30 lies at half of its neighbours' line, 10 and 100 nearer to theirs
    assert point in (Point(Kind.DECODE, 17, STEP_CONTEXT), Point(Kind.DECODE, 55, STEP_CONTEXT))


def test_a_point_that_was_tried_is_not_asked_for_again():
    tables = {Operator.LAYER_REST: samples(lambda x: x * x, 1, 10, 30, 100, 300)}
    done: set[Point] = set()
    while (point := refinement(tables, done, 0.0)) is not None:
        assert point not in done
        done.add(point)
    assert len(done) == 4, "one in each interval"


def test_nothing_is_asked_for_where_lines_are_close_enough():
    straight = {Operator.LAYER_REST: samples(lambda x: 1e-3 * x, 1, 10, 100, 1000)}
    assert refinement(straight, set(), 0.001) is None
    assert worst_error(straight) == pytest.approx(0, abs=1e-12)
    curved = {Operator.LAYER_REST: samples(lambda x: x**1.2, 1, 10, 100, 1000)}
    assert worst_error(curved) > 0.05
    assert refinement(curved, set(), worst_error(curved) * 1.01) is None
    assert refinement(curved, set(), worst_error(curved) * 0.99) is not None
    assert refinement({}, set(), 0.0) is None and worst_error({}) == 0


def test_close_neighbours_are_not_split():
    tables = {Operator.LAYER_REST: samples(lambda x: x * x, 100, 105, 110)}
    assert refinement(tables, set(), 0.0) is None
    assert refinement({Operator.LAYER_REST: samples(lambda x: x**4, 1, 2, 3)}, set(), 0.0) is None


@pytest.mark.parametrize("last", [50, 900])
def test_few_rows_are_timed_in_decode_steps_and_many_in_encode_steps(last):
    tables = {Operator.LAYER_REST: samples(lambda x: x * x, last / 10, last / 3, last)}
    point = refinement(tables, set(), 0.0)
    assert point is not None
    is_few = point.x <= DECODE_ROWS_UP_TO
    assert point.kind is (Kind.DECODE if is_few else Kind.REST) and is_few == (last == 50)
    assert point.y == (STEP_CONTEXT if is_few else 0)


def test_attention_is_refined_along_either_axis():
    def table(function: Callable[[float, float], float]) -> dict[Operator, list[Sample]]:
        return {Operator.DECODE_ATTENTION: [
            Sample(x=x, y=y, samples_s=(function(x, y),))
            for x in (1, 10, 100) for y in (17, 130, 520)]}

    along_queries = refinement(table(lambda x, y: x * x * y), set(), 0.01)
    assert along_queries is not None and along_queries.kind is Kind.DECODE
    assert along_queries.x not in (1, 10, 100) and along_queries.y in (17, 130, 520)
    along_context = refinement(table(lambda x, y: x * y * y), set(), 0.01)
    assert along_context is not None
    assert along_context.x in (1, 10, 100) and along_context.y not in (17, 130, 520)


def test_a_whole_inputs_attention_is_refined_where_it_is_no_power():
    squares = samples(lambda x: 1e-6 * x * x, 5, 20, 80, 320, y=1)
    assert refinement({Operator.ENCODE_ATTENTION: squares}, set(), 0.001) is None
    # and what many queries take together is none of its business
    together = samples(bent, 5, 36, 320, y=4)
    assert refinement({Operator.ENCODE_ATTENTION: squares + together}, set(), 0.001) is None
    point = refinement({Operator.ENCODE_ATTENTION: samples(bent, 5, 20, 80, 320, y=1)}, set(), 0)
    assert point is not None and (point.kind, point.y) == (Kind.ENCODE, 1)


def test_an_operator_counts_by_its_share_of_a_step():
    """Attention bends more, and is a thousandth of the step."""
    rest = samples(lambda x: 1e-3 * x**1.1, 1, 10, 60)
    attention = [Sample(x=x, y=520, samples_s=(1e-6 * x * x,)) for x in (1, 10, 60)]
    only = {Operator.DECODE_ATTENTION: attention}
    assert worst_error(only) > worst_error({Operator.LAYER_REST: rest}) > 0.01
    alone = refinement(only, set(), 0.01)
    assert alone is not None and alone.y == 520
    both = refinement({**only, Operator.LAYER_REST: rest}, set(), 0.01)
    assert both is not None and (both.kind, both.y) == (Kind.DECODE, STEP_CONTEXT)


def test_refining_spends_its_points_where_the_curve_bends_and_ends():
    def true_error() -> float:
        grid = Grid(list(known), [0] * len(known), list(known.values()))
        return float(np.max(np.abs(grid(everywhere) / truth - 1)))

    known = {x: bent(x) for x in (1.0, 3.0, 9.0, 33.0, 75.0, 265.0, 900.0)}
    everywhere = np.arange(1.0, 900.0)
    truth = np.array([bent(float(x)) for x in everywhere])
    before, done = true_error(), set[Point]()
    taken: list[int] = []
    while len(taken) < 50:
        tables = {Operator.LAYER_REST: [
            Sample(x=x, samples_s=(s,)) for x, s in sorted(known.items())]}
        point = refinement(tables, done, 0.01)
        if point is None:
            break
        done.add(point)
        taken.append(point.x)
        known[float(point.x)] = bent(point.x)
    assert len(taken) < 20, "it ends"
    assert sum(9 < x < 265 for x in taken) >= len(taken) - 1
    assert true_error() < before / 5
