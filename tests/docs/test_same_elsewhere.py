"""The tutorial's table on machines that compute otherwise: whose sums differ in the last digits, or
that have no compiler. Schedules are as good everywhere."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Shaken

import xgpt
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.planner import Planner
from xsimulator.native import native

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BOUNDS_S = {"4.00 s": 4.0, "8.00 s": 8.0, "none": np.inf}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    text = TUTORIAL.read_text(encoding="utf-8")
    (own,) = re.findall(r"Save this as `elsewhere.yaml`:\n\n```yaml\n(.*?)```", text, re.S)
    file = tmp_path_factory.mktemp("tutorial") / "elsewhere.yaml"
    file.write_text(own, encoding="utf-8")
    return xgpt.load(file)


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setenv("XGPT_NATIVE", "off")
    native.cache_clear()
    yield
    native.cache_clear()


def planned(job: Any, seed: int | None = None) -> list[Estimate]:
    """Under each bound of the table."""
    problem = job.problem
    timing: TimingSource = Roofline(problem.model, problem.cluster.device, problem.dtype)
    planner = Planner(problem, timing if seed is None else Shaken(timing, seed))
    return [planner.plan(bound_s).estimate for bound_s in BOUNDS_S.values()]


def check(found: list[Estimate]) -> None:
    """The policies and throughputs are those of the page."""
    text = TUTORIAL.read_text(encoding="utf-8")
    rows = re.findall(r"^    (4.00 s|8.00 s|none) +([\d.]+) (\S+)  ", text, re.M)
    assert [row[0] for row in rows] == [*BOUNDS_S]
    for own, (_, qps, name) in zip(found, rows, strict=True):
        assert policy(own.policy).title == name
        assert own.figures.throughput_qps == pytest.approx(float(qps), rel=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_where_times_differ_in_the_last_digits(job, seed):
    check(planned(job, seed))


def test_where_nothing_is_compiled(job, no_library):
    check(planned(job))
    assert native() is None
