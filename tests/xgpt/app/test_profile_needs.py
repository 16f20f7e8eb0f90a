"""Which sizes a job is measured at."""

from __future__ import annotations

from dataclasses import replace

from toy_jobs import toy_problem

from xgpt.app.local_profile import own_sizes
from xgpt.core.job import FixedSchedule
from xprofiler.points import Needs


def test_a_job_of_few_queries_is_measured_at_what_its_fixed_schedule_keeps_present() -> None:
    """Two queries by a schedule for more are planned as if batches filled: of sizes beyond what
    was measured no schedule would be left."""
    few, usual = replace(toy_problem(latency_s=9.0), num_queries=2), Needs()
    assert own_sizes(few, usual).queries == 2
    for fixed in (FixedSchedule(encode_batch=6), FixedSchedule(max_active=20)):
        assert own_sizes(replace(few, fixed=fixed), usual).queries == usual.queries
