"""Ranks that stay take run after run, and are started anew where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xgpt.launch import kept
from xgpt.launch.kept import KeptRanks
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import LocalLauncher
from xgpt.launch.standby import SERVES

# Waits like xrunner.standby for run after run; writes its process id where it is told to, and ends
# or stays as that file says.
PROGRAM = """
import os, pathlib, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    while True:
        argument, files, *_ = socket.recv_fds(line, 4096, 4)
        if not argument:
            sys.exit(0)
        path = pathlib.Path(argument.decode())
        word = path.read_text()
        path.write_text(f"{os.getpid()} {len(files)}")
        for file in files:
            os.close(file)
        if word == "fail":
            sys.exit("it is broken")
        line.send(b".")
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[KeptRanks]:
    (tmp_path / "toy_staying.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kept, "PROGRAM", "toy_staying")
    found = KeptRanks(said.append)
    yield found
    found.dismiss()


def run(folder: Path, ranks: KeptRanks, word: str = "", **holds: str) -> str:
    """Which process took the run, and with how many descriptors."""
    argument = folder / "run.json"
    argument.write_text(word)
    with (folder / "lock").open("w") as lock:
        LocalLauncher().run(RankProgram(
            module=SERVES, argument=argument, count=1, standby=ranks, inherited=(lock.fileno(),),
            holds={"model": "m", "dtype": "d", **holds}), watch=lambda: None)
    return argument.read_text()


def test_one_process_takes_all_runs_of_the_same_weights(tmp_path: Path, ranks: KeptRanks,
                                                        said: list[str]) -> None:
    first = run(tmp_path, ranks)
    assert [run(tmp_path, ranks) for _ in range(2)] == [first] * 2 and first.endswith(" 1")
    assert said == ["ranks and weights: those of the job before"] * 2
    assert ranks.processes == (int(first.split()[0]),)


def test_other_weights_are_loaded_by_new_ranks_and_what_differs_is_said(
        tmp_path: Path, ranks: KeptRanks, said: list[str]) -> None:
    first, other = run(tmp_path, ranks), run(tmp_path, ranks, model="n", dtype="e")
    assert first != other and said == [
        "ranks: started anew, for the job has another model and dtype"]


def test_after_a_run_that_failed_the_next_one_has_ranks_of_its_own(
        tmp_path: Path, ranks: KeptRanks, said: list[str]) -> None:
    first = run(tmp_path, ranks)
    with pytest.raises(XgptError, match="it is broken"):
        run(tmp_path, ranks, "fail")
    assert run(tmp_path, ranks) != first
    assert said[1:] == ["ranks: started anew, for those of the job before have ended"]


def test_another_program_finds_them_gone(tmp_path: Path, ranks: KeptRanks) -> None:
    run(tmp_path, ranks)
    other = RankProgram(module="xrunner.engines.deepspeed_worker", argument=tmp_path, count=1)
    assert ranks.serves(other) is None and ranks.processes == ()
    ranks.dismiss()
