"""What `xgpt status`, `top` and `stop` say of a run at each moment from before its ranks start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xgpt.app.opened import open_file
from xgpt.app.running.run import at_work
from xgpt.app.telling import time_left_s
from xgpt.cli.main import cli
from xgpt.core.errors import StoppedEarly, XgptError
from xrunner.io.lock import output_lock
from xrunner.io.sink import Progress, write_progress

RUNNING = Progress(state="running", total=400, done=120, output_tokens=4800, elapsed_s=60.0,
                   latency_p50_s=1.5, latency_p99_s=2.25)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\noutput: out\n"
                    "workload: {requests: {count: 400}, task: S}\n")
    (tmp_path / "out").mkdir()
    return path


def said(*words: object) -> str:
    done = CliRunner().invoke(cli, [*map(str, words)])
    return " ".join(f"{done.stdout} {done.exception or ''}".split())


def state(job: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(
        cli, ["status", str(job), "--json"], catch_exceptions=False).stdout)
    return found


@pytest.mark.parametrize("stop", [StoppedEarly("asked to stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, "loading", "done"])
def test_a_run_that_is_stopped_as_it_starts_was_stopped(job: Path, stop: BaseException,
                                                        before: str | None) -> None:
    """`before`: what ranks or an earlier run told last."""
    path = job.parent / "out" / "progress.json"
    if before == "done":
        write_progress(path, replace(RUNNING, state=before))
    with pytest.raises(type(stop)), at_work(open_file(job)):
        assert state(job)["state"] == "starting"
        if before == "loading":
            write_progress(path, replace(RUNNING, state=before, total=0, done=0))
        raise stop
    assert state(job)["state"] == "stopped"
    for command in ("status", "top"):
        assert "killed" not in (text := said(command, job)) and "the same command goes on" in text
    assert "no run works there (state: stopped)" in said("stop", job)


def test_a_run_that_fails_as_it_starts_says_why(job: Path) -> None:
    with pytest.raises(XgptError), at_work(open_file(job)):
        raise XgptError("no schedule keeps the bound")
    assert state(job)["state"] == "died"
    assert "it failed: no schedule keeps the bound" in said("status", job)


def test_a_job_that_waits_for_its_turn_is_told_so(job: Path) -> None:
    with at_work(open_file(job)):
        pass
    assert state(job)["state"] == "starting" and "in its turn" in said("status", job)


def test_a_run_that_starts_needs_its_requests_no_more(job: Path) -> None:
    """Until its ranks start it has no job.json; `--set` names what is gone as well."""
    with at_work(open_file(job)):
        job.write_text(job.read_text().replace("{count: 400}", "moved.jsonl"))
        assert "nightly: starting" in said("status", job) and "starting" in said("top", job)
        assert "nightly: starting" in said("status", job, "--set", "model=/nowhere")
        assert "no such file" in said("stop", job, "--set", "outptu=other"), "which run is meant?"
        assert "asked to stop" in said("stop", job)


def test_ranks_that_tell_nothing_any_more_were_not_heard_in_1970(job: Path) -> None:
    """The run has ended, and its report is being written: the ranks are known by its account."""
    out = job.parent / "out"
    write_progress(out / "progress.json", replace(RUNNING, state="done", done=400))
    (out / "measured.json").write_text(json.dumps({"wall_s": 60.0, "ranks": [
        {"rank": 0, "stage": 0, "pool": "all", "busy_s": 50.0}]}))
    with output_lock(out):
        assert "83%" in (text := said("top", job)) and "ago" not in text


def test_no_time_left_is_told_of_what_should_be_over(tmp_path: Path) -> None:
    """A burst ends all queries, and has not come yet when it was expected to."""
    (tmp_path / "expected.json").write_text(json.dumps({
        "version": 1, "stages": [], "latency_s": [], "ttft_s": [], "done": [[2.0, 1], [2.0, 400]]}))
    start = replace(RUNNING, done=0, elapsed_s=1.0)
    assert time_left_s(start, tmp_path) == pytest.approx(1.0)
    assert time_left_s(replace(start, elapsed_s=2.5), tmp_path) is None
    assert time_left_s(replace(RUNNING, done=399, elapsed_s=1e-5), tmp_path / "none") is None
