"""What `xgpt submit` does not import before a rank is started: the two import side by side."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from xgpt.cli import run
from xgpt.run_folder import files as run_files


@pytest.mark.parametrize(("has_metrics", "is_again", "asked"), [
    (False, False, False), (True, False, True), (False, True, True)])
def test_whether_a_job_is_done_is_asked_where_it_may_be(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_metrics: bool, is_again: bool,
        asked: bool) -> None:
    assert run.METRICS == run_files.METRICS_FILE
    if has_metrics:
        (tmp_path / run.METRICS).touch()
    imported: list[str] = []
    finished = SimpleNamespace(done_already=lambda *_, **__: {"status": "already done"})
    monkeypatch.setattr(run, "import_module", lambda name: imported.append(name) or finished)
    found = run._done_already(SimpleNamespace(output=tmp_path), is_again=is_again)
    assert (found is not None, imported) == (asked, ["xgpt.app.running.finished"] * asked)
