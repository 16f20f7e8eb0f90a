"""A profile of another device, dtype or model is refused; one that is merely near is marked."""

from dataclasses import replace
from typing import Any

import pytest
from profiles import metadata

from xprofiler.profile import Profile, ProfileMetadata, Sample, TableKey, match
from xprofiler.profile_timing import ProfileTiming

WANTED = metadata(device="cpu worker", ranks=2, sampling="greedy")
PLACES = [(is_cpu, is_here) for is_cpu in (True, False) for is_here in (True, False)]


def found(**changed: Any) -> ProfileMetadata:
    return replace(WANTED, **changed)


@pytest.mark.parametrize(("is_cpu", "is_here"), PLACES)
def test_a_profile_of_what_will_run_is_neither_refused_nor_marked(
        is_cpu: bool, is_here: bool) -> None:
    labelled = found(model="the same by another name", date="2020-01-01", commit="x", clock="fast",
                     is_padded=False)  # the source's own business: TimingFacts.is_padded
    assert match(labelled, WANTED, is_cpu=is_cpu, is_here=is_here) == ((), ())


@pytest.mark.parametrize(("is_cpu", "is_here"), PLACES)
@pytest.mark.parametrize(("change", "words"), [
    ({"device": "cuda H200"}, "it is of device 'cuda H200', the job's is 'cpu worker'"),
    ({"dtype": "bfloat16"}, "it is of dtype 'bfloat16', the job's is 'float32'"),
    ({"model": "big", "model_shape": "n"},
     "it is of model 'big (shape n)', the job's is 'toy (shape m)'"),
    ({"model_shape": "n"}, "it is of model 'toy (shape n)', the job's is 'toy (shape m)'")])
def test_another_device_dtype_or_model_is_refused_everywhere(
        is_cpu: bool, is_here: bool, change: dict[str, Any], words: str) -> None:
    got = match(found(**change), WANTED, is_cpu=is_cpu, is_here=is_here)
    assert got.refusals == (words,)
    assert got.marks == ()


def test_every_refusal_is_named_at_once() -> None:
    got = match(found(device="x", dtype="y", model_shape="z"), WANTED, is_cpu=True, is_here=True)
    assert len(got.refusals) == 3


@pytest.mark.parametrize(("is_cpu", "is_here"), PLACES)
@pytest.mark.parametrize(("key", "value"), [
    ("kernels", "old"), ("sampling", "drawn"), ("origin", "vidur"), ("ranks", 4),
    ("threads_per_rank", 8), ("libraries", "torch 1")])
def test_other_kernels_are_marked_and_machines_where_they_matter(
        is_cpu: bool, is_here: bool, key: str, value: Any) -> None:
    got = match(found(**{key: value}), WANTED, is_cpu=is_cpu, is_here=is_here)
    matters = {"ranks": is_cpu, "threads_per_rank": is_cpu, "libraries": is_here}.get(key, True)
    assert got.refusals == ()
    assert got.marks == ((f"{key} {value!r} instead of {getattr(WANTED, key)!r}",) * matters)


def test_marks_are_loud_in_every_provenance() -> None:
    other = found(kernels="old", threads_per_rank=8)
    marks = match(other, WANTED, is_cpu=True, is_here=True).marks
    table = {TableKey("layer_rest"): (Sample(x=1, samples_s=(1.0,)),)}
    shown = ProfileTiming(Profile(metadata=other, tables=table), marks=marks).provenance()
    assert "NOT OF WHAT WILL RUN: kernels 'old' instead of 'k'; threads_per_rank 8" in shown
