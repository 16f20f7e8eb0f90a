"""`xgpt stop` while ranks, or the command itself, do not hear of it, before they start, and after a
death."""

import json
import os
import signal

import pytest
from faults import RRA, ToyJob, alive, below, end, start, wait

pytestmark = pytest.mark.mpi


@pytest.mark.slow
def test_a_stop_ends_ranks_that_do_not_hear_of_it(tmp_path):
    job, process, own = start(tmp_path)
    os.kill(own["rank"][0], signal.SIGSTOP)
    assert job.command("stop").returncode == 0
    facts = end(process, own)
    assert facts["code"] == 75 and "asked to stop, and the ranks did not" in facts["message"]


@pytest.mark.slow
def test_a_stop_is_heard_while_the_command_itself_is_stopped(tmp_path):
    """Ctrl-Z, or Slurm's suspension: the ranks see to it, and wait."""
    job, process, own = start(tmp_path)
    process.send_signal(signal.SIGSTOP)
    assert "asked to stop" in job.command("stop").stdout
    wait((job.output / "measured.json").is_file, "the run ends")
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and facts["queries"] == len(job.lines()) < job.count


@pytest.mark.slow
def test_a_stop_before_the_ranks_start_and_of_what_has_ended(tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20).write()
    assert "no run has started there" in job.command("stop").stderr
    process = job.start()
    wait((job.output / ".owner.json").is_file, "the folder is taken")
    process.send_signal(signal.SIGSTOP)
    own = below(process.pid)
    assert "asked to stop" in job.command("stop").stdout
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and "before the ranks were started" in facts["message"]
    refused = job.command("stop")
    assert refused.returncode == 1 and "no run works there (state: stopped)" in refused.stderr
    assert job.run_to_end().returncode == 0 and len(job.answers()) == 20
    refused = job.command("stop", "--json")
    assert refused.returncode == 1 and "state: done" in json.loads(refused.stdout)["error"]


@pytest.mark.slow
def test_a_stop_between_a_death_and_the_next_start_ends_the_run(tmp_path):
    job, process, own = start(tmp_path)
    process.send_signal(signal.SIGSTOP)  # else the ranks are there again before `stop` is
    os.kill(own["rank"][-1], signal.SIGKILL)
    wait(lambda: not alive(own["rank"]), "the ranks end")
    assert "asked to stop" in job.command("stop").stdout
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and facts["queries"] == len(job.lines()) < job.count
    assert "asked to stop meanwhile" in facts["message"] and "start again" not in facts["told"]
