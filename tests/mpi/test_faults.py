"""What happens to real commands with real ranks when one of them dies or hangs: everybody ends, the
message says what is to be done, and the same command goes on."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import power_cut
import pytest
from faults import FAULTS, RRA, TOGETHER_S, ToyJob, alive, below, end, start, wait
from mpi_runs import injected
from soak import SHAPES, one_job, undisturbed

from xgpt.launch.launcher import find_mpiexec
from xgpt.run_folder.state import oldest_s, run_status

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("kind", ["kill the launcher", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in (
        "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGTERM", "SIGINT"))])
def test_ranks_end_with_their_launcher(kind, tmp_path):
    job, process, own = start(tmp_path)
    assert len(own["rank"]) == 2 and own["mpiexec"]
    FAULTS[kind](job, process, own, random.Random(0))
    facts = end(process, own)
    assert facts["code"] == (-9 if kind == "kill the launcher" else 75)
    done = job.lines()
    assert 20 <= len(done) < job.count
    state = json.loads(job.command("status", "--json").stdout)
    assert state["is_alive"] is False and state["num_results"] + state["num_held"] == len(done)


def test_a_rank_that_hangs_ends_the_run_by_its_name(tmp_path):
    job, process, own = start(tmp_path, run=", stall_timeout: 5")
    os.kill(own["rank"][-1], signal.SIGSTOP)

    def silent_s() -> float:
        return oldest_s(run_status(job.output).ranks) or 0.0

    wait(lambda: silent_s() > 2, "status says how old the last sign of life is", 60)
    facts = end(process, own)
    assert facts["code"] == 1
    assert "the run hangs: rank 1 (stage 1) has given no sign of life" in facts["error"]
    assert "its last order was to " in facts["error"] and facts["queries"] == len(job.lines())
    said = " ".join(job.command("status").stdout.split())
    assert "it failed: the run hangs: rank 1 (stage 1) has given no sign of life" in said


@pytest.mark.slow
def test_shared_memory_of_killed_ranks_is_removed_by_the_next_start(tmp_path):
    job, process, own = start(tmp_path)
    left = _shared(own["rank"])
    if not left:
        pytest.skip("these ranks have no shared memory of MPICH's")
    for pid in (process.pid, *own["mpiexec"], *own["proxy"], *own["rank"]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end(process, own)
    left = {path for path in left if path.exists()}
    assert left, "killed, they could not remove it"
    for path in left:
        os.utime(path, (1e9, 1e9))  # what is younger than a minute may be of others that begin
    done = job.run_to_end()
    assert done.returncode == 0 and not any(path.exists() for path in left)


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_before_the_ranks_start_says_so(number, tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20).write()
    process = job.start()
    time.sleep(0.2)
    wait(lambda: _hears(process.pid, number), "the signal would be heard")
    process.send_signal(number)
    facts = end(process, {})
    assert facts["code"] == facts["exit_code"] == 75 and facts["status"] == "stopped"
    assert f"{number.name} came while no ranks were at work" in facts["message"]


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_ranks_that_wait_end_with_their_command(number, tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20).write()
    process = job.start()
    wait(lambda: len(below(process.pid)["rank"]) == 2, "the ranks start while the job is planned")
    process.send_signal(signal.SIGSTOP)
    own, shared = below(process.pid), wait(lambda: _shared(below(process.pid)["rank"]), "they met")
    assert not (job.output / "run.json").exists(), "they have no plan yet"
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == (75 if number == signal.SIGTERM else -9)
    assert number == signal.SIGKILL or not any(path.exists() for path in shared)


def _shared(pids: list[int]) -> set[Path]:
    """The files of MPICH's through which these processes speak to each other."""
    return {Path(line.split()[-1]) for pid in pids
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "/dev/shm/mpich_shm_" in line}


def _hears(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in text.splitlines() if line.startswith("SigCgt")).split()[1],
                 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("kind", ["kill a rank", *(pytest.param(kind, marks=pytest.mark.slow)
                                                   for kind in ("kill mpiexec", "kill a proxy"))])
