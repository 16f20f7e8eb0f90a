"""Files of unknown origin that are read as a whole: plain ones, and not without end."""

import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.errors import InputError, Mistake
from xgpt.core.hf.values import load_json
from xgpt.core.schedule_file import load_schedule
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
