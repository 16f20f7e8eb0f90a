"""The row of the engine: what it executes, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace

from xgpt.core.errors import InputError, Mistake
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job import Job
from xrunner.backends.engine import Engine, mistake

_POLICY = "ft"


def _refusals(job: Job) -> Iterator[Mistake]:
    """By the job file alone."""
    if job.run.temperature:
        yield mistake(job, "run.temperature", job.run.temperature, "0: an echo draws nothing")


def _restricted(job: Job, problem: Problem, schedule: Schedule | None) -> Problem:
    """Static batches on single devices."""
    policy = problem.fixed.policy if schedule is None else schedule.estimate.policy
    if policy not in (None, _POLICY):
        raise InputError([mistake(job, "schedule.policy", policy,
                                  f"{_POLICY}: the engine toy works static batches")])
    fixed = replace(problem.fixed, policies=(_POLICY,), tp_degree=1, tp_gpus=0)
    return replace(problem, fixed=fixed)


ENGINE = Engine(name="toy", worker="toy_echo.worker", restricted=_restricted,
                refusals=_refusals, note="an echo takes no time: nothing is predicted")
