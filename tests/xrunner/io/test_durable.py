"""Results reach the disk in time, and what cannot be written is an error of its query's."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xgpt.core.whole_file import write_atomically
from xrunner.io.results import ResultWriter, answered
from xrunner.query import FinishedQuery, PreparedQuery


def finished(index: int, text: str = "", id_: str | None = None) -> FinishedQuery:
    query = PreparedQuery(index=index, id=id_ or f"q{index}", input_ids=(7,), max_new_tokens=1)
    return FinishedQuery(query=query, output_ids=(1,), finish_reason="stop", text=text,
                         encode_start_s=0.0, first_token_s=1.0, last_token_s=1.0)


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
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy")
    for index, text in enumerate(("fine", "half a \ud83d", "fine")):
        writer.write(finished(index, text))
    writer.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "stop"]
    assert "cannot be written: UnicodeEncodeError" in rows[1]["error"]


def test_a_file_that_was_replaced_is_not_written_over(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy")
    writer.write(finished(0))
    path.unlink()
    path.write_text("somebody's\n")
    with pytest.raises(XgptError, match=r"was replaced .* is in results-kept.jsonl"):
        writer.close()
    assert path.read_text() == "somebody's\n"
    assert json.loads((tmp_path / "results-kept.jsonl").read_text())["id"] == "q0"
