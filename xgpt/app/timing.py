"""The times that a job is planned with."""

from contextlib import suppress
from pathlib import Path

from xgpt.app.local_profile import quick_profile, wanted_profile
from xgpt.app.opened import OpenedJob
from xgpt.app.profile_identity import profile_metadata, why_no_operators
from xgpt.app.telling import told_while
from xgpt.core.errors import InputError, Mistake, XgptError
from xgpt.core.local import why_no_torch
from xprofiler.points import OWN_TABLE
from xprofiler.profile import cached_profile_path, match
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xprofiler.verdict import judge
from xrunner.checkpoint.source import cache_dir, model_at_hand
from xrunner.engines.engine import engine_of

START_S = 1.5  # of ranks that measure, which import torch
_TIMED = frozenset(operator.value for operator in OWN_TABLE.values())


def timing_of(opened: OpenedJob) -> TimingSource:
    """The job's `profile:`, else this machine's for `cluster: local`, of which what this job needs
    is measured briefly, else the roofline of the device."""
    job, problem = opened.job, opened.problem
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype,
                        engine=job.plan_engine, weight_dtype=problem.weight_dtype,
                        kv_dtype=problem.kv_dtype)
    if job.profile is not None:
        return _given_timing(opened, job.profile, roofline)
    if opened.is_local:
        kind = problem.cluster.device.kind
        why = why_no_torch(kind)
        folder = _folder_of(opened)
        if folder is None and engine_of(job).identity is not None:
            why = f"the files of {job.model} are not here, with which {job.run.engine} is timed"
        if why is None:
            if kind == "cpu" and engine_of(job).identity is None:
                with told_while(opened.tell, "compiling what computes, once"):
                    why_no_operators()
            wanted = wanted_profile(job, problem, folder=folder, standby=opened.standby)
            return ProfileTiming(quick_profile(wanted, opened.tell))
        of = "a generic CPU" if kind == "cpu" else problem.cluster.device.name
        opened.tell.say(
            f"note: {why}, so nothing can be measured here; times come from the roofline of {of} "
            "and are rough")
    return roofline


def timing_cost_s(opened: OpenedJob, like: TimingSource) -> float:
    """About what it takes to measure what `timing_of` this job lacks: as long for each point as
    `like`, its times on another layout of the cores, took; 0 where it lacks nothing."""
    if not (isinstance(like, ProfileTiming) and opened.is_local and opened.job.profile is None):
        return 0.0
    wanted = wanted_profile(opened.job, opened.problem, folder=_folder_of(opened))
    with suppress(InputError):
        if not wanted.is_lacked_by(load_profile(
                cached_profile_path(cache_dir() / "profiles", wanted.metadata))):
            return 0.0
    known = sum(len(points) for key, points in like.profile.tables.items() if key.name in _TIMED)
    return START_S + like.profile.spent_s * len(wanted.points) * len(wanted.degrees) / max(known, 1)


def _folder_of(opened: OpenedJob) -> Path | None:
    """The model's files, which other engines than ours are timed with: those that the job has
    needed already, else those that are on this machine; None where there are none."""
    if opened.files is not None:
        return opened.files.directory
    if engine_of(opened.job).identity is None or opened.job.run.weights == "random":
        return None
    with suppress(XgptError):
        if (found := model_at_hand(opened.job.model)) is not None:
            return found.directory
    return None


def _given_timing(opened: OpenedJob, path: Path, fallback: TimingSource) -> ProfileTiming:
    """A profile file the job names. Raises InputError if it is of another model, device or dtype;
    one of other kernels or libraries is used, and says so in every result."""
    profile, wanted = load_profile(path), profile_metadata(opened.job, opened.problem)
    refusals, marks = match(profile.metadata, wanted, is_here=opened.is_local,
                            is_cpu=opened.problem.cluster.device.kind == "cpu")
    if refusals:
        raise InputError([Mistake(file=str(path), line=None, key="profile", value=None, allowed=why)
                          for why in refusals])
    opened.tell.say(f"profile: {path}, {judge(profile).brief}")
    for mark in marks:
        opened.tell.say(f"WARNING: the profile is not of what will run: {mark}")
    return ProfileTiming(profile, fallback, marks)
