"""The profile's file: one point a line, nothing lost, every fault named."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiles import metadata

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xprofiler.points import judge
from xprofiler.profile import (
    Peaks,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
    cached_profile_path,
    match,
    model_shape,
)
from xprofiler.profile_file import AXES, PROFILE_VERSION, load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator

METADATA = metadata(ranks=2, sampling="drawn", is_padded=False, origin="measured",
                    clock="1980 MHz", date="2026-11-21", commit="abc")
OTHER = {
    "model_shape": "n", "device": "other", "dtype": "bfloat16", "ranks": 3, "threads_per_rank": 2,
    "kernels": "new", "libraries": "torch 3", "sampling": "greedy", "is_padded": True,
    "weight_dtype": "bfloat16", "origin": "vidur", "sharing": 2.0, "nodes": 2}
LABELS = {"model": "another name", "clock": "", "date": "2027-01-01", "commit": "def"}


def points(*triples: tuple[float, float, float]) -> tuple[Sample, ...]:
    return tuple(Sample(x=x, y=y, samples_s=(s, s, s)) for x, y, s in triples)


def profile(**changed: Any) -> Profile:
    line = points((1, 0, 1.0), (4, 0, 4.0), (8, 0, 6.0))
    whole = Profile(metadata=METADATA, refused={3: "6 heads cannot be split by 3"}, spent_s=12.5,
                    model=catalog.model("llama-3.1-8b"),
                    peaks=Peaks(flops_per_s=1e11, bandwidth_bytes_per_s=2.5e9, source="measured"),
                    tables={
        TableKey("layer_rest"): line, TableKey("layer_rest", 2): line,
        TableKey("decode_attention", 2): points((1, 10, 1.0), (4, 10, 3.0), (1, 20, 1.25e-6)),
        TableKey("transfer", 1, "pcie4-x16"): points((100, 0, 0.5), (1100.5, 0, 1.5)),
        TableKey("all_reduce", 2, "one hop = fast"): points((100, 0, 0.5)),
        TableKey("step_overhead"): points((0, 0, 0.25))})
    return replace(whole, **changed)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.json"


def changed_file(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A profile's file after `change` of its JSON object."""
    save_profile(profile(), path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


def faults(path: Path) -> dict[str, str]:
    """The mistakes that reading the file reports: key -> what is allowed."""
    with pytest.raises(InputError) as raised:
        load_profile(path)
    assert all(m.file == str(path) for m in raised.value.mistakes)
    return {m.key: m.allowed for m in raised.value.mistakes}


def test_a_file_keeps_everything(path):
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    before = path.read_text()
    save_profile(load_profile(path), path)
    assert path.read_text() == before, "writing what was read changes no byte"
    # so does one that knows the least
    bare = Profile(metadata=METADATA, tables={})
    save_profile(bare, path)
    assert load_profile(path) == bare


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-13b", "t5-11b"])
def test_a_models_shape_survives(path, name):
    """A fingerprint of the shape read back decides whether a profile fits a job."""
    model = catalog.model(name)
    save_profile(profile(model=model), path)
    back = load_profile(path).model
    assert back == model
    assert back is not None and model_shape(back) == model_shape(model)


def test_a_file_has_one_point_a_line_so_that_one_changed_point_is_one_changed_line(path, tmp_path):
    save_profile(profile(), path)
    key = TableKey("layer_rest", 2)
    first, *others = profile().tables[key]
    tables = {**profile().tables, key: (replace(first, samples_s=(1.001, 1.002, 1.003)), *others)}
    other = tmp_path / "other.json"
    save_profile(profile(tables=tables), other)
    ours, theirs = path.read_text().splitlines(), other.read_text().splitlines()
    assert len(ours) == len(theirs)
    assert [b for a, b in zip(ours, theirs, strict=True) if a != b] == [
        "   [1, 0, [1.001, 1.002, 1.003]],"]
    rows = [line for line in ours[ours.index(' "tables": {'):] if line.strip().startswith("[")]
    assert len(rows) == sum(len(table) for table in profile().tables.values())


def test_a_file_says_its_units_verdict_and_version(path):
    save_profile(profile(), path)
    raw = json.loads(path.read_text())
    assert raw["version"] == PROFILE_VERSION == 5
    assert raw["verdict"] == judge(profile()).sentence
    assert raw["units"]["decode_attention"] == {
        "x": "queries", "y": "context tokens", "samples_s": "seconds"}
    assert set(raw["units"]) == {key.name for key in profile().tables}
    assert raw["metadata"]["ranks"] == 2
    assert list(raw["tables"]) == [str(key) for key in profile().tables]
    assert {op.value for op in Operator} <= set(AXES)


def test_samples_keep_four_digits(path):
    sample = Sample(x=1, samples_s=(1.23456e-6, 12345.6))
    save_profile(profile(tables={TableKey("head"): (sample,)}), path)
    assert load_profile(path).table("head")[0].samples_s == (1.235e-6, 12350.0)


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    save_profile(profile(), path)
    before = path.read_text()
    unwritable = {TableKey("no_such_table"): points((1, 0, 1.0))}
    with pytest.raises(KeyError):
        save_profile(profile(tables=unwritable), path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space .*profile\.json"):
        save_profile(profile(spent_s=1.0), path)
    assert path.read_text() == before


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "null", "[" * 100_000, '{"version": 99}', '{"version": null}',
    '{"version": []}', '{"version": true}', '{"version": 2.0}',
    '{"version": 1}', '{"version": 2}', '{"version": 2, "tables": {}}',
    '{"version": 5, "metadata": [1], "tables": {}}',
    '{"version": 5, "metadata": {}, "tables": [1]}'])
