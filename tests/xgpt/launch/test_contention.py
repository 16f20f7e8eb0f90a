"""What others used of the cores: counted from the kernel's own figures, not from ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xgpt.launch import contention
from xgpt.launch.contention import NOTICEABLE_SHARE, Contention, in_words


def write_stat(path: Path, busy_ticks: int) -> None:
    path.write_text(f"cpu {busy_ticks} 0 0 123456 7 0 0 0 0 0\ncpu0 1 2 3\n")


def test_what_is_neither_idle_nor_ours_is_others(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, ticks, cores = tmp_path / "stat", os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    clock, own = iter([100.0, 110.0]), iter([5.0, 5.0 + 4.0])
    monkeypatch.setattr(contention.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(contention, "_own_s", lambda: next(own))
    write_stat(stat, 1000 * ticks)
    meter = Contention(stat)
    write_stat(stat, 1010 * ticks)  # ten busy seconds, four of them ours, in ten seconds
    assert meter.others_share() == pytest.approx(6 / 10 / cores)


def test_never_less_than_nothing_and_unknown_where_the_system_is_silent(tmp_path: Path) -> None:
    assert Contention(tmp_path / "none").others_share() is None
    (tmp_path / "odd").write_text("cpu x y\n")
    assert Contention(tmp_path / "odd").others_share() is None
    write_stat(tmp_path / "still", 50)
    meter = Contention(tmp_path / "still")
    sum(range(200_000))
    assert meter.others_share() == 0


def test_a_quiet_machine_is_not_worth_a_word() -> None:
    assert in_words(None) is None and in_words(NOTICEABLE_SHARE * 0.9) is None
    assert "40%" in (in_words(0.4) or "") and "mean little" in (in_words(0.4) or "")
    some = in_words(0.2) or ""
    assert "20% of the cores" in some and "25% longer" in some and "mean little" not in some
