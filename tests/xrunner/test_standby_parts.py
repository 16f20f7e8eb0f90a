"""A rank that was started ahead takes what it is told, another program's part before its run."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
from xrunner import standby  # noqa: E402


@pytest.mark.parametrize("is_wanted", [True, False])
def test_another_programs_part_is_taken_before_the_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    (tmp_path / "other_part.py").write_text(
        "from pathlib import Path\n\n\ndef main(arguments):\n"
        "    Path(arguments[0]).write_text('taken')\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ran: list[list[str]] = []
    monkeypatch.setattr(standby.worker, "main", lambda words: ran.append(words) or 7)
    codes = []
    ours, its = socket.socketpair()
    with ours, its:
        monkeypatch.setattr(standby.sys, "stdin", SimpleNamespace(fileno=its.fileno))
        rank = threading.Thread(target=lambda: codes.append(standby.main([])))
        rank.start()
        ours.sendall(f"other_part\0{tmp_path / 'said'}".encode())
        assert ours.recv(1) == standby.DONE
        assert (tmp_path / "said").read_text() == "taken" and not ran
        if is_wanted:
            ours.sendall(b"run.json")
        else:
            ours.shutdown(socket.SHUT_WR)
        rank.join(20)
    assert (codes, ran) == (([7], [["run.json"]]) if is_wanted else ([0], []))


def test_it_ends_with_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_part.py").write_text("def main(arguments):\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours, its = socket.socketpair()
    with ours, its:
        monkeypatch.setattr(standby.sys, "stdin", SimpleNamespace(fileno=its.fileno))
        ours.sendall(b"failing_part\0request.json")
        assert standby.main([]) == 3
