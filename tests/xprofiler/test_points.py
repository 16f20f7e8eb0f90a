"""What to measure: a skeleton that spans a job's sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import metadata

from xgpt.core import catalog
from xprofiler.points import (
    OWN_TABLE,
    Kind,
    Needs,
    Point,
    missing_points,
    missing_skeleton,
    quick_points,
    skeleton,
    skipped_points,
)
from xprofiler.profile import Profile, Sample, TableKey
from xprofiler.timing import Operator

DECODER = catalog.model("opt-125m")  # 2048 positions
BOTH = catalog.model("t5-11b")
needs_of_jobs = st.builds(
    Needs, input_tokens=st.integers(8, 5000), context_tokens=st.integers(2, 5000),
    queries=st.integers(1, 1000), tokens=st.integers(1, 20_000))


def sizes(points: list[Point], kind: Kind) -> tuple[list[int], list[int]]:
    """(x, y) of the points of one kind, ascending and distinct."""
    mine = [p for p in points if p.kind is kind]
    return sorted({p.x for p in mine}), sorted({p.y for p in mine})


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
    assert missing_skeleton(measured(points), 1, Needs()) == []
    assert missing_skeleton(measured(points[2:]), 1, Needs()) == points[:2]
    assert missing_skeleton(measured(points), 2, Needs()) == points, "of another degree"
    assert missing_skeleton(measured([]), 1, Needs()) == points


def test_a_larger_job_lacks_points_that_a_smaller_one_does_not():
    small = Needs(queries=20, tokens=600, input_tokens=100, context_tokens=130)
    lacking = missing_skeleton(measured(skeleton(DECODER, small)), 1, Needs())
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
    assert missing_points(measured(quick), 1, whole) == [p for p in whole if p not in quick]
    found = skipped_points(measured(quick), 1)
    assert found and set(found) <= set(whole) - set(quick)
    assert max(p.x for p in found if p.kind is Kind.ENCODE) < 96, "no input was longer"
    assert Point(Kind.DECODE, 3, 130) in found
    assert skipped_points(measured(whole), 1) == []
    assert skipped_points(measured([]), 1) == [], "nothing has no sizes"
    others = replace(measured(quick), metadata=metadata(origin="vidur"))
    assert skipped_points(others, 1) == [], "whose points are their own"


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
    assert skipped_points(profile, 1) == []
