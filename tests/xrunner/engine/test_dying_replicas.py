"""Replicas whose engines die at any step, while they load, or when they are asked: every request is
answered once, by whoever is left."""

import pytest
from dying_replicas import MortalJob

from xrunner.engine.head import PoolLink

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


class _Loading:
    """A head with one request, whose engine is loaded by the time of look `ready`."""

    def __init__(self, ready: int) -> None:
        self.ready, self.looks = ready, 0
        self.executor = self.requests = self.sink = self
        self.has_work, self.heartbeat = True, None

    @property
    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks > self.ready

    def next_group(self) -> int | None:
        return 0 if self.is_ready else None

    def should_stop(self) -> bool:
        return False

    def report(self) -> None:
        pass


@pytest.mark.parametrize("ready", range(6))
def test_a_head_whose_engine_is_loaded_between_two_looks_still_works_its_last_request(ready):
    assert PoolLink().next_group(_Loading(ready)) == 0