def test_a_file_that_is_no_profile_is_refused_by_name(path, text):
    assert "not a readable profile" in faults(path)[""], "it is not there"
    path.write_text(text)
    assert faults(path)


NESTED = json.loads("[" * 900 + "]" * 900)  # found by the fuzzer: taken, and not written again


@pytest.mark.parametrize(("part", "key", "value", "fault"), [
    *(("", "spent_s", value, "spent_s") for value in ("long", None, [1])),
    *(("model", key, NESTED, "model") for key in ("activation", "max_positions", "source")),
    ("model", "rope_scaling", {"factor": [NESTED]}, "model"),
    ("tables", "layer_rest tp=1", [[1, 0, [1.0]], [1, 0, [2.0]]], "tables.layer_rest tp=1"),
    *(("tables", key, [[1, 0, [1.0]]], f"tables.{key}") for key in (
        "", "head tp=0", "head tp=-1", "head tp=two", "head speed=3", "Head tp=1"))])
def test_a_value_that_cannot_be_is_refused_by_its_key(path, part, key, value, fault):
    spoilt = changed_file(path, lambda raw: (raw[part] if part else raw).update({key: value}))
    assert set(faults(spoilt)) == {fault}


def test_another_version_names_the_one_that_is_read(path):
    changed_file(path, lambda raw: raw.update(version=99))
    assert faults(path) == {"version": (
        "this xgpt reads version 5: measure anew, `xgpt profile JOB --out FILE`")}


def test_every_fault_is_named_at_once(path):
    def spoil(raw: dict[str, Any]) -> None:
        raw["metadata"]["ranks"] = "two"
        raw["metadata"]["colour"] = "red"
        del raw["metadata"]["device"]
        raw["peaks"] = {"flops_per_s": 0, "bandwidth_bytes_per_s": 1, "source": "?"}
        raw["tables"]["layer_rest tp=2"][0] = [1, 0, []]
        raw["tables"]["unheard tp=1"] = []
        raw["model"]["wings"] = 2

    assert set(faults(changed_file(path, spoil))) == {
        "metadata.ranks", "metadata.colour", "metadata.device", "peaks.flops_per_s",
        "tables.layer_rest tp=2", "tables.unheard tp=1", "model.wings"}


@pytest.mark.parametrize("row", [
    [1, 0], [1, 0, []], [1, 0, 2.0], [-1, 0, [1.0]], [1, 0, [-1.0]], ["1", 0, [1.0]],
    [1, None, [1.0]], [True, 0, [1.0]], [1, 0, [float("nan")]], [1, 0, [float("inf")]], {}, 3,
    [1, 0, [1e30]], [1, 0, [86_401.0]], [1e30, 0, [1.0]], [3, 0, [0.0]], [3, 0, [1.0, 0]]])
