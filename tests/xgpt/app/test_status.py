"""`xgpt status`: a living run is told from a dead one, and what is counted is on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from xgpt.app.telling import progress_line, time_left_s
from xgpt.cli.main import cli
from xgpt.run_folder.state import run_status
from xrunner.io.lock import is_locked, output_lock
from xrunner.io.results import Answered
from xrunner.io.sink import Progress, RunSink, write_progress
from xrunner.rules.order import run_order

RUNNING = Progress(state="running", total=400, done=120, output_tokens=4800, elapsed_s=60.0,
                   latency_p50_s=1.5, latency_p99_s=2.25)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\noutput: out\n"
                    "workload: {requests: {count: 400}, task: S}\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").touch()
    return path


def shown(job: Path) -> tuple[str, dict[str, Any]]:
    """What a person and what a program is told."""
    text, as_json = (CliRunner().invoke(cli, ["status", str(job), *more], catch_exceptions=False)
                     for more in ([], ["--json"]))
    assert max(map(len, text.stdout.replace(str(job.parent), "").splitlines())) <= 80
    return " ".join(text.stdout.split()), json.loads(as_json.stdout)


def held(out: Path, *indices: int) -> None:
    (out / "held.jsonl").write_text("".join(f'{{"index": {i}}}\n' for i in indices) + '{"ind')


def results(out: Path, count: int, torn: str = "") -> None:
    (out / "results.jsonl").write_text("".join(f'{{"index": {i}}}\n' for i in range(count)) + torn)


def test_a_run_that_is_killed_is_not_running_any_more(job: Path) -> None:
    out = job.parent / "out"
    write_progress(out / "progress.json", RUNNING)
    results(out, 100, '{"index": 10')
    with output_lock(out):
        text, found = shown(job)
        assert "nightly: running" in text and "120/400" in text and "left" in text
        assert found["state"] == "running" and found["is_alive"] and found["done"] == 120
    text, found = shown(job)
    assert "nightly: died" in text and "100/400" in text and "left" not in text
    assert "100 results are in results.jsonl; the same command goes on" in text
    assert (found["state"], found["is_alive"], found["done"], found["total"]) == (
        "died", False, 100, 400)
    assert found["results"] == str(out / "results.jsonl") and found["num_results"] == 100
    assert '"index": 10' in (out / "results.jsonl").read_text().splitlines()[-1], "nothing is cut"


def test_a_run_is_found_by_a_job_file_that_can_be_run_no_more(job: Path) -> None:
    """Somebody moved the requests meanwhile, or edits the file: the run goes on all the same."""
    out = job.parent / "out"
    job.write_text(job.read_text().replace("{count: 400}", "moved.jsonl") + "modle: x\n")
    none = CliRunner().invoke(cli, ["status", str(job)])
    assert "modle" in str(none.exception), "no run was begun there that could be meant"
    write_progress(out / "progress.json", RUNNING)
    (out / "job.json").write_text('{"name": "nightly", "constraint": {"latency_s": "inf"}}')
    with output_lock(out):
        assert "nightly: running" in shown(job)[0]
        assert "asked to stop" in CliRunner().invoke(cli, ["stop", str(job)]).stdout


def test_of_a_run_at_work_a_long_file_of_results_is_not_read(
        job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`xgpt top` looks every second, and there may be ten million."""
    write_progress(job.parent / "out" / "progress.json", RUNNING)

    def read(path: Path) -> Answered:
        raise AssertionError(path)

    monkeypatch.setattr("xgpt.run_folder.state.answered_by_last_line", read)
    with output_lock(job.parent / "out"):
        status = run_status(job.parent / "out")
        assert status.state == "running" and status.progress.done == 120


def test_a_run_that_dies_before_it_begins_says_what_an_earlier_one_left(job: Path) -> None:
    out = job.parent / "out"
    write_progress(out / "progress.json", replace(RUNNING, state="loading", total=0, done=0))
    (out / "spool").mkdir(parents=True)
    (out / "spool" / "spool.json").write_text('{"queries": 400}\n')
    results(out, 7)
    with output_lock(out):
        text, found = shown(job)
        assert "reading the queries" in text and found["state"] == "starting"
    text, found = shown(job)
    assert "died" in text and "7/400" in text and found["done"] == 7


