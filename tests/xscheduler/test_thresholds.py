"""The threshold of a static batch's cost that a plan chooses by replays of the job."""

from dataclasses import replace

import numpy as np
from problems import roofline_of, toy_problem

from xgpt.core.constraint import deadline_bound
from xgpt.core.controls import Adjustment, Admission, Batches, FixedSchedule, Forecasting
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import QueryLengths
from xscheduler.evaluator import predict
from xscheduler.planner import plan

INPUTS, OUTPUTS = np.full(10, 4), np.array([3, 90] * 5)


def planned(deadlines_s=None, **batches):
    """The schedule of ten requests, five of them short, in batches of at most ten by length; and
    its prediction."""
    toy = toy_problem(per_node=1, fixed=FixedSchedule(policies=("ft",), encode_batch=10))
    bounds = toy.constraint.bounds if deadlines_s is None else (
        *toy.constraint.bounds, deadline_bound(attainment=0.1))
    problem = replace(
        toy, num_queries=10, lengths=joint_empirical(np.stack([INPUTS, OUTPUTS], axis=1)),
        constraint=replace(toy.constraint, bounds=bounds),
        adjustment=Adjustment(batches=Batches(**batches),
                              admission=Admission(forecast=Forecasting(kind="known"))),
        queries=QueryLengths(inputs=INPUTS, most_outputs=OUTPUTS, outputs=OUTPUTS,
                             deadlines_s=deadlines_s))
    schedule = plan(problem, roofline_of(problem))
    return schedule.controls.batches, predict(problem, roofline_of(problem), schedule.estimate)


def test_a_threshold_parts_short_requests_from_long_ones_that_would_delay_them():
    _, merged = planned(threshold=np.inf)
    batches, quickest = planned()
    assert batches.threshold is not None and quickest.wall_s <= merged.wall_s
    deadlines_s = np.where(OUTPUTS == 3, 0.3, 3.0) * merged.wall_s
    given, late = planned(deadlines_s, threshold=np.inf)
    assert given.threshold == np.inf and late.ends.in_time() == 0.5
    parted, in_time = planned(deadlines_s)
    assert parted.threshold < 87 * 6 * 1.2 and in_time.ends.in_time() == 1.0
