"""What may be chosen: each limit by itself, in which order they are named, and who is not asked."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from xprofiler.interpolation import REFUSED_BEYOND
from xscheduler.admissible import (
    SLACK,
    Limit,
    Limits,
    admissible,
    breaches,
    crowding,
    crowding_or_pace,
    forbidding,
)

GOOD = {"fits": True, "present": 8.0, "stretch": 1.0, "throughput_qps": 3.0, "latency_s": 2.0,
        "ttft_s": 0.5, "tpot_s": 0.1}
ALL = Limits(queries=8, latency_s=2.0, ttft_s=0.5, tpot_s=0.1, stretch=REFUSED_BEYOND,
             is_timed=True)


def figures(*rows: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**{name: np.array([(GOOD | row)[name] for row in rows])
                              for name in GOOD})


@pytest.mark.parametrize(("row", "limit"), [
    ({}, Limit.NONE), ({"present": 8 + SLACK / 2}, Limit.NONE),
    ({"fits": False, "present": 99.0}, Limit.MEMORY),
    ({"present": 8.1, "latency_s": 9.0}, Limit.QUERIES),
    ({"stretch": REFUSED_BEYOND * 1.01}, Limit.RANGE),
    ({"throughput_qps": 0.0, "latency_s": math.inf}, Limit.RANGE),
    ({"throughput_qps": math.nan}, Limit.RANGE),
    ({"latency_s": 2.0 + 1e-12}, Limit.LATENCY), ({"latency_s": math.nan}, Limit.LATENCY),
    ({"ttft_s": 0.51, "tpot_s": 9.0}, Limit.TTFT), ({"tpot_s": math.nan}, Limit.TPOT)])
def test_the_first_limit_that_is_broken_is_named(row: dict[str, object], limit: Limit) -> None:
    assert forbidding(figures(row), ALL).tolist() == [limit]
    assert admissible(figures(row), ALL).tolist() == [limit is Limit.NONE]


def test_what_is_not_asked_forbids_nothing() -> None:
    rows = figures({"present": 1e9}, {"stretch": 1e9}, {"latency_s": math.inf},
                   {"throughput_qps": 0.0}, {"fits": False})
    assert admissible(rows, Limits()).tolist() == [True] * 4 + [False]


def test_every_broken_limit_can_be_told() -> None:
    broken = breaches(figures({"fits": False, "latency_s": 3.0}), ALL)
    assert [limit for limit, rows in broken.items() if rows[0]] == [Limit.MEMORY, Limit.LATENCY]


def test_the_pace_counts_where_nothing_is_crowded() -> None:
    rows = figures({}, {"fits": False, "ttft_s": 9.0}, {"ttft_s": 9.0}, {"tpot_s": 9.0})
    assert crowding_or_pace(rows, ALL).tolist() == [
        Limit.NONE, Limit.MEMORY, Limit.TTFT, Limit.TPOT]


def test_crowding_is_the_same_without_times() -> None:
    rows = figures({}, {"fits": False}, {"present": 9.0}, {"stretch": 5.0}, {"latency_s": 9.0})
    found = crowding(rows.fits, rows.present, rows.stretch, 8)
    limits = Limits(queries=8, stretch=REFUSED_BEYOND)
    assert found.tolist() == forbidding(rows, limits).tolist() == [
        Limit.NONE, Limit.MEMORY, Limit.QUERIES, Limit.RANGE, Limit.NONE]