def test_nothing_written_yet_is_a_start_while_somebody_works_there(job: Path) -> None:
    with output_lock(job.parent / "out"):
        assert shown(job)[1]["state"] == "starting"
    done = CliRunner().invoke(cli, ["status", str(job)])
    assert "no run has started" in str(done.exception)


def test_a_stopped_run_counts_what_is_written(job: Path) -> None:
    out = job.parent / "out"
    # 120 were done, of which 20 wait for one before them
    write_progress(out / "progress.json", replace(RUNNING, state="stopped"))
    results(out, 100)
    held(out, 98, 99, *range(101, 121))
    text, found = shown(job)
    assert "stopped" in text and "120/400" in text and "the same command goes on" in text
    assert "100 results are in results.jsonl and 20 in held.jsonl" in text
    assert found["state"] == "stopped" and found["done"] == 120
    assert (found["num_results"], found["num_held"]) == (100, 20)
    write_progress(out / "progress.json", replace(RUNNING, state="done", done=400))
    text, found = shown(job)
    assert "400/400" in text and "goes on" not in text and found["state"] == "complete"
    assert "killed before it wrote metrics.json" in text and "runs nothing again" in text
    (out / "metrics.json").write_text("{}")
    assert "killed" not in (text := shown(job)[0]) and "nightly: done" in text


def test_asking_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    import fcntl
    import threading

    assert is_locked(tmp_path) is False
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # somebody asks
        release = threading.Timer(0.05, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        with output_lock(tmp_path):
            assert is_locked(tmp_path) is True
        release.join()
    assert is_locked(tmp_path) is False


def test_the_time_left_is_that_of_this_run(tmp_path: Path) -> None:
    resumed = replace(RUNNING, done=200, done_before=190)  # 10 queries in a minute
    assert "20m00s left" in progress_line(resumed, 5.0, time_left_s(resumed, tmp_path))
    plan: Any = SimpleNamespace(output=tmp_path, model_name="toy", model_dir=None, sync_s=5.0,
                                aside=())
    sink = RunSink(plan, num_queries=400, before=Answered(190, frozenset()))
    sink.progress(1.0, 10)
    assert json.loads((tmp_path / "progress.json").read_text())["done_before"] == 190
    sink.close(2.0, "stopped")


KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from xrunner.io.lock import output_lock
from xrunner.io.sink import RunSink
from xrunner.io.results import answered, count_results
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.order import run_order

out, kill_after = Path(sys.argv[1]), int(sys.argv[2])
with output_lock(out):
    count_results(out / "results.jsonl")
    before = answered(out / "results.jsonl")
    plan = SimpleNamespace(output=out, model_name="toy", model_dir=None, sync_s=5.0,
                           aside=())
    sink = RunSink(plan, num_queries=400, before=before)
    for count, index in enumerate(run_order(400, 64, 3, first=before.written,
                                            without=before.held)):
        if count == kill_after:
            sink.progress(1e9, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        sink.finished(FinishedQuery(
            query=PreparedQuery(index=index, id=f"q{index}", input_ids=(1,), max_new_tokens=1),
            output_ids=(index,), finish_reason="length", text="x" * (index % 50),
            encode_start_s=0.0, first_token_s=0.0, last_token_s=float(kill_after)))
    sink.close(1.0, "done")
"""


def test_killed_with_results_held_back_no_line_is_lost_or_doubled(job: Path) -> None:
    pytest.importorskip("torch", reason="runs need the extra `run`")
    out = job.parent / "out"

    def run(kill_after: int) -> int:
        return subprocess.run([sys.executable, "-c", KILLED, str(out), str(kill_after)],
                              check=False).returncode

    assert run(130) == -9
    _, found = shown(job)
    answered = run_order(400, 64, 3)[:130]
    whole = next(i for i in range(400) if i not in answered)
    assert whole < 130, "some were held back"
    assert (found["state"], found["done"], found["num_results"], found["num_held"]) == (
        "died", 130, whole, 130 - whole)
    assert run(1000) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["index"], r["id"], r["output_ids"]) for r in rows] == [
        (i, f"q{i}", [i]) for i in range(400)]
    assert {r["index"] for r in rows if r["latency_s"] == 130} == set(answered), "none done again"
    assert not (out / "held.jsonl").exists()
    assert shown(job)[1]["state"] == "complete"
