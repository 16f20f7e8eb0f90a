"""The check of committed errors: what is worse, or new, fails; without measurements it passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import validated


def test_a_group_that_is_worse_by_more_than_a_tenth_is_named_with_both_errors() -> None:
    committed = {"a": 0.10, "b": 0.10, "gone": 0.01}
    assert validated.worse({"a": 0.1099, "b": 0.05}, committed) == []
    (said,) = validated.worse({"a": 0.112, "b": 0.10}, committed)
    assert said == "a: 11.2% off, 10.0% on the committed page"
    assert validated.worse({"c": 0.01}, committed) == ["c: not on the committed page"]


def test_where_there_are_no_measurements_it_says_so_and_passes(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated.check(tmp_path / "none", tmp_path / "none.json") == 0
    assert "NOT COMPARED" in capsys.readouterr().out