def test_ranks_that_die_are_started_again_and_nothing_is_lost(kind, tmp_path):
    job, process, own = start(tmp_path, count=200)
    done = job.lines()
    FAULTS[kind](job, process, own, random.Random(0))
    wait(lambda: not alive([pid for pids in own.values() for pid in pids]), "all end", TOGETHER_S)
    facts = end(process, own)
    assert facts["code"] == 0 and facts["status"] == "done", facts
    assert "the ranks start again (1 more restart after this)" in " ".join(facts["told"].split())
    assert [line for line, _ in job.answers()] == [f"q{i}" for i in range(200)]
    assert job.lines().items() >= done.items()


# A rank that dies whenever this query is at work in its first stage: what a fault in a kernel does.
_POISON = """
import os, sys
if {"xrunner.rank.worker", "xrunner.rank.standby"} & set(sys.orig_argv):
    from xrunner.engine.pool_requests import PoolRequests
    join = PoolRequests._join
    def deadly(self, index, now, **more):
        if index == int(os.environ["POISON"]):
            os.kill(os.getpid(), 9)
        return join(self, index, now, **more)
    PoolRequests._join = deadly
"""


@pytest.mark.slow  # four starts of the ranks
def test_a_query_that_kills_its_rank_is_isolated(tmp_path):
    job = ToyJob(folder=tmp_path, schedule="policy: rra, encode_batch: 2, decode_iterations: 4",
                 count=12, environ=injected(tmp_path / "poison", _POISON, POISON="3")).write()
    done = job.run_to_end()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    rows = [json.loads(line) for line in (job.output / "results.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(12)]
    assert [row["index"] for row in rows if "error" in row] == [3]
    assert "the last time alone" in rows[3]["error"] and rows[3]["finish_reason"] == "error"
    assert not (job.output / "deaths.json").exists()
    told = " ".join(done.stderr.split())
    assert "they run by themselves" in told and "The request 'q3' was run alone" in told
    assert json.loads((job.output / "metrics.json").read_text())["failed"] == 1


def test_ranks_that_start_again_with_another_model_are_ended(tmp_path):
    """Its answers and those that are kept would be of two models, in one file."""
    job, process, own = start(tmp_path, count=400)
    config = job.folder / "out" / "model" / "config.json"
    before = config.read_text()
    config.write_text(before.replace("10000.0", "500.0"))
    os.kill(own["rank"][0], signal.SIGKILL)
    facts = end(process, own)
    assert facts["code"] == 1 and "config.json changed since this run was planned" in (
        facts["error"]), facts
    done = job.lines()
    assert 20 <= len(done) < job.count
    config.write_text(before)
    assert job.run_to_end().returncode == 0
    assert job.lines().items() >= done.items() and len(job.answers()) == job.count


def test_results_that_are_removed_are_put_back(tmp_path):
    job, process, own = start(tmp_path, count=6000)  # at work, however late this process's turn is
    done = job.lines()
    (job.output / "results.jsonl").unlink()
    facts = end(process, own)
    assert facts["code"] == 1 and "results.jsonl was removed while a run wrote" in facts["error"]
    assert job.lines().items() >= done.items()


@pytest.mark.slow
@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_folder_that_is_gone_ends_the_run_in_words(is_renamed, tmp_path):
    """Renamed, it has everything; removed, the same command begins anew."""
    job, process, own = start(tmp_path)
    done = job.lines()
    if is_renamed:
        job.output.rename(tmp_path / "moved")
    while not is_renamed and job.output.exists():  # a file may come while it goes
        shutil.rmtree(job.output, ignore_errors=True)
    facts = end(process, own)
    assert facts["code"] == 1 and "was removed" in facts["told"]
    shutil.rmtree(job.output, ignore_errors=True)
    if is_renamed:
        (tmp_path / "moved").rename(job.output)
        assert job.lines().items() >= done.items()
    else:
        assert job.run_to_end().returncode == 0 and len(job.answers()) == job.count


@pytest.mark.slow  # the next one dies a moment earlier, test_several_jobs.py asks again for a job
def test_a_job_whose_command_dies_at_its_very_end_is_done(tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=1, count=60).write()
    process = job.start()
    wait((job.output / "metrics.json").is_file, "metrics.json")
    process.kill()
    process.communicate()
    results = (job.output / "results.jsonl").read_bytes()
    done = job.run_to_end()
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "already done"
    assert (job.output / "results.jsonl").read_bytes() == results


_DIES_BEFORE_ITS_ACCOUNT = """
import os, sys
if "submit" in sys.argv or "submit" in sys.orig_argv:
    from xgpt.app.running import run
    def deadly(*_, **__):
        os.kill(os.getpid(), 9)
    run.write_metrics = deadly
"""


def test_a_job_whose_command_dies_before_its_account_is_done_whatever_is_planned_now(tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, environ=injected(
        tmp_path / "deadly", _DIES_BEFORE_ITS_ACCOUNT)).write()
    made = "requests: {count: 40}, input_tokens: {mean: 5, std: 2, max: 9}"
    job.file.write_text(job.file.read_text().replace("requests: requests.jsonl", made))
    assert job.run_to_end().returncode == -9
    assert len(job.lines()) == 40 and not (job.output / "metrics.json").exists()
    results = (job.output / "results.jsonl").read_bytes()
    # stands for times that changed since: what would be planned is another schedule
    job.file.write_text(job.file.read_text().replace("encode_batch: 6", "encode_batch: 3"))
    done = ToyJob(folder=tmp_path, schedule=RRA).run_to_end()
    assert done.returncode == 0 and "nothing is run again" in " ".join(done.stderr.split())
    facts = json.loads(done.stdout)
    assert (facts["status"], facts["queries"]) == ("done", 40)
    assert (job.output / "results.jsonl").read_bytes() == results
    assert not list(job.output.glob("results-*"))


# test_power_cut.py has every moment of a cut, and what goes on after it
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind"), [
    ("rra, 1 rank", "power cut"), ("rra, 2 copies", "power cut"),
    ("rra, 2 copies of 2 stages", "power cut"), ("rra in chunks, 2 stages", "kill a rank"),
    ("rra, 2 copies of 2 stages", "kill a rank"), ("sarathi, 2 stages", "kill a rank"),
    ("rra shuffled, 3 stages", "kill the launcher"), ("waa-c, 2 ranks", "SIGINT")])
