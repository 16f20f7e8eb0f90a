"""`xgpt report` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_run import write_fake_sweep
from job_folder import xgpt

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")


def test_several_forms_are_written_at_once_each_file_told_once(tmp_path: Path) -> None:
    folder = write_fake_sweep(tmp_path / "out")
    done = xgpt("report", str(folder), "--format", "html, md,html", "--json")
    files = json.loads(done.stdout)["files"]
    assert files[:2] == [str(folder / "report.html"), str(folder / "report.md")]
    assert len(files) == len(set(files))


def test_an_unknown_form_and_one_file_for_several_are_refused(tmp_path: Path) -> None:
    folder = str(write_fake_sweep(tmp_path / "out"))
    assert "html, md, png" in xgpt("report", folder, "--format", "xls").stderr
    done = xgpt("report", folder, "--format", "html,md", "--out", str(tmp_path / "one"))
    assert done.returncode == 2 and "--out" in done.stderr
