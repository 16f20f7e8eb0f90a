"""Schedules under changed output lengths: the rows, the unchanged schedule, and the searched
ones."""

import math

import pytest
from problems import estimate_of, roofline_of, toy_problem

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xscheduler import drift
from xscheduler.drift import DriftRow, changed_lengths, drift_rows

OUTPUTS = (20, 8, 48)


def job(latency_s: float = math.inf) -> Problem:
    return toy_problem(latency_s=latency_s, outputs=OUTPUTS)


def chosen(problem: Problem) -> Estimate:
    return estimate_of(problem, encode_batch=6, decode_iterations=8)


def rows_of(problem: Problem, search=chosen) -> dict[tuple[str, float], DriftRow]:
    rows = drift_rows(problem, roofline_of(problem), chosen(problem), search=search,
                      least_queries=600)
    return {(row.statistic, row.change): row for row in rows}


@pytest.fixture(scope="module", autouse=True)
def few_changes():
    """Three values of each statistic, fitted once."""
    real, known = drift.changed_lengths, {}
    usual = drift.FACTORS, drift.SKEWNESS_CHANGES
    drift.FACTORS, drift.SKEWNESS_CHANGES = (0.7, 1.0, 1.3), (-0.4, 0.0, 0.4)

    def once(lengths: JointLengths):
        key = (lengths.outputs.mean, lengths.outputs.max)
        if key not in known:
            known[key] = real(lengths)
        return [(name, change, lengths if change == (name != "skewness") else changed)
                for name, change, changed in known[key]]

    drift.changed_lengths = once
    yield
    drift.changed_lengths = real
    drift.FACTORS, drift.SKEWNESS_CHANGES = usual


@pytest.fixture(scope="module")
def rows():
    return rows_of(job())


def test_one_statistic_changes_at_a_time():
    lengths = job().lengths
    usual = lengths.outputs
    for statistic, change, changed in changed_lengths(lengths):
        got = changed.outputs
        factors = {"mean": 1.0, "std": 1.0, "skewness": 0.0} | {statistic: change}
        assert got.mean == pytest.approx(usual.mean * factors["mean"], rel=0.01)
        assert got.std == pytest.approx(usual.std * factors["std"], rel=0.02)
        assert got.skewness == pytest.approx(usual.skewness + factors["skewness"], abs=0.03)
        assert changed.inputs is lengths.inputs


def test_every_change_has_a_row_and_the_unchanged_distribution_is_the_measure(rows):
    assert set(rows) == ({(name, f) for name in ("mean", "std") for f in drift.FACTORS}
                         | {("skewness", c) for c in drift.SKEWNESS_CHANGES})
    for statistic, change in (("mean", 1.0), ("std", 1.0), ("skewness", 0.0)):
        row = rows[statistic, change]
        assert row.queries_ratio == row.sequence_ratio == 1
        assert row.kept.throughput_qps == row.best.throughput_qps


def test_longer_outputs_cost_throughput_and_latency(rows):
    means = [rows["mean", factor] for factor in drift.FACTORS]
    rates = [row.kept.throughput_qps for row in means]
    assert rates == sorted(rates, reverse=True) and rates[0] > 1.02 * rates[-1]
    ratios = [row.queries_ratio for row in means]
    assert ratios == sorted(ratios) and ratios[-1] > 1.1
    # a request of the same length waits for fuller batches alone, not for its own tokens
    assert rows["mean", 1.3].sequence_ratio < rows["mean", 1.3].queries_ratio


def test_each_change_is_searched_once_under_the_same_bound():
    searched: list[Problem] = []

    def other(problem: Problem) -> Estimate:
        searched.append(problem)
        return chosen(problem)

    rows_of(job(), other)
    assert len(searched) == 7  # the unchanged distribution once
    assert len({p.lengths.outputs.mean for p in searched}) >= 3
    assert all(p.constraint == job().constraint for p in searched)


def test_bounds_that_hold_and_bounds_that_break(rows):
    usual = rows["mean", 1.0].kept
    bound_s = 1.05 * usual.queries_s
    found = rows_of(job(bound_s))
    assert found["mean", 1.0].keeps_queries and found["mean", 0.7].keeps_queries
    assert not found["mean", 1.3].keeps_queries
    for row in found.values():
        expected = row.kept.sequence_s
        assert row.keeps_sequence is (None if math.isnan(expected)
                                      else expected <= bound_s * (1 + drift.TOLERANCE))


def test_without_a_schedule_that_keeps_the_bound_there_is_no_best():
    def refusing(problem: Problem) -> Estimate:
        if problem.lengths.outputs.mean > 1.05 * job().lengths.outputs.mean:
            raise InfeasibleError("none")
        return chosen(problem)

    found = rows_of(job(), refusing)
    assert found["mean", 1.3].best is None
    assert found["mean", 0.7].best is not None


def test_waa_is_replayed_too():
    problem = job()
    estimate = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    found = drift_rows(problem, roofline_of(problem), estimate, search=lambda _: estimate,
                       least_queries=1000)
    assert len(found) == 9
    assert found[2].queries_ratio > 1.05 and found[0].queries_ratio < 0.95