def test_a_short_soak(shape, kind, tmp_path):
    library = power_cut.compiled(tmp_path)
    expected = undisturbed(tmp_path / "undisturbed", count=60)
    (own,) = (one for one in SHAPES if one.name == shape)
    outcome = one_job(own, kind, len(shape + kind), tmp_path / "job", library, expected, count=60)
    assert not outcome.trouble, outcome


# A rank that is gone before it has met the others, as the interpreter starts or imports.
_GONE_AT_ITS_START = """
import os, sys
if "xrunner.rank.standby" in sys.orig_argv and os.environ.get("PMI_RANK") == "1":
    how = os.environ["HOW"]
    if how == "is killed":
        os.kill(os.getpid(), 9)
    elif how == "exits":
        os._exit(1)
    else:
        sys.modules["torch"] = None
"""
_SAID = {"lacks a library": "rank 1 on {host} cannot start: ModuleNotFoundError: import of torch",
         "exits": r"rank 1 .*on {host}\)? ended before it had met the others",
         "is killed": "Signal 9 ended a rank"}


@pytest.mark.parametrize("how", ["lacks a library", *(
    pytest.param(how, marks=pytest.mark.slow) for how in ("exits", "is killed"))])
def test_a_rank_that_is_gone_before_the_others_meet_it_is_named(how, tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20, run=", restarts: 0",
                 environ=injected(tmp_path / "gone", _GONE_AT_ITS_START, HOW=how)).write()
    process = job.start()
    wait((job.output / "run.json").is_file, "the job is planned")
    own, began_s = below(process.pid), time.monotonic()
    facts = end(process, own)
    assert time.monotonic() - began_s < 2 * TOGETHER_S, "10 s on a machine without other work"
    assert facts["code"] == 1
    assert re.search(_SAID[how].format(host=socket.gethostname()), facts["error"]), facts
    assert "BAD TERMINATION" not in facts["told"], facts


_LEAVES = """
import sys, time
from contextlib import suppress
from pathlib import Path
from mpi4py import MPI
from xrunner.rank.lifecycle import end_process
if MPI.COMM_WORLD.Get_rank() == 0:
    end_process(0)
MPI.Finalize()
time.sleep(1)  # of its end
Path(sys.argv[1]).touch()
"""


def test_a_rank_that_leaves_ends_no_other(tmp_path):
    """MPICH's mpiexec kills all where one is gone without having taken leave of it."""
    script, left = tmp_path / "leaves.py", tmp_path / "left"
    script.write_text(_LEAVES)
    subprocess.run([find_mpiexec(), "-n", "2", sys.executable, str(script), str(left)], check=True)
    assert left.exists()
