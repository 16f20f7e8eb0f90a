"""A rank that was started ahead takes what it is told, another program's part before its run."""

from __future__ import annotations

import socket
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
from xgpt.launch.standby import Standby  # noqa: E402
from xrunner import standby  # noqa: E402


@pytest.mark.parametrize("is_wanted", [True, False])
def test_another_programs_part_is_taken_before_the_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    (tmp_path / "other_part.py").write_text(
        "from pathlib import Path\n\n\ndef main(arguments):\n"
        "    Path(arguments[0]).write_text('taken')\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ran: list[list[str]] = []
    monkeypatch.setattr(standby.worker, "main", lambda words, shelf: ran.append(words) or 7)
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


@pytest.mark.skipif(sys.platform != "linux", reason="words are kept apart on Linux alone")
def test_it_reads_ahead_and_the_run_gets_the_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(standby.ahead, "read", lambda word, shelf: told.append((word, shelf)))
    monkeypatch.setattr(standby.worker, "main", lambda words, shelf: told.append(
        (*words, shelf)) or 0)
    waiting = Standby.__new__(Standby)
    waiting._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting._is_free, waiting._started = True, SimpleNamespace(  # type: ignore[assignment]
        process=SimpleNamespace(poll=lambda: None))
    with waiting._line, its:
        waiting.read_ahead("{}")
        waiting.read_ahead("x" * 2**16)  # of more files than are worth a word
        assert waiting.serve(Path("run.json"), ()) is not None, "both words before it listens"
        monkeypatch.setattr(standby.sys, "stdin", SimpleNamespace(fileno=its.fileno))
        assert standby.main([]) == 0
    (word, shelf), (argument, same) = told  # type: ignore[misc]
    assert (word, argument) == ("{}", "run.json") and shelf is same


class Knot:
    """Known to itself alone, as the parts of a run are in the end."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_run_held_is_gone_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Knot]] = []
    left: list[int] = []

    def run(*given: object) -> int:
        left.append(sum(knot() is not None for knot in held))
        held.append(weakref.ref(Knot()))
        return 0

    world = SimpleNamespace(comm=SimpleNamespace(rank=0), close=lambda: None)
    for name, stand_in in (("load_plan", lambda path: SimpleNamespace(device_kind="cpu")),
                           ("connect", lambda kind: world), ("_ranks", lambda: None),
                           ("to_the_end", run)):
        monkeypatch.setattr(standby, name, stand_in)
    ours, its = socket.socketpair()
    with ours:
        rank = threading.Thread(target=lambda: standby.main([str(its.detach())]))
        rank.start()
        for _ in range(3):
            ours.sendall(b"run.json")
            assert ours.recv(1) == standby.DONE
        ours.shutdown(socket.SHUT_WR)
        rank.join(20)
    assert left == [0, 0, 0]
