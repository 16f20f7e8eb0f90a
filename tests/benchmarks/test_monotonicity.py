"""Shares of points that are not monotone: on arrays where they are planted, and a quick slice of
the paper's Table 5."""

from __future__ import annotations

import monotonicity as benchmark
import numpy as np
import paper_scenarios
import pytest
from monotone import Count, count, shortfalls, worst
from paper_scenarios import Scenario

RISING = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
DIP = np.array([1.0, 5.0, 3.0, 4.0, 6.0])  # one step down, two points below the largest before


def test_a_rising_line_has_none_and_a_falling_line_all_but_its_first():
    assert count(RISING, 0, 0.0) == Count(not_monotone=0, points=5)
    assert count(RISING[::-1], 0, 0.0) == Count(not_monotone=4, points=5)


def test_the_two_readings_of_a_dip():
    assert count(DIP, 0, 0.0, "extreme").not_monotone == 2
    assert count(DIP, 0, 0.0, "neighbour").not_monotone == 1
    assert shortfalls(DIP, 0).tolist() == [0, 0, 2, 1, 0]
    assert shortfalls(DIP, 0, "neighbour").tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize(("tolerance", "expected"), [(0.99, 2), (1.0, 1), (1.99, 1), (2.0, 0)])
def test_the_tolerance_is_an_amount_that_may_be_reached(tolerance, expected):
    assert count(DIP, 0, tolerance).not_monotone == expected


def test_gaps_are_no_points_and_are_stepped_over():
    values = np.array([np.nan, 3.0, np.nan, 2.0, 4.0])
    for reading in ("extreme", "neighbour"):
        assert count(values, 0, 0.0, reading) == Count(not_monotone=1, points=3)
    assert np.isnan(shortfalls(values, 0)).tolist() == [True, False, True, False, False]
    assert count(np.full(3, np.nan), 0, 0.0).share == 0.0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_axis_is_the_one_that_is_swept(axis):
    values = np.moveaxis(np.broadcast_to(DIP, (3, 4, 5)), -1, axis)
    assert count(values, axis, 0.0) == Count(not_monotone=24, points=60)
    for other in {0, 1, 2} - {axis}:
        assert count(values, other, 0.0).not_monotone == 0


def test_the_neighbour_reading_never_counts_more():
    rng = np.random.default_rng(0)
    values = np.cumsum(rng.normal(0.2, 1, (200, 30)), axis=1)
    values[rng.random(values.shape) < 0.2] = np.nan
    for tolerance in (0.0, 0.5, 2.0):
        one, other = (count(values, 1, tolerance, r) for r in ("neighbour", "extreme"))
        assert one.points == other.points and 0 < one.not_monotone < other.not_monotone


def test_the_worst_is_a_share_of_the_value_it_falls_below():
    assert worst(DIP, 0) == pytest.approx(0.4)
    assert worst(RISING, 0) == 0.0


@pytest.fixture(scope="module")
def sweeps():
    scenario = Scenario(model="opt-13b", cluster="a40-4", task="S", has_peer_access=True)
    return benchmark.sweeps_of(scenario.problem(), scenario.timing()), paper_scenarios.bounds_of(
        scenario.problem(), scenario.timing())[2]


def test_sweeps_hold_the_points_that_fit_and_no_more_groups_than_stages(sweeps):
    found, _ = sweeps
    assert {s.policy for s in found} == {"RRA", "WAA"} and len(found) == 3 * 3
    for sweep in found:
        is_point = ~np.isnan(sweep.latency_s)
        assert is_point.any() and not is_point.all()
        assert (np.isnan(sweep.throughput_qps) == ~is_point).all()
        if sweep.policy == "WAA":
            assert (sweep.division[is_point] > 0).all()
            groups = np.arange(4, 0, -1)[None, :, None]  # of at most 4 - division stages
            assert (groups + sweep.division <= 4)[is_point].all()


def test_batches_are_monotone_where_the_division_of_devices_is_one(sweeps):
    found, bound_s = sweeps
    names = [f"{policy} {name}" for policy, name in benchmark.VARIABLES]
    row = dict(zip(names, benchmark.cells(found, bound_s, 0.05, is_divided=True), strict=True))
    for name in ("RRA B_E", "RRA N_D", "WAA B_E"):
        for one in row[name]:
            assert one.points > 100 and one.share <= 0.005, name
    anyway = dict(zip(names, benchmark.cells(found, bound_s, 0.02), strict=True))["WAA B_E"]
    assert anyway.throughput.share > 0.005  # another division of the devices is a step down
