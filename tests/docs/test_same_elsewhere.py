"""The tutorial's table on machines that compute otherwise: whose sums differ in the last digits, or
that have no compiler. Schedules are as good everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

import xgpt
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, TimingSource
from xscheduler.planner import Planner
from xsimulator.native import native

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BOUNDS_S = {"4.00 s": 4.0, "8.00 s": 8.0, "none": np.inf}


class Shaken:
    """`source`, each of its times in the last digits another."""

    def __init__(self, source: TimingSource, seed: int) -> None:
        self.source, self._seed = source, np.uint64(0x9E3779B97F4A7C15 * (2 * seed + 1) % 2**64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.operator_s(operator, x, y, tp_degree=tp_degree))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Any, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree))

    def _shaken(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """By 1 +- 1e-12, by chance, but the same time always by the same."""
        flat = np.ascontiguousarray(np.asarray(seconds, float)).reshape(-1)
        mixed = (flat.view(np.uint64) ^ self._seed) * np.uint64(0xBF58476D1CE4E5B9)
        share = (mixed >> np.uint64(40)).astype(float) / 2**23 - 1
        return (flat * (1 + 1e-12 * share)).reshape(np.shape(seconds))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> xgpt.OpenedJob:
    text = TUTORIAL.read_text(encoding="utf-8")
    (own,) = re.findall(r"Save this as `elsewhere.yaml`:\n\n```yaml\n(.*?)```", text, re.S)
    file = tmp_path_factory.mktemp("tutorial") / "elsewhere.yaml"
    file.write_text(own, encoding="utf-8")
    return xgpt.load(file)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XGPT_NATIVE", "off")
    native.cache_clear()
    yield
    native.cache_clear()


def planned(job: xgpt.OpenedJob, seed: int | None = None) -> list[Estimate]:
    """Under each bound of the table."""
    problem = job.problem
    timing: TimingSource = Roofline(problem.model, problem.cluster.device, problem.dtype)
    planner = Planner(problem, timing if seed is None else Shaken(timing, seed))
    return [planner.plan(bound_s).estimate for bound_s in BOUNDS_S.values()]


def check(found: list[Estimate]) -> None:
    """The throughputs are those of the page."""
    text = TUTORIAL.read_text(encoding="utf-8")
    rows = re.findall(r"^    (4.00 s|8.00 s|none) +\S+ +\d+ +([\d.]+)  ", text, re.M)
    assert [row[0] for row in rows] == [*BOUNDS_S]
    for own, (_, qps) in zip(found, rows, strict=True):
        assert own.figures.throughput_qps == pytest.approx(float(qps), rel=0.03)


@pytest.mark.parametrize("seed", range(2))
def test_where_times_differ_in_the_last_digits(job: xgpt.OpenedJob, seed: int) -> None:
    check(planned(job, seed))


def test_where_nothing_is_compiled(job: xgpt.OpenedJob, no_library: None) -> None:
    check(planned(job))
    assert native() is None
