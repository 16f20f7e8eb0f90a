"""results.jsonl: in the input's order, a valid prefix at any moment, resumable."""

import json
import os
import random
import re
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import write_spool
from plans import open_writer, written

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import write_atomically
from xgpt.requests.request import RequestError
from xgpt.requests.spool import Record
from xrunner.files import results as results_module
from xrunner.files.results import (
    HELD_FILE,
    Answered,
    ResultWriter,
    answered,
    answered_by_last_line,
    count_results,
    held_places,
    write_errors,
)
from xrunner.query import FinishedQuery, PreparedQuery

# a killed run closes nothing
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def finished(index: int, *, text: str = "täxt\n", is_openai: bool = False,
             latency_s: float = 1.25) -> FinishedQuery:
    query = PreparedQuery(index=index, id=f"é{index}", input_ids=(1, 2, 3), max_new_tokens=5,
                          is_openai=is_openai, is_chat=is_openai)
    return FinishedQuery(query=query, output_ids=(4, 5), finish_reason="stop", text=text,
                         encode_start_s=0.5, first_token_s=min(1.5, 0.5 + latency_s),
                         last_token_s=0.5 + latency_s)


def test_results_leave_in_input_order_and_each_as_soon_as_it_can(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = open_writer(path)
    seen = []
    for index in (2, 0, 3, 1, 4):
        writer.write(finished(index))
        seen.append([json.loads(line)["index"] for line in path.read_text().splitlines()])
    assert seen == [[], [0], [0], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert writer.num_held == 0
    writer.close()
    line = json.loads(path.read_text().splitlines()[0])
    assert line == {"id": "é0", "index": 0, "text": "täxt\n", "output_ids": [4, 5],
                    "input_tokens": 3, "output_tokens": 2, "finish_reason": "stop",
                    "latency_s": 1.25, "encode_start_s": 0.5, "ttft_s": 1.5, "tpot_s": 0.25}


def test_a_query_without_an_answer_says_why_in_its_line(tmp_path):
    own, openai = written(tmp_path / "results.jsonl", (replace(
        finished(index, is_openai=index == 1), finish_reason="error", error="logits not finite")
        for index in range(2)))
    assert (own["finish_reason"], own["error"]) == ("error", "logits not finite")
    assert openai["response"] is None and openai["custom_id"] == "é1"
    assert openai["error"] == {"code": "no_answer", "message": "logits not finite"}


@pytest.mark.parametrize("chunk", [1, 2**16])
@pytest.mark.parametrize("torn", ["", '{"index": 9, "te', "\0" * 40])
@pytest.mark.parametrize("last", ['{"index": 7}', '{"id": "a", "xgpt": {"index": 7, "tokens": []}}',
                                  '{"xgpt": {"index": 6, "choices": [{"index": 6}, {}]}}'])
def test_the_last_whole_line_tells_how_many_there_are(tmp_path, monkeypatch, chunk, torn, last):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f'{{"index": {i}, "text": "{i}"}}\n' for i in range(
        6 if "choices" in last else 7)) + f"{last}\n{torn}")
    (tmp_path / "held.jsonl").write_text('{"index": 7}\n{"index": 9}\n')
    found = answered(path)
    monkeypatch.setattr(results_module, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(results_module, "checked_results", None)  # which reads all
    assert answered_by_last_line(path) == found and found[:2] == (8, {9})


@pytest.mark.parametrize("text", [None, "", '{"index": 0', '{"index": 0}\n{"text": ""}\n',
                                  '{"index": 0}\n\0\0\n', '{"index": 0}\n[1]\n'])
def test_where_the_last_line_does_not_tell_all_are_counted(tmp_path, text):
    path = tmp_path / "results.jsonl"
    if text is not None:
        path.write_text(text)
    assert answered_by_last_line(path) == answered(path)


def test_an_openai_request_is_answered_with_a_batch_response(tmp_path):
    (line,) = written(tmp_path / "results.jsonl", [finished(0, text="Hello", is_openai=True)])
    body = line["response"]["body"]
    assert line["custom_id"] == "é0" and line["response"]["status_code"] == 200
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "Hello", "refusal": None}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert line["xgpt"]["latency_s"] == 1.25
    assert (line["xgpt"]["ttft_s"], line["xgpt"]["tpot_s"]) == (1.5, 0.25)


def test_errors_are_written_in_line_order_and_no_file_when_there_are_none(tmp_path):
    path = tmp_path / "errors.jsonl"
    write_errors(path, [RequestError(line=9, id=None, error="b"),
                        RequestError(line=2, id="x", error="a")])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"line": 2, "id": "x", "error": "a"}, {"line": 9, "id": None, "error": "b"}]
    write_errors(path, [])
    assert not path.exists()


