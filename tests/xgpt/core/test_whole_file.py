"""Files of unknown origin that are read as a whole: plain ones, and not without end."""

import json
import math
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from problems import estimate_from_flat, estimate_of, schedule_from_flat, schedule_of, toy_problem

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError, Mistake
from xgpt.core.hf.values import load_json
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.schedule_file import from_json, load_schedule, save_schedule, to_json
from xgpt.core.system import whole_file
from xgpt.job.yaml_tree import MAX_FILE_BYTES, Field, apply_override, parse_tree, read_tree
from xprofiler.profile_file import load_profile

READERS = pytest.mark.parametrize("read", [load_json, load_schedule, load_profile])


@READERS
def test_a_pipe_is_no_file_and_is_not_waited_for(read, tmp_path):
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(InputError, match="no plain file"):
        read(path)


@READERS
def test_what_is_larger_than_such_a_file_is_refused(read, tmp_path, monkeypatch):
    assert whole_file.MOST_BYTES == 128 * 2**20
    monkeypatch.setattr(whole_file, "MOST_BYTES", 2**20)
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read(path)


def test_what_is_no_place_for_a_file_is_said_before_the_work_and_stays_as_it_was(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        assert whole_file.why_no_file(tmp_path / "x") == (
            "a file that can be written to: File too large")
        with pytest.raises(OSError) as failed:
            whole_file.write_atomically(tmp_path / "x", "x" * 513)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert failed.value.filename == str(tmp_path / "x") and list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    said = {name: str(whole_file.why_no_file(tmp_path / name)) for name in (
        "folder", "file/x.json", "pipe", "a" * 300)}
    assert said == {
        "folder": "a file, not a folder", "pipe": "a plain file, or a new one: a device or a pipe "
        "is there", "file/x.json": "a file in a folder that can be made: File exists",
        "a" * 300: "a file that can be written to: File name too long"}
    assert whole_file.why_no_folder(tmp_path / "file") == (
        "a folder that can be written to: File exists")
    for good in ("file", "new/x.json"):
        assert whole_file.why_no_file(tmp_path / good) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "new", "pipe"]
    assert (tmp_path / "file").read_text() == "kept"
    assert "a device" in str(whole_file.why_no_file(Path("/dev/full")))
    assert whole_file.why_no_file(Path("/proc/x.json")) == (
        "a file that can be written to: No such file or directory")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    whole_file.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def _plain(field: Field) -> Any:
    if isinstance(field.value, dict):
        return {key: _plain(child) for key, child in field.value.items()}
    if isinstance(field.value, list):
        return [_plain(child) for child in field.value]
    return field.value


def _parse(text: str) -> tuple[Any, list[Mistake]]:
    mistakes: list[Mistake] = []
    return _plain(parse_tree(text, "f", mistakes)), mistakes


@pytest.mark.parametrize(("text", "value"), [
    ("02:00:00", "02:00:00"), ("no", "no"), ("on", "on"), ("007", "007"), ("0x10", "0x10"),
    ("2024-01-02", "2024-01-02"), ("1e-3", 1e-3), ("5e2", 500.0), ("-3", -3), ("1_000", 1000),
    ("0", 0), ("+.5", 0.5), ("1.", 1.0), (".inf", math.inf), ("-.INF", -math.inf), ("true", True),
    ("False", False), ("~", None), ("null", None), ("", None), ('"12"', "12"), ("1__0", "1__0")])
def test_scalars_follow_the_core_schema(text, value):
    read, mistakes = _parse(f"a: {text}")
    assert read == {"a": value} and type(read["a"]) is type(value) and not mistakes


def test_every_value_knows_the_line_of_its_key_and_of_two_the_first_one_counts():
    tree = parse_tree("a: 1\nb:\n  c: 2\n  d: [3,\n   4]\n", "f", []).value
    nested = tree["b"].value
    assert [tree["b"].line, nested["c"].line, nested["d"].line] == [2, 3, 4]
    read, mistakes = _parse("a: 1\nb: 2\na: 3\n")
    assert read == {"a": 1, "b": 2}
    assert [str(m) for m in mistakes] == ["f:3: a: given twice (first in line 1)"]


def test_aliases_share_their_value_without_multiplying_it():
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    mistakes: list[Mistake] = []
    tree = parse_tree(bomb, "f", mistakes)
    assert isinstance(tree.value, dict) and len(tree.value) == 60 and not mistakes


@pytest.mark.parametrize("text", [
    "a: !!python/object/apply:os.system [ls]", "a: !secret x", "a: !!set {x}", "a: !!int abc",
    "a: !!bool maybe", '"\\ud800": 1\na: "\\ud800"', "? [x]\n: 1", "a: " + "9" * 5000,
    "a: &a [*a]", "a: &a {b: *a}"])
def test_what_a_job_file_has_no_use_for_is_a_mistake(text):
    assert _parse(text)[1]


