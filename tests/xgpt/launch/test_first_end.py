"""Ranks that are gone before they met the others are named while somebody waits for them: other
ranks, or the launcher itself, which could start but some. Who comes late is not gone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from faults import wait

from xgpt.launch.first_end import FirstEnd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of processes so")
LOOKS = 60  # more than after which a rank is given up
SHELL = os.path.realpath("/bin/sh")
HOST = socket.gethostname()


@contextmanager
def launcher(script: str) -> Iterator[subprocess.Popen[str]]:
    """A shell at work in the place of mpiexec."""
    process = subprocess.Popen(["/bin/sh", "-c", f"{script}\nread end"], stdin=subprocess.PIPE,
                               text=True, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def first_end(process: subprocess.Popen[str]) -> FirstEnd:
    """Of two ranks; a look takes a tenth of a second of its clock."""
    return FirstEnd(process.pid, 2, now=count(step=0.1).__next__)


def looked(end: FirstEnd, until: int = LOOKS) -> str | None:
    """What so many looks find, which are otherwise a tenth of a second apart."""
    for _ in range(until):
        if (gone := end.look()) is not None:
            return gone
    return None


def children_of(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def children(process: subprocess.Popen[str], number: int) -> None:
    """Once there are so many, each what the shell starts, and no longer a shell."""
    def are_there() -> bool:
        with suppress(OSError):
            programs = [os.readlink(f"/proc/{child}/exe") for child in children_of(process)]
            return len(programs) == number and SHELL not in programs
        return False

    wait(are_there, f"{number} children")


def test_a_launcher_that_waits_for_ranks_it_could_not_start_is_not_waited_for() -> None:
    with launcher("PMI_RANK=0 sleep 100 & kid=$!; read go; kill $kid; wait $kid") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert end.look() is None and len(end._found) == 1
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        children(process, 0)
        assert looked(end) == f"rank 1 on {HOST}"


@pytest.mark.parametrize(("name", "is_known"), [
    ("hydra_pmi_proxy", True), ("mpiexec.hydra", True), ("other", False)])
def test_a_launcher_that_could_start_none_is_not_waited_for(name: str, is_known: bool,
                                                            tmp_path: Path) -> None:
    """Another's ranks may be anywhere."""
    for own in ("hydra_pmi_proxy", name):
        shutil.copy(shutil.which("sleep") or "", tmp_path / own)
    with launcher(f"{tmp_path / name} 100 &") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert looked(end, 250) is None
        assert looked(end) == (f"rank 0 on {HOST}" if is_known else None)


def test_a_rank_that_is_started_late_is_found() -> None:
    with launcher("PMI_RANK=0 sleep 100 & read go; PMI_RANK=1 sleep 100 &") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert looked(end, 20) is None and len(end._found) == 1
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        children(process, 2)
        assert looked(end) is None and len(end._found) == 2
