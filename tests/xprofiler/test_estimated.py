"""Times of a model by what another took on the same machine, or by its peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core import catalog
from xgpt.core.model import ModelSpec
from xprofiler.coarse import coarse_words
from xprofiler.estimated import estimated, known_by, known_by_peaks, peaks_tell_of
from xprofiler.points import Needs
from xprofiler.profile import Peaks, Profile, ProfileMetadata
from xprofiler.profile_timing import ProfileTiming
from xprofiler.source_errors import ESTIMATED_ERROR, ESTIMATED_LIKE_ERROR
from xprofiler.timing import Operator

DECODER, OTHER, ENCODER = (catalog.model(name) for name in (
    "smollm2-135m", "opt-125m", "t5-small"))
NEEDS = Needs()
PEAKS = Peaks(flops_per_s=1e11, bandwidth_bytes_per_s=1e10, source="measured")


def metadata_of(model: ModelSpec, ranks: int = 1, threads: int = 2) -> ProfileMetadata:
    return ProfileMetadata(
        model=model.name, model_shape=model.name, device="cpu-2c-toy", dtype="float32",
        ranks=ranks, threads_per_rank=threads, kernels="k", libraries="l", is_padded=False)


def measured(model: ModelSpec, ranks: int = 1, threads: int = 2) -> Profile:
    """By a machine of which the peaks tell all."""
    own = metadata_of(model, ranks, threads)
    found = estimated(known_by_peaks(PEAKS, own), model, own, NEEDS, NEEDS, [1])
    assert found is not None
    return replace(found, metadata=own)


@pytest.mark.parametrize(("source", "target"), [
    (DECODER, OTHER), (OTHER, DECODER), (DECODER, ENCODER), (ENCODER, DECODER)])
def test_what_is_of_the_rooflines_shape_is_found_again_of_another_model(
        source: ModelSpec, target: ModelSpec) -> None:
    truth, own = measured(target), metadata_of(target)
    known = known_by(measured(source), own)
    assert known is not None
    found = estimated(known, target, own, NEEDS, NEEDS, [1])
    assert found is not None and found.tables.keys() == truth.tables.keys()
    for operator in (Operator.LAYER_REST, Operator.HEAD, Operator.DECODE_ATTENTION):
        points = truth.table(operator.value)
        x, y = np.array([(p.x, p.y) for p in points], float).T
        assert ProfileTiming(found).operator_s(operator, x, y) == pytest.approx(
            [p.median_s for p in points], rel=0.15)
    assert found.metadata.origin == f"estimated like {source.name}"
    assert ProfileTiming(found).common_error == ESTIMATED_LIKE_ERROR
    assert not ProfileTiming(found).facts.captured_degrees, "cores capture no steps"
    assert not coarse_words(found), "no points of it were left out, none were measured"


@given(threads=st.sampled_from([1, 2, 4]))
def test_a_rank_of_more_threads_has_more_of_the_machine(threads: int) -> None:
    known = known_by(measured(DECODER, ranks=1, threads=threads), metadata_of(DECODER, 1, 8))
    assert known is not None
    found = estimated(known, DECODER, metadata_of(DECODER, 1, 8), NEEDS, NEEDS, [1])
    assert found is not None
    large = float(ProfileTiming(found).operator_s(Operator.LAYER_REST, 2080.0))
    alone = float(ProfileTiming(measured(DECODER)).operator_s(Operator.LAYER_REST, 2080.0))
    assert large == pytest.approx(alone * threads / 8, rel=0.15)
    assert ProfileTiming(found).common_error == ESTIMATED_ERROR


@pytest.mark.parametrize("other", [
    {"dtype": "bfloat16"}, {"kernels": "another"}, {"device": "cpu-4c-toy"}, {"is_padded": True},
    {"origin": "imported"}, {"sharing": 2.0}, {"origin": "estimated like opt-125m"},
    {"sampling": "drawn"}, {"weight_dtype": "int8"}])
def test_another_machine_or_code_tells_nothing(other: dict[str, object]) -> None:
    profile = measured(OTHER)
    of = replace(profile.metadata, **other)  # type: ignore[arg-type]
    assert known_by(replace(profile, metadata=of), metadata_of(DECODER)) is None


@pytest.mark.parametrize("left", [set(), {"embed", "head"}])
def test_a_profile_that_was_interrupted_before_its_layers_tells_nothing(left: set[str]) -> None:
    profile = measured(OTHER)
    begun = replace(profile, tables={
        key: points if key.name in left else () for key, points in profile.tables.items()
        if key.name in left | {"layer_rest"}})
    for own in (begun, replace(begun, tables={})):
        assert known_by(own, metadata_of(DECODER)) is None


def test_peaks_tell_of_one_rank_its_own_dtype_and_the_likeliest_token() -> None:
    own = metadata_of(DECODER)
    assert peaks_tell_of(own)
    for other in ({"ranks": 2}, {"sampling": "drawn"}, {"weight_dtype": "int8"}):
        assert not peaks_tell_of(replace(own, **other))  # type: ignore[arg-type]


def test_of_several_ranks_only_the_same_layout_tells_and_its_messages_stay() -> None:
    profile = measured(OTHER, ranks=2, threads=1)
    assert known_by(measured(OTHER), metadata_of(DECODER, 2, 1)) is None
    known = known_by(profile, metadata_of(DECODER, 2, 1))
    assert known is not None
    assert estimated(known, DECODER, metadata_of(DECODER, 2, 1), NEEDS, NEEDS, [1, 2]) is None, (
        "of groups of two nothing was timed")


def test_what_it_is_estimated_from_is_no_part_of_its_identity() -> None:
    own = metadata_of(DECODER)
    like = replace(own, origin="estimated like opt-125m")
    assert like.is_estimated and not own.is_estimated
    assert like.identity == replace(own, origin="estimated from this machine's peaks").identity
    assert like.identity != own.identity
