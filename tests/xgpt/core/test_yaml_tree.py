"""YAML with line numbers: types, duplicates, anchors, overrides, and files that are no YAML."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.errors import InputError, Mistake
from xgpt.job.yaml_tree import MAX_FILE_BYTES, Field, apply_override, parse_tree, read_tree


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
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    read, mistakes = _parse(f"a: {text}")
    assert read == {"a": value} and type(read["a"]) is type(value) and not mistakes


def test_every_value_knows_the_line_of_its_key() -> None:
    tree = parse_tree("a: 1\nb:\n  c: 2\n  d: [3,\n   4]\n", "f", [])
    assert isinstance(tree.value, dict)
    nested = tree.value["b"].value
    assert isinstance(nested, dict)
    assert [tree.value["b"].line, nested["c"].line, nested["d"].line] == [2, 3, 4]


def test_a_key_given_twice_is_a_mistake_and_the_first_one_counts() -> None:
    read, mistakes = _parse("a: 1\nb: 2\na: 3\n")
    assert read == {"a": 1, "b": 2}
    assert [str(m) for m in mistakes] == ["f:3: a: given twice (first in line 1)"]


def test_aliases_share_their_value_without_multiplying_it() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    mistakes: list[Mistake] = []
    tree = parse_tree(bomb, "f", mistakes)
    assert isinstance(tree.value, dict) and len(tree.value) == 60 and not mistakes


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}"])
def test_an_alias_inside_its_own_anchor_is_a_mistake(text: str) -> None:
    assert "anchor" in str(_parse(text)[1][0])


@pytest.mark.parametrize("text", [
    "a: !!python/object/apply:os.system [ls]", "a: !secret x", "a: !!set {x}", "a: !!int abc",
    "a: !!bool maybe", '"\\ud800": 1\na: "\\ud800"', "? [x]\n: 1", "a: " + "9" * 5000])
def test_what_a_job_file_has_no_use_for_is_a_mistake(text: str) -> None:
    assert _parse(text)[1]


@pytest.mark.parametrize(("text", "line"), [
    ("a: [1,\nb", 2), ("a: 1\n\tb: 2", 2), ("a: 1\n b: 2", 2), ("a: *nowhere", 1),
    ("a: 1\n---\nb: 2", 2), ("'", 1), ('"\\UFFFFFFFF"', None), ("[" * 3000, None),
    ("a: \x07", None)])
def test_what_is_no_yaml_is_refused_with_its_line(text: str, line: int | None) -> None:
    with pytest.raises(InputError, match="not valid YAML") as caught:
        _parse(text)
    assert [m.line for m in caught.value.mistakes] == [line]


@given(st.text(max_size=80) | st.text(alphabet="ab:[]{}&*!-?|>\"'#%@,. \n\t0", max_size=60))
@examples(200)
def test_any_text_gives_a_tree_or_an_input_error(text: str) -> None:
    try:
        _parse(text)
    except InputError as error:
        assert error.mistakes


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: \xe9\n", b"x" * (MAX_FILE_BYTES + 1)])
def test_a_file_that_is_no_job_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="job.yaml"):
        read_tree(path, [])


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read"):
            read_tree(path, [])


@pytest.mark.parametrize(("override", "expected"), [
    ("a.b=5", {"a": {"b": 5, "c": 2}}), ("a={x: [1, y]}", {"a": {"x": [1, "y"]}}),
    ("a.c=", {"a": {"b": 1, "c": None}}), ("n.e.w=90 s", {"a": {"b": 1, "c": 2}, "n": {
        "e": {"w": "90 s"}}}), ("a.b.d=1", {"a": {"b": {"d": 1}, "c": 2}}),
    ("a.b=x=y", {"a": {"b": "x=y", "c": 2}})])
def test_an_override_replaces_one_value(override: str, expected: object) -> None:
    mistakes: list[Mistake] = []
    tree = parse_tree("a: {b: 1, c: 2}", "f", mistakes)
    assert _plain(apply_override(tree, override, mistakes)) == expected and not mistakes
    assert _plain(tree) == {"a": {"b": 1, "c": 2}}, "the tree it came from stays"


@pytest.mark.parametrize("override", ["a", "=1", ".a=1", "a..b=1", "", "a=[1", "a={{"])
def test_a_malformed_override_is_a_mistake_of_the_command_line(override: str) -> None:
    mistakes: list[Mistake] = []
    tree = parse_tree("a: 1", "f", mistakes)
    assert _plain(apply_override(tree, override, mistakes)) == {"a": 1}
    assert [(m.file, m.line) for m in mistakes] == [("--set", None)]
