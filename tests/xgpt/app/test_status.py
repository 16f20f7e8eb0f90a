"""What `xgpt status`, `top` and `stop` say of a run at each moment: a living run is told from a
dead one, what is counted is on the disk, and the words are those of screens.txt."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_slurm
import numpy as np
import pytest
from click.testing import CliRunner
from job_folder import xgpt
from runs import RUNNING, said, write_results
from screens import check_screen, without_figures

from jobs import job_file
from xgpt.app.opened_job import open_file
from xgpt.app.running.run import locked_output
from xgpt.app.teller import progress_line, time_left_s
from xgpt.cli.main import cli
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.problem import QueryLengths
from xgpt.run_folder.files import SlurmRecord
from xgpt.run_folder.state import run_status
from xrunner.files.lock import StopRequest, is_locked, output_lock
from xrunner.files.results import Answered
from xrunner.files.sink import RunSink, write_progress
from xrunner.rules.order import run_order

SCREENS = Path(__file__).with_name("screens.txt")


@pytest.fixture
def job(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").touch()
    return job_file(tmp_path, "nightly", output="out")


@pytest.fixture
def out(job):
    return job.parent / "out"


def state(job):
    return json.loads(xgpt("status", job, "--json").stdout)


def check_status(job, name, **found):
    """The status' object has these values, and its words are those of the screen."""
    told = state(job)
    assert {key: told.get(key) for key in found} == found
    text = xgpt("status", job).stdout
    assert max(map(len, text.replace(str(job.parent), "").splitlines())) <= 80
    check_screen(SCREENS, f"status, {name}", without_figures(
        " ".join(text.replace(str(job.parent), "FOLDER").split())))


def test_a_run_that_is_killed_is_not_running_any_more(job, out):
    write_progress(out / "progress.json", RUNNING)
    write_results(out, 100, '{"index": 10')
    with output_lock(out):
        check_status(job, "running", state="running", is_alive=True, done=120)
        assert "120/400" in said("status", job, of=job.parent)
    check_status(job, "died", state="died", is_alive=False, done=100, total=400, num_results=100,
                 results=str(out / "results.jsonl"))
    assert '"index": 10' in (out / "results.jsonl").read_text().splitlines()[-1], "nothing is cut"


def test_a_run_is_found_by_a_job_file_that_can_be_run_no_more(job, out):
    """Somebody moved the requests meanwhile, or edits the file: the run goes on all the same."""
    job.write_text(job.read_text().replace("{count: 400}", "moved.jsonl") + "modle: x\n")
    assert "modle" in xgpt("status", job).stderr, "no run was begun there that could be meant"
    write_progress(out / "progress.json", RUNNING)
    (out / "job.json").write_text('{"name": "nightly", "constraint": {"latency_s": "inf"}}')
    with output_lock(out):
        assert state(job)["state"] == "running"
        assert "asked to stop" in said("stop", job)


def test_of_a_run_at_work_a_long_file_of_results_is_not_read(out, monkeypatch):
    """`xgpt top` looks every second, and there may be ten million."""
    write_progress(out / "progress.json", RUNNING)

    def read(path):
        raise AssertionError(path)

    monkeypatch.setattr("xgpt.run_folder.state.answered_by_last_line", read)
    with output_lock(out):
        assert run_status(out).progress.done == 120


def test_a_run_that_dies_before_it_begins_says_what_an_earlier_one_left(job, out):
    with output_lock(out):
        assert state(job)["state"] == "starting", "nothing is written yet"
    assert "No run in" in xgpt("status", job).stderr
    write_progress(out / "progress.json", replace(RUNNING, state="loading", total=0, done=0))
    (out / "spool").mkdir(parents=True)
    (out / "spool" / "spool.json").write_text('{"queries": 400}\n')
    write_results(out, 7)
    with output_lock(out):
        check_status(job, "loading", state="starting")
    check_status(job, "died at its start", state="died", done=7, total=400)


