"""A rank that waits takes what it is told: runs, and other programs' parts."""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import DONE, READY
from xrunner.rank import standby

RUN = b"xrunner.rank.worker\0run.json"


class Knot:
    """Known to itself alone, as the parts of a run are in the end."""

    def __init__(self) -> None:
        self.own = self


@contextmanager
def waiting(codes: list[int]) -> Iterator[socket.socket]:
    """The launcher's end of a rank that waits, whose exit code comes in the end."""
    ours, its = socket.socketpair()
    ours.settimeout(20)
    with ours:
        rank = threading.Thread(target=lambda: codes.append(standby.main([str(its.detach())])))
        rank.start()
        assert ours.recv(1) == READY
        yield ours
        ours.shutdown(socket.SHUT_WR)
        rank.join(20)


@pytest.fixture
def alone(monkeypatch):
    """Puts other things in the places of a rank's parts."""
    def put(**parts: object) -> None:
        given = {"load_plan": lambda path: SimpleNamespace(device_kind="cpu", private=False),
                 "_ranks": lambda: None, **parts}
        for name, part in given.items():
            monkeypatch.setattr(standby, name, part)

    return put


def test_parts_are_taken_one_after_another_until_one_fails(tmp_path, monkeypatch, alone):
    (tmp_path / "other_part.py").write_text(
        "from pathlib import Path\n\n\ndef main(arguments):\n"
        "    path = Path(arguments[0])\n    code = int(path.read_text())\n"
        "    path.write_text('taken')\n    return code\n")
    monkeypatch.syspath_prepend(tmp_path)
    alone()
    codes: list[int] = []
    with waiting(codes) as line:
        for code in (0, 3):
            (tmp_path / "said").write_text(str(code))
            line.sendall(f"other_part\0{tmp_path / 'said'}".encode())
            assert line.recv(1) == (DONE if code == 0 else b"")
            assert (tmp_path / "said").read_text() == "taken"
    assert codes == [3]


def test_what_a_run_held_is_gone_when_the_next_begins_and_its_world_is_not(alone):
    held: list[weakref.ref[Knot]] = []
    left: list[int] = []
    calls: list[str] = []

    class World:
        def _replace(self, close: Callable[[], None]) -> SimpleNamespace:
            return SimpleNamespace(close=close)

        def close(self) -> None:
            calls.append("closed")

    def run(plan: object, join: Callable[[], SimpleNamespace], work: object) -> int:
        join().close()
        left.append(sum(knot() is not None for knot in held))
        held.append(weakref.ref(Knot()))
        return 0

    alone(connect=lambda kind: calls.append("connected") or World(), to_the_end=run)
    codes: list[int] = []
    with waiting(codes) as line:
        for _ in range(3):
            line.sendall(RUN)
            assert line.recv(1) == DONE
        assert calls == ["connected"]
    assert (codes, left, calls) == ([0], [0, 0, 0], ["connected", "closed"])


def test_a_device_that_is_not_there_is_told_in_words(alone, capsys):
    def connect(kind: str) -> None:
        raise XgptError("no such device")

    alone(connect=connect)
    codes: list[int] = []
    with waiting(codes) as line:
        line.sendall(RUN)
        assert line.recv(1) == b""
    assert codes == [1] and "no such device" in capsys.readouterr().err