COUNT = 8
Lines = list[bytes]
EDITS: list[tuple[Callable[[Lines], Lines], set[int], str]] = [
    (lambda all_: all_[:3] + all_[4:], {3}, "line 4 of results.jsonl is the result of request 4"),
    (lambda all_: all_[:4] + all_[3:], set(), "line 5 of results.jsonl is the result of request 3"),
    (lambda all_: [*all_[:3], all_[4], all_[3], *all_[5:]], set(), "the result of request 4"),
    (lambda all_: all_[::-1], set(), "line 1 of results.jsonl is the result of request 7"),
    (lambda all_: [*all_[:3], all_[3].replace("é".encode(), b"x"), *all_[4:]], {3},
     "line 4 of results.jsonl is no result of this job"),
    (lambda all_: [*all_[:3], b"\n", *all_[3:]], set(), "line 4 of results.jsonl is no result"),
    (lambda all_: [*all_[:3], bytes(len(all_[3])), *all_[4:]], {3, 4}, "no result of this job"),
    (lambda all_: [*all_[:3], all_[3][:30] + b"\n", *all_[4:]], {3}, "no result of this job"),
    (lambda all_: [*all_, all_[-1]], set(), "line 9 of results.jsonl is the result of request 7"),
    (lambda all_: [*all_[:-1], all_[-1].rstrip()], set(), ""),
    (lambda all_: [*all_[:-1], all_[-1][:30]], {7}, ""),
]


def _of_no_second(lines: bytes) -> bytes:
    """Without the second in which each OpenAI answer was made."""
    return re.sub(rb'"created": \d+', b"", lines)


@pytest.mark.parametrize(("edit", "missing", "fault", "length", "is_openai"), [
    *((*edit, 9, is_openai) for edit in EDITS for is_openai in (False, True)),
    (*EDITS[0], 2**21, False)])  # beyond what is read at a time
def test_what_was_changed_is_told_and_put_right(tmp_path, edit, missing, fault, length, is_openai):
    path = tmp_path / "results.jsonl"
    write_spool(tmp_path, [Record(id=f"é{i}", line=i + 1) for i in range(COUNT)])
    results = [finished(index, is_openai=is_openai, text="so " * (length // 3))
               for index in range(COUNT)]
    written(path, results)
    whole = path.read_bytes()
    path.write_bytes(b"".join(edit(whole.splitlines(keepends=True))))
    found = answered(path)
    assert set(range(COUNT)) - set(range(found.written)) - found.held == missing
    assert fault in found.fault and bool(fault) == bool(found.fault)
    written(path, (results[index] for index in sorted(missing)))
    assert _of_no_second(path.read_bytes()) == _of_no_second(whole)
    assert answered(path) == Answered(COUNT, frozenset())


@pytest.fixture
def synced(monkeypatch):
    """What was put on the disk, in order, by name and size."""
    done, sync, lock = list[str](), os.fsync, threading.Lock()

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)
        with lock:
            done.append(path.name if path.is_dir() else f"{path.name} {path.stat().st_size}")

    monkeypatch.setattr(os, "fsync", note)
    return done


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path, synced):
    write_atomically(tmp_path / "a.json", "new")
    assert synced == [f".a.json.{os.getpid()}.tmp 3", tmp_path.name]
    synced.clear()
    write_atomically(tmp_path / "a.json", "newer", is_durable=False)
    assert not synced and (tmp_path / "a.json").read_text() == "newer"


def test_what_is_written_is_on_the_disk_soon_and_at_the_end(tmp_path, synced):
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy", sync_s=0.05)
    writer.write(finished(0))
    writer.write(finished(2))  # held back
    size, held = path.stat().st_size, (tmp_path / "held.jsonl").stat().st_size
    waiting = threading.Event()
    while not {f"results.jsonl {size}", f"held.jsonl {held}"} <= set(synced):
        waiting.wait(0.01)
    writer.write(finished(1))
    writer.close()
    whole = f"results.jsonl {path.stat().st_size}"
    assert synced[-1] == tmp_path.name and whole in synced
    assert answered(path)[:2] == (3, frozenset())


def test_a_result_that_cannot_be_written_is_an_error_of_its_own(tmp_path):
    rows = written(tmp_path / "results.jsonl", (
        finished(index, text=text) for index, text in enumerate(("fine", "half a \ud83d", "fine"))))
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "stop"]
    assert "cannot be written: UnicodeEncodeError" in rows[1]["error"]


def test_a_file_that_was_replaced_is_not_written_over(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = open_writer(path)
    writer.write(finished(0))
    path.unlink()
    path.write_text("somebody's\n")
    with pytest.raises(XgptError, match=r"was replaced .* is in results-kept.jsonl"):
        writer.close()
    assert path.read_text() == "somebody's\n"
    assert json.loads((tmp_path / "results-kept.jsonl").read_text())["id"] == "é0"


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
    monkeypatch.setattr(results_module, "_DEAD_BYTES", 2000)
    path, source = tmp_path / "results.jsonl", random.Random(3)
    writer, most = open_writer(path), 0
    for index in sorted(range(400), key=lambda at: at + source.uniform(0, 12)):
        writer.write(finished(index))
        held = tmp_path / HELD_FILE
        most = max(most, held.stat().st_size if held.exists() else 0)
        assert len(held_places(held, count_results(path))) == writer.num_held
    assert 2000 < most < 6000 < path.stat().st_size
    writer.close()
    assert count_results(path) == 400


def test_what_is_held_is_not_in_memory(tmp_path):
    """As in a job that is sorted as a whole: its first line may be done last."""
    path, text = tmp_path / "results.jsonl", "x" * 20_000
    writer = open_writer(path)
    tracemalloc.start()
    for index in range(500, -1, -1):
        writer.write(finished(index, text=text))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.close()
    assert peak < 50 * len(text) < path.stat().st_size / 8
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["index"] for row in rows] == [*range(501)]


def test_below_a_file_there_are_no_results(tmp_path):
    (tmp_path / "out").write_text("a file\n")
    assert answered(tmp_path / "out" / "job" / "results.jsonl").total == 0
