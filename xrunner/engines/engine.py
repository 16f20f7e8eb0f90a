"""A row of the table of engines: what one executes, what it refuses, and what plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from xgpt.core.engines import engine_place
from xgpt.core.errors import Mistake
from xgpt.core.job import Job
from xgpt.core.plugins import load_row
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule

Restriction = Callable[[Job, Problem, Schedule | None], Problem]


def _refuses_nothing(job: Job) -> Iterable[Mistake]:
    return ()


def _needs_nothing(job: Job) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine. Its ranks run `python -m WORKER OUT/run.json`: they read run.json, schedule.json
    and the requests, and write results.jsonl, progress.json and measured.json (as xrunner.io does).

    restricted: a job's problem as this engine executes it, its policy
    and layout among those that the engine knows, for planning or for the schedule given; raises
    InputError with every mistake. refusals: what is wrong by the job file alone, before anything is
    fetched. check_installed: raises XgptError where something is missing.
    """

    name: str
    worker: str
    restricted: Restriction
    refusals: Callable[[Job], Iterable[Mistake]] = _refuses_nothing
    check_installed: Callable[[Job], None] = _needs_nothing
    is_predicted: bool = False  # by the times that xgpt measures: those of its own kernels
    is_changeable: bool = False  # takes up another schedule while it runs
    note: str = ""  # of every schedule, where it is not predicted


def engine_of(job: Job) -> Engine:
    """The engine that the job names."""
    return cast(Engine, load_row(engine_place(job.run.engine)))


def mistake(job: Job, key: str, value: object, allowed: str) -> Mistake:
    """A Mistake of the job's file."""
    return Mistake(file=str(job.source), line=None, key=key, value=value, allowed=allowed)
