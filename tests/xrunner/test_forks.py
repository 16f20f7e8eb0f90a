"""A process that has more threads than it began with forks no ranks: these would lack them. Nor
does it stay for ranks that cannot be forks: of another mpiexec than MPICH's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runner needs the extra `run`")

from xgpt.core import stand_in  # noqa: E402
from xrunner import forks  # noqa: E402
from xrunner.loading import Shelf  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks on Linux alone")


def test_who_has_computed_with_several_threads_refuses(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, _other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    word = json.dumps({"argument": str(tmp_path / "run.json"), "count": 1, "asks": True})
    with ours, line, _other:
        assert forks.Forks(line, Shelf(), num_threads=0).serve(word, [its.detach()]) == 0
        assert ours.recv(64) == forks.REFUSED
        assert ours.recv(64) == b"", "and keeps nothing of it"


def test_it_ends_where_no_rank_asks_and_these_become_their_commands(tmp_path: Path) -> None:
    shelf, done = Shelf(), tmp_path / "done"
    shelf.put("weights", None)  # type: ignore[arg-type]
    line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {name: value for name, value in os.environ.items() if name != "PMI_FD"}
    with line, its:
        ranks = [subprocess.Popen(
            [sys.executable, "-I", "-S", stand_in.__file__, str(its.fileno()), "2", "/bin/sh",
             "-c", f"echo done >> {done}"], pass_fds=[its.fileno()], env=environ)
            for _ in range(2)]
        word, files, *_ = socket.recv_fds(line, forks.MOST_BYTES, forks.MOST_FILES)
        module, _, argument = word.decode().partition("\0")
        assert module == forks.NAME
        assert forks.Forks(line, shelf, num_threads=99).serve(argument, files) == 0
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert done.read_text() == "done\ndone\n" and shelf.is_empty
