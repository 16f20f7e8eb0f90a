"""A prediction takes queries in the order in which the run takes them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from taken_as_true import TakenAsTrue

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import Adjustment, FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xrunner.rules.order import run_order
from xscheduler import evaluator
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("shuffle", [False, 40])
def test_a_prediction_has_the_runs_order(monkeypatch: pytest.MonkeyPatch, shuffle: int,
                                         forced: bool) -> None:
    joint = catalog.task("S")
    problem = Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), lengths=joint,
        dtype="float16", num_queries=200, fixed=FixedSchedule(), default_max_tokens=80,
        constraint=latency_constraint(latency_s=math.inf), adjustment=Adjustment(shuffle=shuffle))
    timing = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
    inputs = np.arange(1, 201)
    inputs[17] = 10**6  # cannot run, and so has no place in the order
    most = np.arange(200) % 7 + 1 if forced else np.full(200, 80)
    problem = replace(problem, seed=5, queries=QueryLengths(
        inputs=inputs, most_outputs=most, outputs=most if forced else None))
    estimate = Rra(problem, timing).estimate(RraConfig(encode_batch=9, decode_iterations=8))
    taken: dict[str, Any] = {}
    monkeypatch.setattr(evaluator, "job_replays",
                        lambda *args, **kwargs: taken.update(kwargs) or iter(()))
    evaluator.replays_of(problem, timing, estimate)
    usable = np.delete(inputs, 17)
    order = run_order(199, shuffle or 1, 5)
    assert taken["known"].inputs.tolist() == usable[order].tolist()
    assert (order == sorted(order)) == (not shuffle)
    outputs = np.delete(np.arange(200) % 7 + 1, 17)[order].tolist()
    assert (taken["known"].outputs is None if not forced
            else taken["known"].outputs.tolist() == outputs)


@pytest.mark.parametrize("forced", [False, True])
def test_of_many_queries_some_stand_for_all(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    joint = catalog.task("S")
    problem = Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), lengths=joint,
        dtype="float16", num_queries=6000, fixed=FixedSchedule(), default_max_tokens=80,
        constraint=latency_constraint(latency_s=math.inf), adjustment=Adjustment())
    timing = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
    inputs, outputs = joint.sample(6000, np.random.default_rng(3))
    inputs = np.sort(inputs)  # the first ones are not like all
    problem = replace(problem, queries=QueryLengths(
        inputs=inputs, most_outputs=outputs, outputs=outputs if forced else None))
    estimate = Rra(problem, timing).estimate(RraConfig(encode_batch=9, decode_iterations=8))
    whole = evaluator.predict(problem, timing, estimate, replays=1)
    monkeypatch.setattr(evaluator, "MOST_PREDICTED", 1500)
    replayed = evaluator.replays_of(problem, timing, estimate, replays=1)
    assert replayed is not None and (replayed.num_queries, replayed.is_whole) == (6000, False)
    assert [len(result.times.arrival_s) for result in replayed.results] == [1500]
    some = evaluator.predict(problem, timing, estimate, replays=1)
    assert whole is not None and some is not None
    for name in ("wall_s", "throughput_qps", "output_tokens_per_s", "latency_p50_s",
                 "latency_p99_s", "ttft_p50_s", "ttft_p99_s"):
        assert getattr(some, name) == pytest.approx(getattr(whole, name), rel=0.03), name
