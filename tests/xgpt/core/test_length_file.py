"""Lengths read from CSV, JSON lines and finished jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job_lengths import MAX_MISTAKES, read_length_pairs, read_lengths


def _file(folder: Path, text: str) -> Path:
    path = folder / "lengths"
    path.write_text(text, encoding="utf-8")
    return path


OURS = '{"id": "a", "index": 0, "input_tokens": 5, "output_tokens": 2, "text": "x"}\n'
OPENAI = json.dumps({"custom_id": "a", "response": {"body": {"usage": {
    "prompt_tokens": 5, "completion_tokens": 2}}}}) + "\n"


@pytest.mark.parametrize("text", [
    "input,output\n5,2\n", "output, input\n 2, 5\n", "5,2\n", "\ufeffinput,output\n\n5,2\n\n",
    "id,prompt_tokens,completion_tokens\nx,5,2\n", '{"input": 5, "output": 2}\n', OURS, OPENAI])
def test_both_sides_are_read_from_every_form(tmp_path: Path, text: str) -> None:
    path = _file(tmp_path, text)
    pairs = read_length_pairs(path)
    assert pairs is not None and pairs.tolist() == [[5, 2]]
    assert read_lengths(path, "input").tolist() == [5]
    assert read_lengths(path, "output").tolist() == [2]


@pytest.mark.parametrize("text", ["7\n8\n", "tokens\n7\n8\n", '{"n": 7}\n{"n": 8}\n'])
def test_a_file_of_one_column_serves_either_side_and_is_no_pair(tmp_path: Path, text: str) -> None:
    path = _file(tmp_path, text)
    assert read_length_pairs(path) is None
    assert read_lengths(path, "input").tolist() == read_lengths(path, "output").tolist() == [7, 8]


@pytest.mark.parametrize(("text", "line"), [
    ("input,output\n5,0\n", 2), ("input\n5\nx\n", 3), ("input,output\n5\n", 2),
    ("input\n1.5\n", 2), ('{"input": 5}\n{"input": true}\n', 2), ('{"input": 5}\n{"inp', 2),
    ('{"input": 5}\n[]\n', 2), ("", None), ("input,output\n", None), ("a,b\n1,2\n", 2),
    ("input\n5,6\n", 2), ("input\n5\n", 2), ("output\n5\n", 2), ('{"input": 5}\n', 1),
    ("input\n99999999999999999999999\n", 2), ('{"input": 9' + "9" * 30 + "}", 1), ("{}\n", None)])
def test_a_wrong_length_is_reported_with_its_line(tmp_path: Path, text: str,
                                                  line: int | None) -> None:
    with pytest.raises(InputError) as caught:
        values = read_lengths(_file(tmp_path, text), "input")
        read_lengths(_file(tmp_path, text), "output")
        raise AssertionError(values)
    assert [m.line for m in caught.value.mistakes] == [line]


def test_a_file_of_nothing_but_mistakes_reports_a_page_of_them(tmp_path: Path) -> None:
    path = _file(tmp_path, "input,output\n" + "x,y\n" * 500)
    with pytest.raises(InputError) as caught:
        read_length_pairs(path)
    assert len(caught.value.mistakes) == MAX_MISTAKES


def test_unreadable_files_are_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    for path in (tmp_path / "binary", tmp_path / "none", tmp_path):
        with pytest.raises(InputError):
            read_lengths(path, "input")
