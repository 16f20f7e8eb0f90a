"""Replicas whose engines die at any step, while they load, or when they are asked: every request is
answered once, by whoever is left."""

import pytest
from dying_replicas import MortalJob

EACH = 20  # seeds of a test


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("xrunner.engine.head.LOOK_S", 0.002)
    monkeypatch.setattr("xrunner.engine.replicas._REPORT_S", 0.0)


@pytest.mark.parametrize("first", [
    *range(0, 200, EACH), *(pytest.param(first, marks=pytest.mark.slow)
                            for first in range(200, 2000, EACH))])
def test_every_request_is_answered_once(tmp_path, first):
    for seed in range(first, first + EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        MortalJob(folder=folder, seed=seed).run()
