"""A process that has more threads than it began with forks no ranks: these would lack them."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runner needs the extra `run`")

from xrunner import forks  # noqa: E402
from xrunner.loading import Shelf  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks on Linux alone")


def test_who_has_computed_with_several_threads_refuses(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, _other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    word = json.dumps({"argument": str(tmp_path / "run.json"), "count": 1})
    with ours, line, _other:
        assert forks.Forks(line, Shelf(), num_threads=0).serve(word, [its.detach()]) == 0
        assert ours.recv(64) == forks.REFUSED
        assert ours.recv(64) == b"", "and keeps nothing of it"
