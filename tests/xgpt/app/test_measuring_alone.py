"""One process at a time measures on a host, and who waits for it says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xgpt.app.profile import alone
from xgpt.app.telling import LogTeller
from xgpt.core.errors import StoppedEarly
from xrunner.io.lock import output_lock
from xrunner.io.stop import StopRequest

_HOLDS = """
import os, sys, time
from pathlib import Path
from xgpt.app.profile import alone
from xgpt.app.telling import LogTeller
with alone(Path(sys.argv[1]), Path("/jobs/other"), LogTeller(), sys.argv[2]):
    print("held", flush=True)
    time.sleep(100)
"""


class Kept(LogTeller):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@contextmanager
def held(folder: Path, engine: str = "xgpt", before: tuple[str, ...] = ()) -> Iterator[int]:
    """Another process has the lock; its id."""
    process = subprocess.Popen([*before, sys.executable, "-c", _HOLDS, folder, engine, "job.yaml"],
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_wait_is_told_each_minute_with_who_holds_the_lock(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, output, clock = Kept(), tmp_path / "out", [0.0]
    output.mkdir()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 150:
            StopRequest(output).make_by_user()

    with held(tmp_path) as pid, output_lock(output), pytest.raises(StoppedEarly):
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(time, "sleep", sleep)
        with alone(tmp_path, output, tell):
            pass
    monkeypatch.undo()
    assert len(tell.said) == 3
    assert all(f"(process {pid} on {socket.gethostname()}), since 20" in said
               and said.endswith("job.yaml") for said in tell.said)
    assert "waiting, 2m0" in tell.said[2]


def test_another_engine_does_not_wait_nor_another_host(tmp_path: Path) -> None:
    tell = Kept()
    with held(tmp_path, "vllm"), alone(tmp_path, tmp_path, tell):
        pass
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs rights to give a process another host's name")
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
    with held(tmp_path, before=elsewhere), alone(tmp_path, tmp_path, tell):
        pass
    assert not tell.said


def test_a_holder_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    tell = Kept()
    with held(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)  # nobody has taken note of its end yet
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with alone(tmp_path, tmp_path, tell):
            pass
    assert not tell.said
