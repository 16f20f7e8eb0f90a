"""From a job file to what the commands work on: the Problem, its times, its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xgpt.app.intake import intake_of
from xgpt.app.local_profile import local_profile, profile_metadata, wanted_profile
from xgpt.app.telling import LogTeller, Teller
from xgpt.core.errors import InputError, Mistake
from xgpt.core.job import Job
from xgpt.core.job_file import LOCAL_CLUSTER, load_job
from xgpt.core.local import why_no_torch
from xgpt.core.problem import Problem, resolve
from xgpt.core.requests import Requests
from xgpt.core.schedule import Schedule
from xgpt.core.spool import SpoolWriter
from xprofiler.match import match
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xprofiler.verdict import judge
from xrunner.checkpoint.source import ModelFiles
from xrunner.engines.engine import engine_of
from xscheduler.planner import PlanOptions, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A job resolved as far as planning needs. `files` only where the model was fetched."""

    job: Job
    problem: Problem
    files: ModelFiles | None
    requests: Requests | None  # None where the job names only their number
    spool: SpoolWriter | None  # of a run: the requests themselves
    tell: Teller = field(default_factory=LogTeller, compare=False)

    @property
    def is_local(self) -> bool:
        return self.job.cluster == LOCAL_CLUSTER


def open_session(job_file: Path, overrides: Sequence[str], tell: Teller | None = None, *,
                 fetch: bool) -> Session:
    """Loads and resolves a job. `fetch`: the model's files are needed whatever the lengths say."""
    job, tell = load_job(job_file, overrides), tell or LogTeller()
    files, requests, spool = intake_of(job, tell.say, fetch=fetch)
    problem = resolve(job, model=files.spec if files else None, requests=requests)
    return Session(job=job, problem=problem, files=files, requests=requests, spool=spool,
                   tell=tell)


def timing_of(session: Session) -> TimingSource:
    """The job's `profile:`, else this machine's measured one for `cluster: local`, else the
    roofline of the device."""
    job, problem = session.job, session.problem
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
    if job.profile is not None:
        return given_timing(session, job.profile, roofline)
    if session.is_local:
        kind = problem.cluster.device.kind
        why = why_no_torch(kind)
        if why is None:
            return ProfileTiming(local_profile(wanted_profile(job, problem), session.tell))
        of = "a generic CPU" if kind == "cpu" else problem.cluster.device.name
        session.tell.say(
            f"note: {why}, so nothing can be measured here; times come from the roofline of {of} "
            "and are rough")
    return roofline


def given_timing(session: Session, path: Path, fallback: TimingSource) -> ProfileTiming:
    """A profile file the job names. Raises InputError if it is of another model, device or dtype;
    one of other kernels or libraries is used, and says so in every result."""
    found, wanted = load_profile(path), profile_metadata(session.job, session.problem)
    refusals, marks = match(found.metadata, wanted, is_here=session.is_local,
                            is_cpu=session.problem.cluster.device.kind == "cpu")
    if refusals:
        raise InputError([Mistake(file=str(path), line=None, key="profile", value=None, allowed=why)
                          for why in refusals])
    session.tell.say(f"profile: {path}, {judge(found).sentence}")
    for mark in marks:
        session.tell.say(f"WARNING: the profile is not of what will run: {mark}")
    return ProfileTiming(found, fallback, marks)


def executable(session: Session, schedule: Schedule | None = None) -> Session:
    """The session as a run plans and measures it: over every policy and tensor-parallel degree
    that the job's engine has and the job, or the `schedule` it is to execute, leaves open. Raises
    InputError for what the engine does not execute."""
    engine = engine_of(session.job)
    problem = engine.restricted(session.job, session.problem, schedule)
    return replace(session, problem=replace(
        problem, is_revised=problem.is_revised and engine.is_changeable))


def find(session: Session, timing: TimingSource) -> Schedule:
    """The schedule to run. Raises InfeasibleError."""
    return plan(session.problem, timing, PlanOptions(untimed=engine_of(session.job).note),
                tell=session.tell.say)
