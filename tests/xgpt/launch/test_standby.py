"""Ranks that are started ahead serve like those that are started when they are wanted, take run
after run, and are started anew where they cannot."""

import fcntl
import signal
from pathlib import Path

import pytest

from jobs import job
from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import READY
from xgpt.launch import standby as launch
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xgpt.launch.standby import MEASURES, RUNS, Standby, standby_for

# Waits like xrunner.rank.standby; writes its process id where it is told to, and ends or stays as
# that file says.
PROGRAM = """
import os, pathlib, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    line.send(b"r")
    while True:
        word, files, *_ = socket.recv_fds(line, 4096, 4)
        if not word:
            sys.exit(0)
        module, _, argument = word.decode().partition("\\0")
        path = pathlib.Path(argument)
        said = path.read_text()
        path.write_text(f"{os.getpid()} {len(files)} {module}")
        while said == "wait" and path.read_text():
            pass
        for file in files:
            os.close(file)
        if said == "fail":
            sys.exit("it is broken")
        line.send(b".")
"""

@pytest.fixture
def said():
    return []


@pytest.fixture
def begin(tmp_path, monkeypatch, said):
    """Starts ranks ahead, which are none of MPI's, however many."""
    (tmp_path / "toy_standby.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "PROGRAM", "toy_standby")
    monkeypatch.setattr(launch, "local_mpi_command", LocalLauncher().command)
    found: list[Standby] = []

    def started(count: int) -> Standby:
        found.append(Standby(count, said.append))
        return found[-1]

    yield started
    for one in found:
        one.dismiss()


def program(folder: Path, standby: Standby, word: str = "", *, module: str = RUNS, count: int = 1,
            lock: tuple[int, ...] = (), **holds: str) -> RankProgram:
    argument = folder / "run.json"
    argument.write_text(word)
    return RankProgram(module=module, argument=argument, count=count, standby=standby,
                       inherited=lock, holds={"model": "m", "dtype": "d", **holds})


def run(folder: Path, standby: Standby, word: str = "", **more: str) -> str:
    """Which process took the run, with how many descriptors, as what."""
    with (folder / "lock").open("w") as lock:
        ranks = program(folder, standby, word, lock=(lock.fileno(),), **more)
        LocalLauncher().run(ranks, watch=lambda: None)
    return ranks.argument.read_text()


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_process_takes_all_runs_of_the_same_weights(ahead, tmp_path, begin, said):
    standby = begin(ahead)
    before = standby.processes
    first = run(tmp_path, standby)
    assert [run(tmp_path, standby) for _ in range(2)] == [first] * 2
    assert first.endswith(f" 1 {RUNS}")
    assert said == ["ranks and weights: those of the job before"] * 2
    assert standby.processes == (int(first.split()[0]),) == (before or standby.processes)


def test_it_measures_first_and_then_takes_the_run(tmp_path, begin):
    standby = begin(1)
    measured = run(tmp_path, standby, module=MEASURES)
    assert measured.endswith(MEASURES)
    assert run(tmp_path, standby).split()[0] == measured.split()[0]
    after = program(tmp_path, standby, module=MEASURES)
    assert standby.serves(after) is None and standby.processes, "what a run set up is not measured"
    other = program(tmp_path, standby, module="xrunner.rank.agreement")
    assert standby.serves(other) is None and standby.processes == (), "another finds them gone"


def test_other_numbers_of_ranks_measure_beside_it_and_run_in_its_place(tmp_path, begin, said):
    standby = begin(2)
    before = standby.processes
    assert standby.serves(program(tmp_path, standby, module=MEASURES)) is None
    assert standby.processes == before
    taken = run(tmp_path, standby)
    assert standby.processes == (int(taken.split()[0]),) != before and not said


def test_it_keeps_what_it_is_handed_as_long_as_the_run(tmp_path, begin):
    held = []

    def look() -> None:
        with lock.open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)
        ranks.argument.write_text("")

    standby, lock = begin(1), tmp_path / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = program(tmp_path, standby, "wait", lock=(file.fileno(),))
        LocalLauncher().run(ranks, watch=look)
    look()
    assert held[0] and not held[-1]


def test_other_weights_are_loaded_by_new_ranks_and_what_differs_is_said(tmp_path, begin, said):
    standby = begin(1)
    first, other = run(tmp_path, standby), run(tmp_path, standby, model="n", dtype="e")
    assert first != other and said == [
        "ranks: started anew, for the job has another model and dtype"]


def test_after_a_run_that_failed_the_next_one_has_ranks_of_its_own(tmp_path, begin, said):
    standby = begin(1)
    first = run(tmp_path, standby)
    with pytest.raises(XgptError, match="it is broken"):
        run(tmp_path, standby, "fail")
    assert run(tmp_path, standby) != first
    assert said[1:] == ["ranks: started anew, for those of the job before have ended"]


def test_ranks_that_died_while_they_waited_are_replaced(tmp_path, begin, said):
    standby = begin(1)
    standby._started.process.kill()
    standby._started.process.wait()
    assert run(tmp_path, standby) and not said


@pytest.mark.parametrize("how", ["is dismissed", "its launcher is gone"])
def test_it_ends_when_nobody_wants_it(how, begin):
    standby = begin(1)
    process = standby._started.process
    if how == "is dismissed":
        standby.dismiss()
    else:
        assert standby._line.recv(1) == READY
        standby._line.close()  # as the system does when the launcher dies
    assert process.wait(timeout=20) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(("more", "cores", "wanted"), [
    ("ranks: 1", 2, 1), ("ranks: 2", 2, 2), ("ranks: 3", 2, 0), ("", 4, 4), ("", 8, 1),
    ("threads_per_rank: 2", 4, 2), ("engine: deepspeed", 2, None), ("hosts: [a, b]", 2, None)])
def test_as_many_are_started_as_the_job_may_take(tmp_path, monkeypatch, more, cores, wanted):
    counts: list[int] = []
    monkeypatch.setattr(Standby, "_start", lambda self, count: counts.append(count))
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    for place in ("xgpt.job.resolve", "xgpt.launch.standby"):
        monkeypatch.setattr(f"{place}.usable_cores", lambda: cores)
    monkeypatch.setattr("xgpt.job.resolve.gpus_here", list)
    with standby_for(job(tmp_path, model="opt-125m", cluster="local", run=f"{{{more}}}")) as found:
        assert (found is None) == (wanted is None)
    assert counts == ([wanted] if wanted else [])