def test_a_row_that_is_no_point_is_refused(path, row):
    def spoil(raw: dict[str, Any]) -> None:
        raw["tables"]["layer_rest tp=1"].append(row)

    (key, allowed), = faults(changed_file(path, spoil)).items()
    assert key == "tables.layer_rest tp=1"
    assert allowed.startswith(("points [x, y, [seconds, ...]]", "seconds above 0"))


def test_a_steps_own_cost_may_be_nothing(path):
    changed_file(path, lambda raw: raw["tables"].update({"step_overhead tp=1": [[0, 0, [0.0]]]}))
    assert load_profile(path).table("step_overhead")[0].median_s == 0.0


@pytest.mark.parametrize("key", OTHER)
def test_profiles_of_different_things_have_files_of_their_own(tmp_path, key):
    other = replace(METADATA, **{key: OTHER[key]})  # type: ignore[arg-type]
    path = cached_profile_path(tmp_path, METADATA)
    assert cached_profile_path(tmp_path, other) != path
    labelled = replace(METADATA, **LABELS)  # type: ignore[arg-type]
    assert cached_profile_path(tmp_path, labelled) == path


def test_every_field_of_the_metadata_is_part_of_the_identity_or_a_label():
    assert set(METADATA.identity) == set(OTHER)
    assert set(OTHER) | set(LABELS) == set(METADATA.__dataclass_fields__)


def test_spread_is_the_interquartile_range_over_the_median():
    assert Sample(x=1, samples_s=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(2 / 3)
    assert Sample(x=1, samples_s=(1.0, 9.0)).spread == 0.0
    assert Sample(x=1, samples_s=(0.0, 0.0, 0.0)).spread == 0.0
    few, many = (Sample(x=1, samples_s=(1.0, 2.0, 3.0) * n) for n in (1, 9))
    assert few.standard_error == pytest.approx(1.25 * 0.5 / 1.35 / 3**0.5)
    assert many.standard_error < few.standard_error


# --- which job a profile is of ----------------------------------------------------------------


WANTED = metadata(device="cpu worker", ranks=2, sampling="greedy")
PLACES = [(is_cpu, is_here) for is_cpu in (True, False) for is_here in (True, False)]


def found(**changed: Any) -> ProfileMetadata:
    return replace(WANTED, **changed)


@pytest.mark.parametrize(("is_cpu", "is_here"), PLACES)
def test_a_profile_of_what_will_run_is_neither_refused_nor_marked(is_cpu, is_here):
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
def test_another_device_dtype_or_model_is_refused_everywhere(is_cpu, is_here, change, words):
    got = match(found(**change), WANTED, is_cpu=is_cpu, is_here=is_here)
    assert got.refusals == (words,)
    assert got.marks == ()


def test_every_refusal_is_named_at_once():
    got = match(found(device="x", dtype="y", model_shape="z"), WANTED, is_cpu=True, is_here=True)
    assert len(got.refusals) == 3


@pytest.mark.parametrize(("is_cpu", "is_here"), PLACES)
@pytest.mark.parametrize(("key", "value"), [
    ("kernels", "old"), ("sampling", "drawn"), ("origin", "vidur"), ("ranks", 4),
    ("threads_per_rank", 8), ("libraries", "torch 1")])
def test_other_kernels_are_marked_and_machines_where_they_matter(is_cpu, is_here, key, value):
    got = match(found(**{key: value}), WANTED, is_cpu=is_cpu, is_here=is_here)
    matters = {"ranks": is_cpu, "threads_per_rank": is_cpu, "libraries": is_here}.get(key, True)
    assert got.refusals == ()
    assert got.marks == ((f"{key} {value!r} instead of {getattr(WANTED, key)!r}",) * matters)


def test_marks_are_loud_in_every_provenance():
    other = found(kernels="old", threads_per_rank=8)
    marks = match(other, WANTED, is_cpu=True, is_here=True).marks
    table = {TableKey("layer_rest"): (Sample(x=1, samples_s=(1.0,)),)}
    shown = ProfileTiming(Profile(metadata=other, tables=table), marks=marks).provenance()
    assert "NOT OF WHAT WILL RUN: kernels 'old' instead of 'k'; threads_per_rank 8" in shown
