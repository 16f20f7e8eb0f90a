"""What is silent for long is told of."""

from __future__ import annotations

import time

import pytest

from xgpt.app import telling
from xgpt.app.telling import LogTeller, told_while


class Listener(LogTeller):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ends = 0

    def progress(self, line: str, *, is_last: bool = False) -> None:
        self.lines.append(line)

    def end_progress(self) -> None:
        self.ends += 1


def test_what_is_quick_says_nothing() -> None:
    listener = Listener()
    with told_while(listener, "searching"):
        pass
    assert (listener.lines, listener.ends) == ([], 0)


def test_what_takes_longer_is_told_of_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "SILENT_S", 0.01)
    monkeypatch.setattr(telling, "_STILL_S", 0.01)
    listener = Listener()
    with pytest.raises(ValueError, match="as it ends"), told_while(listener, "searching"):
        end_s = time.monotonic() + 20
        while len(listener.lines) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        raise ValueError("as it ends")
    told = len(listener.lines)
    assert told >= 2 and all(line.startswith("searching, ") for line in listener.lines)
    assert listener.ends == 1
    time.sleep(0.05)
    assert len(listener.lines) == told, "nothing is said once it has ended"
