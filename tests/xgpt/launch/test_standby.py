"""A rank that is started ahead serves like one that is started when it is wanted."""

import fcntl
import subprocess
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xgpt.core.job_file import load_job
from xgpt.launch import standby as ahead
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import LocalLauncher
from xgpt.launch.standby import MEASURES, SERVES, Standby, standby_for

# Waits like xrunner.standby; writes its process id where it is told to, and ends as that file says.
PROGRAM = """
import os, pathlib, socket, sys, time
with socket.socket(fileno=os.dup(0)) as line:
    argument, files, *_ = socket.recv_fds(line, 4096, 4)
    if b"\\0" in argument:
        module, _, path = argument.decode().partition("\\0")
        pathlib.Path(path).write_text(f"{os.getpid()} {module}")
        line.send(b".")
        argument, files, *_ = socket.recv_fds(line, 4096, 4)
if not argument:
    sys.exit(0)
path = pathlib.Path(argument.decode())
word = path.read_text()
path.write_text(f"{os.getpid()} {len(files)}")
if word == "lock":
    time.sleep(1)
sys.exit("it is broken" if word == "fail" else 0)
"""


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standby:
    (tmp_path / "toy_standby.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Standby("toy_standby")


def program(tmp_path: Path, standby: Standby, word: str = "", **other: object) -> RankProgram:
    argument = tmp_path / "run.json"
    argument.write_text(word)
    values = {"module": SERVES, "argument": argument, "count": 1, "standby": standby, **other}
    return RankProgram(**values)  # type: ignore[arg-type]


def test_the_process_started_ahead_takes_the_run(tmp_path: Path, standby: Standby) -> None:
    ranks = program(tmp_path, standby)
    LocalLauncher().run(ranks, watch=lambda: None)
    assert ranks.argument.read_text() == f"{standby.process.pid} 0"
    assert standby.serve(ranks.argument, ()) is None, "only once"
    standby.dismiss()


def test_it_keeps_what_it_is_handed(tmp_path: Path, standby: Standby) -> None:
    held = []

    def watch() -> None:
        with lock.open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)

    lock = tmp_path / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = program(tmp_path, standby, "lock", inherited=(file.fileno(),))
        started = standby.serve(ranks.argument, ranks.inherited)
    assert started is not None
    with pytest.raises(subprocess.TimeoutExpired):
        started.process.wait(timeout=0.5)
    watch()
    assert started.process.wait(timeout=20) == 0
    watch()
    assert held == [True, False] and ranks.argument.read_text().endswith(" 1")
    started.messages.close()
    standby.dismiss()


def test_what_it_said_is_told_when_it_fails(tmp_path: Path, standby: Standby) -> None:
    with pytest.raises(XgptError, match="it is broken"):
        LocalLauncher().run(program(tmp_path, standby, "fail"), watch=lambda: None)
    standby.dismiss()


def test_it_ends_when_it_is_let_go_of_or_its_launcher_is_gone(tmp_path: Path,
                                                              standby: Standby) -> None:
    standby.dismiss()
    assert standby.process.returncode is not None
    assert standby.serve(tmp_path, ()) is None
    orphan = Standby("toy_standby")
    orphan._line.close()  # as the system does when the launcher dies
    assert orphan.process.wait(timeout=20) == 0
    orphan.dismiss()


@pytest.mark.parametrize("module", sorted(MEASURES))
def test_it_measures_first_and_then_takes_the_run(tmp_path: Path, standby: Standby,
                                                  module: str) -> None:
    measured, ran = tmp_path / "request.json", program(tmp_path, standby)
    LocalLauncher().run(program(tmp_path, standby, module=module, argument=measured),
                        watch=lambda: None)
    assert measured.read_text() == f"{standby.process.pid} {module}"
    LocalLauncher().run(ran, watch=lambda: None)
    assert ran.argument.read_text() == f"{standby.process.pid} 0"
    assert standby.measure(module, measured) is None, "it has had its run"
    standby.dismiss()


def test_it_waits_beside_several_that_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              standby: Standby) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LocalLauncher, "command", lambda self, ranks: ["true"])
        LocalLauncher().run(program(tmp_path, standby, module=min(MEASURES), count=2),
                            watch=lambda: None)
    ranks = program(tmp_path, standby)
    LocalLauncher().run(ranks, watch=lambda: None)
    assert ranks.argument.read_text() == f"{standby.process.pid} 0"
    standby.dismiss()


@pytest.mark.parametrize("other", [{"count": 2, "module": "xrunner.agreement"},
                                   {"module": "xrunner.agreement"}])
def test_another_program_does_not_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         standby: Standby, other: dict[str, object]) -> None:
    monkeypatch.setattr(LocalLauncher, "command", lambda self, ranks: ["true"])
    ranks = program(tmp_path, standby, **other)
    LocalLauncher().run(ranks, watch=lambda: None)
    assert standby.process.returncode is not None, "it makes room"
    assert ranks.argument.read_text() == ""


def test_a_process_that_died_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         standby: Standby) -> None:
    standby.process.kill()
    standby.process.wait()
    ranks = program(tmp_path, standby)
    monkeypatch.setattr(LocalLauncher, "command",
                        lambda self, ranks: ["cp", "/dev/null", str(tmp_path / "ran")])
    LocalLauncher().run(ranks, watch=lambda: None)
    assert (tmp_path / "ran").is_file()
    standby.dismiss()


@pytest.mark.parametrize(("more", "is_wanted"), [
    ("run: {ranks: 1}", True), ("", True), ("run: {ranks: 2}", True),
    ("gpu: run: {ranks: 2}", False), ("gpu: run: {ranks: 1}", True),
    ("run: {engine: deepspeed}", False), ("run: {hosts: [a, b]}", False)])
def test_only_a_rank_that_may_serve_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  more: str, is_wanted: bool) -> None:
    class Started:
        def dismiss(self) -> None:
            dismissed.append(self)

    dismissed = list[Started]()
    monkeypatch.setattr(ahead, "Standby", Started)
    monkeypatch.setattr(ahead, "find_spec", lambda name: name)
    _, has_gpu, more = more.rpartition("gpu: ")
    monkeypatch.setattr(ahead.shutil, "which", lambda name: has_gpu or None)
    (tmp_path / "job.yaml").write_text(
        f"model: opt-125m\ncluster: local\nworkload: {{requests: {{count: 9}}, task: S}}\n{more}\n")
    with standby_for(load_job(tmp_path / "job.yaml", ())) as found:
        assert (found is not None) == is_wanted
    assert len(dismissed) == is_wanted
