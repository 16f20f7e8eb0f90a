"""`xgpt status` and `xgpt stop` of jobs under Slurm, against stand-ins for its programs: files and
Slurm's word are joined, whichever of its programs still knows the job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_slurm
import pytest
from click.testing import CliRunner
from runs import RUNNING

from xgpt.cli.main import cli
from xgpt.core.errors import XgptError
from xgpt.run_folder.files import SlurmRecord
from xrunner.files.lock import StopRequest, output_lock
from xrunner.files.sink import write_progress

ENDED = ("JobId=12 JobName=x JobState={state} Reason={reason} ExitCode={code} RunTime=00:01:02 "
         "TimeLimit=01:00:00 StartTime=2026-01-01T00:00:00 NodeList=n1\n")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return fake_slurm.install(tmp_path / "bin", monkeypatch)


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "it's \"out\""
    folder.mkdir()
    SlurmRecord(job_id="12", cluster=None, script=folder / "slurm.sh",
                log=folder / "slurm-12.log", submitted="now").save(folder)
    return folder


def status(out: Path) -> tuple[dict[str, Any], str]:
    as_json, text = (CliRunner().invoke(cli, ["status", str(out), *more], catch_exceptions=False)
                     for more in (["--json"], []))
    return json.loads(as_json.stdout), " ".join(text.stdout.split())


def stop(out: Path) -> str:
    return CliRunner().invoke(cli, ["stop", str(out)], catch_exceptions=False).stdout


def test_a_job_that_waits_and_one_that_begins(slurm, out):
    slurm.queue("PENDING|Priority|0:00|1:00:00|2026-01-01T00:00:00|")
    found, text = status(out)
    assert (found["state"], found["slurm"]["reason"]) == ("pending", "Priority")
    assert "job 12 is pending (Priority), starts about 2026-01-01T00:00:00" in text
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n[1-2]")
    found, text = status(out)
    assert found["state"] == "starting" and "is running on n[1-2], 0:07 of 1:00:00" in text


def test_slurm_knows_better_than_a_lock_of_another_node(slurm, out):
    write_progress(out / "progress.json", RUNNING)
    assert status(out)[0]["state"] == "died"
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n1")
    found, text = status(out)
    # the lock is not seen here, so the count is that of the files
    assert found["state"] == "starting" and "no process works on it" not in text


@pytest.mark.parametrize(("state", "reason", "code"), [
    ("FAILED", "NonZeroExitCode", "1:0"), ("TIMEOUT", "TimeLimit", "0:9"),
    ("OUT_OF_MEMORY", "OutOfMemory", "0:125"), ("CANCELLED", "None", "0:15")])
def test_a_job_that_failed_shows_the_end_of_its_log(slurm, out, state, reason, code):
    slurm.says(squeue={}, scontrol={"out": ENDED.format(state=state, reason=reason, code=code)})
    (out / "slurm-12.log").write_text("".join(f"line {i}\n" for i in range(40)) + "the cause\n")
    found, text = status(out)
    assert (found["state"], found["slurm"]["exit_code"]) == (state.lower(), code)
    assert f"ended as {state}" in text and text.endswith("the cause") and "line 5 " not in text
    (out / "slurm-12.log").unlink()
    assert "do the nodes see this folder?" in status(out)[1]


@pytest.mark.parametrize(("code", "state"), [("1:0", "failed"), ("75:0", "stopped")])
def test_a_job_that_failed_is_not_taken_for_the_stop_of_an_earlier_one(slurm, out, code, state):
    write_progress(out / "progress.json", replace(RUNNING, state="stopped"))
    (out / "slurm-12.log").write_text("xgpt: slurm.prologue, line 41 of slurm.sh\n")
    slurm.says(squeue={}, scontrol={"out": ENDED.format(state="FAILED", reason="None", code=code)})
    found, text = status(out)
    assert found["state"] == state
    assert ("slurm.prologue, line 41" in text) == (state == "failed")


def test_accounts_are_asked_first_of_a_job_that_has_ended(slurm, out):
    slurm.says(squeue={}, sacct={
        "out": "CANCELLED by 1000|None|3725|02:00:00|2026-01-01T00:00:00|n1|0:0\n"})
    found, _ = status(out)
    assert (found["slurm"]["state"], found["slurm"]["elapsed"]) == ("CANCELLED", "01:02:05")
    assert "scontrol" not in [call[0] for call in slurm.calls]


def test_where_slurm_knows_nothing_the_files_speak(slurm, out, monkeypatch):
    write_progress(out / "progress.json", RUNNING)
    (out / "run.json").write_text("{}")
    with output_lock(out):
        found, text = status(out)
        assert found["state"] == "running" and "is not known any more" in text
        monkeypatch.setenv("PATH", str(out))
        found, text = status(out)
        assert found["state"] == "running" and "there is no squeue" in text
        assert "there is no squeue" in stop(out) and StopRequest(out).is_by_user


def test_stop_takes_a_waiting_job_back_and_asks_a_running_one(slurm, out):
    slurm.queue("PENDING|Priority|0:00|1:00:00|N/A|")
    assert "is out of the queue" in stop(out)
    assert slurm.calls[-1] == ["scancel", "12"] and not StopRequest(out).is_made
    slurm.queue("RUNNING|None|0:07|1:00:00|N/A|n1")
    assert "Slurm's job 12 is asked to stop" in stop(out)
    assert StopRequest(out).is_by_user and slurm.calls[-1][0] != "scancel"


def test_stop_of_what_does_not_run_is_an_error(slurm, out, tmp_path):
    with pytest.raises(XgptError, match="no run works there"):
        stop(out)
    with pytest.raises(XgptError, match="no run has started"):
        stop(tmp_path)
    slurm.queue("PENDING|Priority|0:00|1:00:00|N/A|")
    slurm.says(scancel={"err": "scancel: error: Access denied\n", "code": 1})
    with pytest.raises(XgptError, match="Access denied"):
        stop(out)
