"""A job file opened: what the job asks, resolved as far as planning needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xgpt.app.intake import Need, intake_of
from xgpt.app.telling import LogTeller, Teller
from xgpt.core.job import Job
from xgpt.core.job_file import load_job
from xgpt.core.problem import Problem, resolve
from xgpt.core.requests import Requests
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.spool import SpoolWriter
from xrunner.checkpoint.source import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJob:
    """A job, and the problem that it poses. `files` are there only where the model was fetched.
    Use cases say what they have to say to `tell`."""

    job: Job
    problem: Problem
    files: ModelFiles | None
    requests: Requests | None  # None where the job names only their number
    spool: SpoolWriter | None  # of a run: the requests themselves
    tell: Teller = field(default_factory=LogTeller, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether the job's cluster is this machine."""
        return self.job.cluster == LOCAL_CLUSTER


def open_file(path: Path, overrides: Sequence[str] = (), tell: Teller | None = None,
              need: Need = "shape") -> OpenedJob:
    """The job of a file, opened for planning. Raises InputError."""
    return open_job(load_job(path, overrides), tell or LogTeller(), need)


def open_job(job: Job, tell: Teller, need: Need) -> OpenedJob:
    """The job, resolved as far as `need` asks. Raises InputError."""
    files, requests, spool = intake_of(job, tell.say, need)
    problem = resolve(job, model=files.spec if files else None, requests=requests)
    return OpenedJob(job=job, problem=problem, files=files, requests=requests, spool=spool,
                     tell=tell)