def test_a_stopped_run_counts_what_is_written(job, out):
    # 120 were done, of which 20 wait for one before them
    write_progress(out / "progress.json", replace(RUNNING, state="stopped"))
    write_results(out, 100)
    (out / "held.jsonl").write_text("".join(
        f'{{"index": {i}}}\n' for i in (98, 99, *range(101, 121))) + '{"ind')
    check_status(job, "stopped", state="stopped", done=120, num_results=100, num_held=20)
    write_progress(out / "progress.json", replace(RUNNING, state="done", done=400))
    check_status(job, "done, killed before metrics.json", state="complete", done=400)
    (out / "metrics.json").write_text("{}")
    assert "killed" not in xgpt("status", job).stdout


@pytest.mark.parametrize("stop", [StoppedEarly("asked to stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, "loading", "done"])
def test_a_run_that_is_stopped_as_it_starts_was_stopped(job, out, stop, before):
    """`before`: what ranks or an earlier run told last."""
    if before == "done":
        write_progress(out / "progress.json", replace(RUNNING, state=before))
    with pytest.raises(type(stop)), locked_output(open_file(job)):
        assert state(job)["state"] == "starting"
        if before == "loading":
            write_progress(out / "progress.json", replace(RUNNING, state=before, total=0, done=0))
        raise stop
    assert state(job)["state"] == "stopped"
    for command in ("status", "top"):
        told = said(command, job, of=job.parent)
        assert "killed" not in told and "the same command goes on" in told
    assert "no run is active there (state: stopped)" in xgpt("stop", job).stderr


def test_a_run_that_fails_as_it_starts_says_why(job):
    with pytest.raises(XgptError), locked_output(open_file(job)):
        raise XgptError("no schedule keeps the bound")
    check_status(job, "failed at its start", state="died")


def test_a_run_that_starts_needs_its_requests_no_more(job):
    """Until its ranks start it has no job.json; `--set` names what is gone as well."""
    with locked_output(open_file(job)):
        job.write_text(job.read_text().replace("{count: 400}", "moved.jsonl"))
        for words in (("status", job), ("top", job), ("status", job, "--set", "model=/nowhere")):
            assert "starting" in said(*words, of=job.parent)
        assert "no such file" in xgpt("stop", job, "--set", "outptu=other").stderr, "which run?"
        assert "asked to stop" in said("stop", job)


def test_ranks_that_tell_nothing_any_more_were_not_heard_in_1970(job, out):
    """The run has ended, and its report is being written: the ranks are known by its account."""
    write_progress(out / "progress.json", replace(RUNNING, state="done", done=400))
    (out / "measured.json").write_text(json.dumps({"wall_s": 60.0, "ranks": [
        {"rank": 0, "stage": 0, "pool": "all", "busy_s": 50.0}]}))
    with output_lock(out):
        assert "83%" in (text := said("top", job, of=job.parent)) and "ago" not in text


def test_asking_does_not_keep_a_run_from_starting(tmp_path):
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


def test_the_time_left_is_that_of_this_run_and_none_of_what_should_be_over(tmp_path):
    resumed = replace(RUNNING, done=200, done_before=190)  # 10 queries in a minute
    assert "20 min left" in progress_line(resumed, 5.0, time_left_s(resumed, tmp_path))
    plan: Any = SimpleNamespace(output=tmp_path, model_name="toy", model_dir=None, sync_s=5.0,
                                aside=(), clock_s=0.0, arrives=False)
    sink = RunSink(plan, num_queries=400, before=Answered(190, frozenset()))
    sink.progress(1.0, 10)
    assert json.loads((tmp_path / "progress.json").read_text())["done_before"] == 190
    sink.close(2.0, "stopped")
    (tmp_path / "expected.json").write_text(json.dumps({
        "version": 1, "stages": [], "latency_s": [], "ttft_s": [], "done": [[2.0, 1], [2.0, 400]]}))
    start = replace(RUNNING, done=0, elapsed_s=1.0)
    assert time_left_s(start, tmp_path) == pytest.approx(1.0)
    assert time_left_s(replace(start, elapsed_s=2.5), tmp_path) is None
    assert time_left_s(replace(RUNNING, done=399, elapsed_s=1e-5), tmp_path / "none") is None


KILLED = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from xrunner.files.lock import output_lock
from xrunner.files.sink import RunSink
from xrunner.files.results import answered, count_results
from xrunner.query import FinishedQuery, PreparedQuery

out, kill_after = Path(sys.argv[1]), int(sys.argv[2])
with output_lock(out):
    count_results(out / "results.jsonl")
    before = answered(out / "results.jsonl")
    plan = SimpleNamespace(output=out, model_name="toy", model_dir=None, sync_s=5.0,
                           aside=(), clock_s=0.0, arrives=False)
    sink = RunSink(plan, num_queries=400, before=before)
    left = [one for one in json.loads(sys.argv[3])
            if one >= before.written and one not in before.held]
    for count, index in enumerate(left):
        if count == kill_after:
            sink.progress(1e9, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        sink.finished(FinishedQuery(
            query=PreparedQuery(index=index, id=f"q{index}", input_ids=(1,), max_new_tokens=1),
            output_ids=(index,), finish_reason="length", text="x" * (index % 50),
            encode_start_s=0.0, first_token_s=0.0, last_token_s=float(kill_after)))
    sink.close(1.0, "done")
"""

def test_killed_with_results_held_back_no_line_is_lost_or_doubled(job, out):
    pytest.importorskip("torch", reason="runs need the extra `run`")
    ones = np.ones(400, np.int64)
    order = run_order("random", 64, QueryLengths(inputs=ones, most_outputs=ones), 3).tolist()

    def run(kill_after: int) -> int:
        return subprocess.run([sys.executable, "-c", KILLED, str(out), str(kill_after),
                               json.dumps(order)], check=False).returncode

    assert run(130) == -9
    found = state(job)
    answered = order[:130]
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
    assert state(job)["state"] == "complete"


# `xgpt status` and `xgpt stop` of jobs under Slurm, against stand-ins for its programs: files and
# Slurm's word are joined, whichever of its programs still knows the job.


ENDED = ("JobId=12 JobName=x JobState={state} Reason={reason} ExitCode={code} RunTime=00:01:02 "
         "TimeLimit=01:00:00 StartTime=2026-01-01T00:00:00 NodeList=n1\n")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return fake_slurm.install(tmp_path / "bin", monkeypatch)


@pytest.fixture
def queued(tmp_path):
    folder = tmp_path / "it's \"out\""
    folder.mkdir()
    SlurmRecord(job_id="12", cluster=None, script=folder / "slurm.sh",
                log=folder / "slurm-12.log", submitted="now").save(folder)
    return folder


def status(queued: Path) -> tuple[dict[str, Any], str]:
    as_json, text = (CliRunner().invoke(cli, ["status", str(queued), *more], catch_exceptions=False)
                     for more in (["--json"], []))
    return json.loads(as_json.stdout), " ".join(text.stdout.split())


def stop(queued: Path) -> str:
    return CliRunner().invoke(cli, ["stop", str(queued)], catch_exceptions=False).stdout


def test_slurm_knows_better_than_a_lock_and_of_jobs_that_wait(slurm, queued):
    write_progress(queued / "progress.json", RUNNING)
    assert status(queued)[0]["state"] == "died"
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n1")
    found, text = status(queued)
    # the lock is not seen here, so the count is that of the files
    assert found["state"] == "starting" and "no process works on it" not in text
    slurm.queue("PENDING|Priority|0:00|1:00:00|2026-01-01T00:00:00|")
    found, text = status(queued)
    assert (found["state"], found["slurm"]["reason"]) == ("pending", "Priority")
    assert "job 12 is pending (Priority), starts about 2026-01-01T00:00:00" in text
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n[1-2]")
    found, text = status(queued)
    assert found["state"] == "starting" and "is running on n[1-2], 0:07 of 1:00:00" in text


@pytest.mark.parametrize(("state", "reason", "code"), [
    ("FAILED", "NonZeroExitCode", "1:0"), ("TIMEOUT", "TimeLimit", "0:9"),
    ("OUT_OF_MEMORY", "OutOfMemory", "0:125"), ("CANCELLED", "None", "0:15")])
def test_a_job_that_failed_shows_the_end_of_its_log(slurm, queued, state, reason, code):
    slurm.says(squeue={}, scontrol={"out": ENDED.format(state=state, reason=reason, code=code)})
    (queued / "slurm-12.log").write_text("".join(f"line {i}\n" for i in range(40)) + "the cause\n")
    found, text = status(queued)
    assert (found["state"], found["slurm"]["exit_code"]) == (state.lower(), code)
    assert f"ended as {state}" in text and text.endswith("the cause") and "line 5 " not in text
    (queued / "slurm-12.log").unlink()
    assert "do the nodes see this folder?" in status(queued)[1]


@pytest.mark.parametrize(("code", "state"), [("1:0", "failed"), ("75:0", "stopped")])
def test_a_job_that_failed_is_not_taken_for_the_stop_of_an_earlier_one(slurm, queued, code, state):
    write_progress(queued / "progress.json", replace(RUNNING, state="stopped"))
    (queued / "slurm-12.log").write_text("xgpt: slurm.prologue, line 41 of slurm.sh\n")
    slurm.says(squeue={}, scontrol={"out": ENDED.format(state="FAILED", reason="None", code=code)})
    found, text = status(queued)
    assert found["state"] == state
    assert ("slurm.prologue, line 41" in text) == (state == "failed")


def test_accounts_are_asked_first_of_a_job_that_has_ended(slurm, queued):
    slurm.says(squeue={}, sacct={
        "out": "CANCELLED by 1000|None|01:02:05|02:00:00|2026-01-01T00:00:00|n1|0:0\n"})
    found, _ = status(queued)
    assert (found["slurm"]["state"], found["slurm"]["elapsed"]) == ("CANCELLED", "01:02:05")
    assert "scontrol" not in [call[0] for call in slurm.calls]


def test_where_slurm_knows_nothing_the_files_speak(slurm, queued, monkeypatch):
    write_progress(queued / "progress.json", RUNNING)
    (queued / "run.json").write_text("{}")
    with output_lock(queued):
        found, text = status(queued)
        assert found["state"] == "running" and "is not known any more" in text
        monkeypatch.setenv("PATH", str(queued))
        found, text = status(queued)
        assert found["state"] == "running" and "there is no squeue" in text
        assert "there is no squeue" in stop(queued) and StopRequest(queued).is_by_user


def test_stop_takes_a_waiting_job_back_and_asks_a_running_one(slurm, queued):
    slurm.queue("PENDING|Priority|0:00|1:00:00|N/A|")
    assert "was waiting and is cancelled" in stop(queued)
    assert slurm.calls[-1] == ["scancel", "12"] and not StopRequest(queued).is_made
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n1")
    assert "Slurm job 12 is asked to stop" in stop(queued)
    assert StopRequest(queued).is_by_user and slurm.calls[-1][0] != "scancel"


def test_stop_of_what_does_not_run_is_an_error(slurm, queued, tmp_path):
    with pytest.raises(XgptError, match="no run is active there"):
        stop(queued)
    with pytest.raises(XgptError, match="No run in"):
        stop(tmp_path)
    slurm.queue("PENDING|Priority|0:00|1:00:00|N/A|")
    slurm.says(scancel={"err": "scancel: error: Access denied\n", "code": 1})
    with pytest.raises(XgptError, match="Access denied"):
        stop(queued)
