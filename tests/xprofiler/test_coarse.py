"""Few points for a job to start with, and what it may take in all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xgpt.core import catalog
from xprofiler.coarse import (
    JobWork,
    at_best,
    by_worth,
    coarse_points,
    coarse_words,
    expected_s,
    left_to_shape,
    told_of,
)
from xprofiler.points import OWN_TABLE, Kind, Needs, Point, quick_points
from xprofiler.profile import Profile, ProfileMetadata, Sample, TableKey
from xprofiler.profile_timing import ProfileTiming, shaped_tables
from xprofiler.roofline import Roofline
from xprofiler.shape import places
from xprofiler.timing import Operator

DECODER, BOTH = catalog.model("smollm2-135m"), catalog.model("t5-11b")
DEVICE = catalog.cluster("a40-4").device
METADATA = ProfileMetadata(
    model="toy", model_shape="m", device="cpu-2c", dtype="float32", ranks=1, threads_per_rank=1,
    kernels="k", libraries="torch 2")
needs_of_jobs = st.builds(
    Needs, input_tokens=st.integers(1, 2000), context_tokens=st.integers(2, 3000),
    queries=st.integers(1, 500), tokens=st.integers(1, 9000))


@given(own=needs_of_jobs, is_both=st.booleans())
@example(own=Needs(input_tokens=6, context_tokens=2, queries=1, tokens=1), is_both=False)
def test_few_points_reach_as_far_as_a_quick_profile_has(own: Needs, is_both: bool) -> None:
    model, needs = BOTH if is_both else DECODER, Needs()
    quick = quick_points(model, needs, own)
    few = coarse_points(model, needs, own)
    assert set(few) <= set(quick) and len(few) <= 10
    for kind in {point.kind for point in quick}:
        for axis in (1, 2):
            assert max(p[axis] for p in few if p.kind is kind) == max(
                p[axis] for p in quick if p.kind is kind)
        if kind is Kind.ENCODER:
            most, ours = (max(p.x * p.y for p in points if p.kind is kind)
                          for points in (quick, few))
            assert ours == most, "rows of one step"
    rest = by_worth(set(quick) - set(few))
    assert Counter([*few, *rest]) == Counter(quick)


def profile_of(points: list[Point], source: Roofline | None = None) -> Profile:
    """Measured at these points, with the roofline's times."""
    source = source or Roofline(DECODER, DEVICE, "bfloat16")
    tables = {}
    for operator in (*dict.fromkeys(OWN_TABLE.values()), Operator.HEAD):
        if operator in (Operator.KV_COMPACTION, Operator.CROSS_ATTENTION):
            continue
        found = sorted(places(points, operator), key=lambda place: place[::-1])
        tables[TableKey(operator.value)] = tuple(
            Sample(x=x, y=y, samples_s=(float(source.operator_s(operator, x, y)),))
            for x, y in found)
    return Profile(metadata=METADATA, tables=tables, model=DECODER)


def test_a_profile_says_how_coarse_it_is() -> None:
    own = Needs(input_tokens=250, context_tokens=400)
    quick = profile_of(quick_points(DECODER, Needs(), own))
    few = profile_of(coarse_points(DECODER, Needs(), own))
    assert not left_to_shape(quick, 1) and not coarse_words(quick)
    assert shaped_tables(quick) == dict(quick.tables), "and nothing is made up in a quick one"
    left = left_to_shape(few, 1)
    assert set(left) == {p for p in quick_points(DECODER, Needs(), own)
                         if p.kind is not Kind.COMPACTION} - set(
        coarse_points(DECODER, Needs(), own))
    assert set(left) <= set(told_of(few, 1))
    count = sum(p.kind is not Kind.COMPACTION for p in quick_points(DECODER, Needs(), own))
    assert coarse_words(few).startswith(f"coarse: {count - len(left)} of the {count} sizes")
    imported = replace(few, metadata=replace(METADATA, origin="imported from elsewhere"))
    assert not left_to_shape(imported, 1) and not coarse_words(imported)


def test_between_few_points_times_follow_the_roofline() -> None:
    own = Needs(input_tokens=250, context_tokens=400)
    few = ProfileTiming(profile_of(coarse_points(DECODER, Needs(), own)))
    quick = ProfileTiming(profile_of(quick_points(DECODER, Needs(), own)))
    for operator in (Operator.LAYER_REST, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION):
        least = few.table_errors()[TableKey(operator.value)].interpolation
        for point in few.profile.table(operator.value):
            assert few.operator_s(operator, point.x, point.y) == pytest.approx(point.median_s)
        missed = [float(few.operator_s(operator, p.x, p.y)) / p.median_s - 1
                  for p in quick.profile.table(operator.value)]
        assert np.sqrt(np.mean(np.square(missed))) <= least, operator


def test_what_a_job_takes_is_expected_from_what_was_measured() -> None:
    profile = profile_of(coarse_points(DECODER, Needs(), Needs()))
    timing = ProfileTiming(profile)
    job = JobWork(queries=400, input_tokens=40_000, output_tokens=20_000)
    alone = expected_s(timing, DECODER, job, ranks=1, degree=1)
    assert expected_s(timing, DECODER, job, ranks=2, degree=1) == pytest.approx(alone / 2)
    twice = JobWork(queries=800, input_tokens=80_000, output_tokens=40_000)
    assert expected_s(timing, DECODER, twice, ranks=1, degree=1) == pytest.approx(2 * alone)
    batch, layers = 130, DECODER.num_layers
    steps_s = 20_000 / batch * (float(timing.operator_s(Operator.HEAD, batch)) + layers * (
        float(timing.operator_s(Operator.LAYER_REST, batch))
        + float(timing.operator_s(Operator.DECODE_ATTENTION, batch, 125))))
    inputs_s = layers * (
        40_000 / 2080 * float(timing.operator_s(Operator.LAYER_REST, 2080))
        + 400 * float(timing.operator_s(Operator.ENCODE_ATTENTION, 100, 4)))
    assert alone == pytest.approx(steps_s + inputs_s)
    disturbed = replace(profile, tables={key: tuple(
        replace(p, samples_s=(*p.samples_s, 5 * p.median_s, 9 * p.median_s)) for p in points)
        for key, points in profile.tables.items()})
    seen, best = ProfileTiming(disturbed), ProfileTiming(at_best(disturbed))
    assert expected_s(best, DECODER, job, ranks=1, degree=1) == pytest.approx(alone)
    assert expected_s(seen, DECODER, job, ranks=1, degree=1) == pytest.approx(5 * alone)
