"""The roofline without its errors: no margin is taken for it, in tests of what else plans do."""

from __future__ import annotations

from typing import Any

from xgpt.app.opened import OpenedJob
from xprofiler.roofline import Roofline


class TakenAsTrue(Roofline):
    """Of these times nobody says how far off they are."""

    errors: Any = None


def timing_of(session: OpenedJob) -> TakenAsTrue:
    """The times of a job on a cluster that is not here, as xgpt.app.timing's but for their
    errors."""
    problem = session.problem
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype,
                       engine=session.job.plan_engine, weight_dtype=problem.weight_dtype)
