"""held.jsonl: results that wait for one before them outlive the run that has them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from xrunner.io import results as held_module
from xrunner.io.results import HELD_FILE, Answered, ResultWriter, answered, count_results, read_held
from xrunner.query import FinishedQuery, PreparedQuery

# a killed run closes nothing
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def finished(index: int, *, latency_s: float = 1.25, is_openai: bool = False,
             text: str = "täxt\n") -> FinishedQuery:
    query = PreparedQuery(index=index, id=f"id{index}", input_ids=(1, 2, 3), max_new_tokens=5,
                          is_openai=is_openai)
    return FinishedQuery(query=query, output_ids=(4, 5, index), finish_reason="stop",
                         text=text,
                         encode_start_s=0.0, first_token_s=0.0, last_token_s=latency_s)


def open_writer(path: Path) -> ResultWriter:
    return ResultWriter(path, first_index=count_results(path), model="toy")


@pytest.mark.parametrize("is_openai", [False, True])
def test_what_is_held_is_on_the_disk_at_once_and_comes_out_unchanged(tmp_path, is_openai):
    path = tmp_path / "results.jsonl"
    killed = open_writer(path)
    for index in (0, 2, 3, 5):
        killed.write(finished(index, latency_s=index, is_openai=is_openai))
    # nothing is closed: this is what SIGKILL leaves
    held = (tmp_path / HELD_FILE).read_text().splitlines()
    assert answered(path) == Answered(1, frozenset({2, 3, 5}))
    again = open_writer(path)
    assert again.num_held == 3
    again.write(finished(1, latency_s=99, is_openai=is_openai))
    again.write(finished(4, latency_s=99, is_openai=is_openai))
    again.close()
    lines = path.read_text().splitlines()
    assert [lines[index] for index in (2, 3, 5)] == held
    rows = [json.loads(line) for line in lines]
    assert [row.get("xgpt", row)["latency_s"] for row in rows] == [0, 99, 2, 3, 99, 5]
    assert not (tmp_path / HELD_FILE).exists()


def test_no_file_where_nothing_ever_waits(tmp_path):
    writer = open_writer(tmp_path / "results.jsonl")
    for index in range(3):
        writer.write(finished(index))
        assert not (tmp_path / HELD_FILE).exists()
    writer.close()


@pytest.mark.parametrize("torn", [b'{"index": 7, "te', b'{"index": 7}', b"\xff\xfe\n", b"[7]\n",
                                  b'{"index": "7"}\n', b'{"xgpt": 7}\n'])
def test_a_torn_line_is_left_out_and_does_not_spoil_the_next(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    killed = open_writer(path)
    killed.write(finished(2))
    with (tmp_path / HELD_FILE).open("ab") as file:
        file.write(torn)
    assert answered(path) == Answered(0, frozenset({2}))
    again = open_writer(path)
    again.write(finished(7))
    assert answered(path) == Answered(0, frozenset({2, 7}))


def test_a_result_whose_line_was_torn_as_its_turn_came_is_still_held(tmp_path):
    path = tmp_path / "results.jsonl"
    killed = open_writer(path)
    for index in (1, 2, 0):
        killed.write(finished(index))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # of query 2, the last written
    assert answered(path) == Answered(2, frozenset({2}))
    open_writer(path).close()
    assert path.read_bytes() == whole and not (tmp_path / HELD_FILE).exists()


def test_lines_whose_turn_has_come_leave_the_file_as_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(held_module, "_DEAD_CHARS", 2000)
    path, source = tmp_path / "results.jsonl", random.Random(3)
    writer, most = open_writer(path), 0
    for index in sorted(range(400), key=lambda at: at + source.uniform(0, 12)):
        writer.write(finished(index))
        held = tmp_path / HELD_FILE
        most = max(most, held.stat().st_size if held.exists() else 0)
        assert len(read_held(held, count_results(path))) == writer.num_held
    assert 2000 < most < 6000 < path.stat().st_size
    writer.close()
    assert count_results(path) == 400