@pytest.mark.parametrize(("text", "line"), [
    ("a: [1,\nb", 2), ("a: 1\n\tb: 2", 2), ("a: 1\n b: 2", 2), ("a: *nowhere", 1),
    ("a: 1\n---\nb: 2", 2), ("'", 1), ('"\\UFFFFFFFF"', None), ("[" * 3000, None),
    ("a: \x07", None)])
def test_what_is_no_yaml_is_refused_with_its_line(text, line):
    with pytest.raises(InputError, match="not valid YAML") as caught:
        _parse(text)
    assert [m.line for m in caught.value.mistakes] == [line]


@given(st.text(max_size=80) | st.text(alphabet="ab:[]{}&*!-?|>\"'#%@,. \n\t0", max_size=60))
@examples(200)
def test_any_text_gives_a_tree_or_an_input_error(text):
    try:
        _parse(text)
    except InputError as error:
        assert error.mistakes


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: \xe9\n", b"x" * (MAX_FILE_BYTES + 1)])
def test_a_file_that_is_no_job_file_is_refused(tmp_path, content):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="job.yaml"):
        read_tree(path, [])


def test_missing_files_and_folders_are_refused(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read"):
            read_tree(path, [])


@pytest.mark.parametrize(("override", "expected"), [
    ("a.b=5", {"a": {"b": 5, "c": 2}}), ("a={x: [1, y]}", {"a": {"x": [1, "y"]}}),
    ("a.c=", {"a": {"b": 1, "c": None}}), ("n.e.w=90 s", {"a": {"b": 1, "c": 2}, "n": {
        "e": {"w": "90 s"}}}), ("a.b.d=1", {"a": {"b": {"d": 1}, "c": 2}}),
    ("a.b=x=y", {"a": {"b": "x=y", "c": 2}})])
def test_an_override_replaces_one_value(override, expected):
    mistakes: list[Mistake] = []
    tree = parse_tree("a: {b: 1, c: 2}", "f", mistakes)
    assert _plain(apply_override(tree, override, mistakes)) == expected and not mistakes
    assert _plain(tree) == {"a": {"b": 1, "c": 2}}, "the tree it came from stays"


@pytest.mark.parametrize("override", ["a", "=1", ".a=1", "a..b=1", "", "a=[1", "a={{"])
def test_a_malformed_override_is_a_mistake_of_the_command_line(override):
    mistakes: list[Mistake] = []
    tree = parse_tree("a: 1", "f", mistakes)
    assert _plain(apply_override(tree, override, mistakes)) == {"a": 1}
    assert [(m.file, m.line) for m in mistakes] == [("--set", None)]


# A Schedule written and read back is the same, infinities included.


def _schedule(**changes: Any) -> Schedule:
    stages = (StageAssignment(index=0, ranks=(0, 1), first_layer=0, num_layers=3),
              StageAssignment(index=1, ranks=(2,), first_layer=3, num_layers=2))
    estimate = estimate_from_flat(
        policy="rra", encode_batch=8, decode_batch=31.5, decode_iterations=4, tp_degree=2,
        decode_micro_batches=1, tp_gpus=2, throughput_qps=3.25, output_tokens_per_s=104.0,
        latency_s=2.5, encode_s=0.5, decode_iteration_s=0.03, period_s=0.62, fits=True,
        memory_bytes=(10, 20, 30), memory_capacity_bytes=40, kv_tokens=5000, stages=stages,
        notes=("one",))
    values: dict[str, Any] = {
        "estimate": estimate, "latency_bound_s": 11.5, "constraint_kind": "sequence",
        "quantile": 0.99, "status": "optimal", "bound_qps": 3.3, "gap": 0.0154, "nodes": 17,
        "seconds": 0.2, "fingerprint": "0123456789abcdef", "rejected": (
            Rejected(kind="tp_degree", subject="4", reason="memory"),)}
    return schedule_from_flat(**{**values, **changes})


@pytest.mark.parametrize("changes", [
    {}, {"latency_bound_s": math.inf, "gap": math.inf, "bound_qps": math.inf},
    {"rejected": (), "unbounded_qps": 4.0},
    {"rejected": (Rejected(kind="policy", subject="x", throughput_qps=1.0, latency_s=math.inf,
                           reason="slow"),)},
])
def test_a_schedule_survives_its_file(tmp_path, changes):
    schedule, path = _schedule(**changes), tmp_path / "schedule.json"
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_the_file_is_json_that_any_reader_takes(tmp_path):
    path = tmp_path / "schedule.json"
    save_schedule(_schedule(latency_bound_s=math.inf), path)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert raw["bounds"][0]["limit_s"] == "inf" and raw["controls"]["encode_batch"] == 8


@pytest.mark.parametrize(("text", "said"), [
    ("[1]", "schedule"), ("{}", "schedule"), ("\x00", "schedule"), ("null", "schedule"),
    ("", "not a readable schedule"),
    ("[" * 100_000, "not a readable schedule"), (None, "not a readable schedule"),
    *((json.dumps({"version": version}), "this xgpt reads version 6 to 8: make") for version in (
        1, 99, [3], {"a": 1}, True, 3.0, "3", None, 2**70))])
def test_a_file_that_is_no_schedule_of_this_version_is_wrong_input(tmp_path, text, said):
    path = tmp_path / "schedule.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        load_schedule(path)


def test_whole_parts_are_replaced_and_fields_within_them_and_copies_have_ranks_of_their_own():
    schedule = _schedule()
    estimate = schedule.estimate
    other = estimate.changed(encode_batch=2, latency_s=9.0, kv_tokens=70)
    parts = {part: getattr(other, part) for part in ("controls", "deployment", "figures")}
    assert estimate.changed(**parts) == other == schedule.changed(**parts).estimate
    assert estimate.changed(**parts, kv_tokens=80) == other.changed(kv_tokens=80) != other
    pools = other.deployment.pools
    assert estimate.changed(pools=pools, num_groups=3).deployment.num_groups == 3
    assert estimate.changed(name="b").deployment.decoding.name == "b"
    proof = replace(schedule.proof, nodes=3)
    assert schedule.changed(proof=proof, gap=0.5).proof == replace(proof, gap=0.5)
    bounds = (replace(schedule.bound, limit_s=7.0),)
    assert schedule.changed(bounds=bounds, quantile=0.5).bound == replace(bounds[0], quantile=0.5)
    with pytest.raises(TypeError, match="color"):
        schedule.changed(color="red")
    one = _schedule().estimate
    three = one.in_copies(3)
    assert (three.deployment.num_devices, three.deployment.devices_per_replica) == (9, 3)
    assert three.figures.throughput_qps == 3 * one.figures.throughput_qps
    assert three.figures.latency_s == one.figures.latency_s
    assert [stage.ranks for stage in three.deployment.pools_of(2)[0].stages] == [(6, 7), (8,)]
    assert three.deployment.pools_of(0) == one.deployment.pools
    assert three.one_copy == one


def stage(raw: dict[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = raw["deployment"]["pools"][0]["stages"][index]
    return found


@pytest.fixture
def raw():
    return to_json(schedule_of(toy_problem()))


@pytest.mark.parametrize(("change", "key", "allowed"), [
    (lambda raw: raw["deployment"]["pools"][0].update(role=1), "pools[0].role", "'both', 'encode'"),
    (lambda raw: raw["figures"].update(throughput_qps=math.nan), "throughput_qps", "finite number"),
    (lambda raw: raw["figures"].update(throughput_qps="inf"), "throughput_qps", "valid number"),
    (lambda raw: raw["figures"].update(fits="yes"), "fits", "valid boolean"),
    (lambda raw: raw["controls"]["even"].update(adjustment=-0.5), "even.adjustment", "equal to 0"),
    (lambda raw: raw["controls"].update(encode_batch=0), "encode_batch", "equal to 1"),
    (lambda raw: raw["controls"].update(decode_iterations=1e30), "decode_iterations", "integer"),
    (lambda raw: raw["controls"].update(decode_iterations=2.5), "decode_iterations", "integer"),
    (lambda raw: raw["controls"].update(encode_batch=True), "encode_batch", "integer"),
    (lambda raw: raw["proof"].update(nodes=2**63), "proof.nodes", "equal to 9007199254740992"),
    (lambda raw: stage(raw, 1).update(first_layer=99), "stages[1].first_layer", "begins where"),
    (lambda raw: stage(raw, 1).update(ranks=[0]), "deployment.pools", "in one stage"),
    (lambda raw: raw.update(fingerprint=7), "fingerprint", "string"),
    (lambda raw: raw.update(color="red"), "color", ""), (lambda raw: raw.update(bounds=[]), "", ""),
    (lambda raw: raw.update(rejected="DEEP"), "", ""),
    (lambda raw: raw["figures"].update(throughput_qps=10**400), "", ""),
    (lambda raw: raw["figures"].update(throughput_qps=-10**400), "", ""),
    (lambda raw: raw["deployment"].update(pools=[]), "", ""),
    (lambda raw: (stage(raw, 0).update(ranks=[1]), stage(raw, 1).update(ranks=[0])),
     "deployment.pools", "0 the first"),
    (lambda raw: raw["deployment"]["pools"][0].update(role="encode"), "deployment.pools", "roles")])
def test_a_value_that_cannot_be_is_named_with_what_is_allowed(raw, tmp_path, change, key, allowed):
    path = tmp_path / "schedule.json"
    change(raw)
    # text: Python's own encoder need not reach that far
    path.write_text(json.dumps(raw).replace('"DEEP"', "[" * 950 + "]" * 950))
    with pytest.raises(InputError) as refused:
        load_schedule(path)
    assert all(key in one.key and allowed in one.allowed for one in refused.value.mistakes)
    assert len(refused.value.mistakes) == 1 or not key


def test_what_a_search_writes_passes():
    problem = toy_problem(latency_s=2.0)
    for policy, variables in (("rra", {"encode_batch": 4, "decode_iterations": 8}),
                              ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2})):
        schedule = schedule_of(problem, estimate_of(problem, policy, **variables))
        assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule, policy
