"""Figures of a service from times of its requests."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.constraint import Bound, Constraint
from xgpt.core.problem import QueryTimes
from xgpt.core.served import MetricFigures, ReplicaFigures
from xsimulator.replay.service import (
    attainment,
    binding,
    counted,
    metric_figures,
    seconds_by_metric,
    used_of_limits,
)

SECONDS = st.floats(0.0, 10.0)


def limited(share=None, **limits):
    return Constraint(attainment=share, bounds=(Bound(limit_s=math.inf), *(
        Bound(metric=metric, limit_s=limit_s, kind="queries", quantile=0.9)
        for metric, limit_s in limits.items())))


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.integers(1, 9)), min_size=1),
       st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.05, 0.95))
def test_the_joint_attainment_is_at_most_that_of_each_limit(rows, ttft_s, tpot_s, share):
    waits, firsts, lasts, tokens = (np.array(column) for column in zip(*rows, strict=True))
    seconds = seconds_by_metric(QueryTimes(
        arrival_s=np.zeros(len(rows)), start_s=waits, first_token_s=waits + firsts,
        last_token_s=waits + firsts + lasts), tokens)
    both = limited(share, ttft=ttft_s, tpot=tpot_s)
    joint = attainment(seconds, both)
    assert joint <= min(attainment(seconds, limited(ttft=ttft_s)),
                        attainment(seconds, limited(tpot=tpot_s))) + 1e-12
    assert used_of_limits(seconds, both).share >= max(
        used_of_limits(seconds, limited(share, ttft=ttft_s)).share,
        used_of_limits(seconds, limited(share, tpot=tpot_s)).share) - 1e-12
    longer = {name: 3.0 * every for name, every in seconds.items()}
    assert used_of_limits(longer, both).share == pytest.approx(
        used_of_limits(seconds, both, faster=3.0).share)


def test_times_count_from_the_arrival_and_single_tokens_have_no_time_per_token():
    times = QueryTimes(arrival_s=np.array([1.0, 2.0]), start_s=np.array([1.5, 4.0]),
                       first_token_s=np.array([2.0, 5.0]), last_token_s=np.array([4.0, 5.0]))
    seconds = seconds_by_metric(times, np.array([5, 1]))
    assert {name: own.tolist() for name, own in seconds.items() if name != "tpot"} == {
        "queueing": [0.5, 2.0], "ttft": [1.0, 3.0], "latency": [3.0, 3.0],
        "latency_per_token": [0.6, 3.0]}
    assert seconds["tpot"][0] == 0.5 and math.isnan(seconds["tpot"][1])
    found = {one.metric: one for one in metric_figures(seconds, limited(ttft=2.0, tpot=1.0))}
    assert (found["ttft"].share, found["ttft"].mean_s, found["tpot"].share) == (0.5, 2.0, 1.0)
    assert attainment(seconds, limited()) is None
    assert counted(np.arange(20.0)[::-1]).tolist() == list(range(17, 1, -1))


@pytest.mark.parametrize(("part", "changes"), [
    ("queueing", {"queue": 4.5}), ("queueing", {"ttft": 1.2}), ("batch slots", {"batch": 31}),
    ("memory", {"memory": 0.8}), ("slow model", {"p25": 0.08}), ("bubbles", {"busy": 0.5}),
    ("nothing", {})])
def test_the_part_that_binds(part, changes):
    own = {"queue": 1.0, "batch": 16, "memory": 0.5, "p25": 0.05, "busy": 0.8,
           "ttft": None} | changes
    same = {"mean_s": 0.1, "p50_s": 0.1, "p90_s": 0.1, "p95_s": 0.1}
    metrics = (MetricFigures(metric="queueing", p99_s=own["queue"], **same),
               MetricFigures(metric="ttft", p99_s=1.0, limit_s=own["ttft"], **same),
               MetricFigures(metric="tpot", p99_s=0.1, limit_s=0.1, share=0.99, **same))
    replica = ReplicaFigures(
        requests=9, steps=9, batch=9.0, batch_p75=own["batch"], tokens=9.0, busy=own["busy"],
        memory=own["memory"], mfu=0.1, preemptions=0)
    assert binding(metrics, (replica,), own["p25"], 32) == part
