"""What is told of this machine before anything is measured on it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from xgpt.app import profile_identity
from xgpt.app.opened import open_file


@pytest.mark.parametrize(("cluster", "is_compiled"), [("local", True), ("a40-4", False)])
def test_operators_are_compiled_beside_the_beginning_of_a_run_on_this_machine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, is_compiled: bool) -> None:
    called = threading.Event()
    monkeypatch.setattr(profile_identity, "why_no_operators", called.set)
    path = tmp_path / "job.yaml"
    path.write_text(f"model: opt-125m\ncluster: {cluster}\nworkload: {{task: S}}\n"
                    "constraint: {latency_s: 9}\n", encoding="utf-8")
    profile_identity.begin_compiling(open_file(path).job)
    assert called.wait(5.0 if is_compiled else 0.05) == is_compiled
