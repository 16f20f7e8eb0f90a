"""The best schedule beside another: on the same stages, with the same control variables but for how
many queries are taken at a time. Searches look for the best under a few latency bounds; how many
queries what they find has room for within the bound that was asked for is found out here, by the
closed form alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xscheduler.admissible import Limits, admissible
from xscheduler.evaluator import Evaluator, config_of
from xscheduler.job_time import told

LEAST, MOST = 0.75, 1.2  # of what a schedule takes at a time, that are looked at
MANY = 200  # more sizes than so many are looked at in even ratios


def nearby(evaluator: Evaluator, estimate: Estimate, latency_s: float) -> Estimate | None:
    """The one with most throughput whose latency is no more than that, and which keeps all other
    limits of the evaluator's problem; None where there is none, or the job says how many queries
    are taken at a time."""
    problem, config = evaluator.problem, config_of(estimate)
    name = "max_active" if hasattr(config, "max_active") else "encode_batch"
    if not policy(estimate.policy).is_searched or problem.fixed.value_of(name) is not None:
        return None
    most = problem.num_queries or math.inf
    configs = [replace(config, **{name: size}) for size in _sizes(getattr(config, name))
               if size <= most]
    form: Any = evaluator.form(estimate)
    figures = form.evaluate(configs)
    able = admissible(figures, Limits.of(
        problem.constraint, queries=most, latency_s=latency_s))
    qps = np.where(able, figures.throughput_qps, 0.0).tolist()
    row = max(range(len(qps)), key=lambda row: told(qps[row]))  # of equals the fewest
    return None if not qps[row] > 0 else form.estimate(configs[row]).in_copies(
        estimate.deployment.replicas)


def _sizes(size: int) -> list[int]:
    least, most = max(math.floor(LEAST * size), 1), math.ceil(MOST * size)
    if most - least < MANY:
        return list(range(least, most + 1))
    return sorted({round(one) for one in np.geomspace(least, most, MANY)})
