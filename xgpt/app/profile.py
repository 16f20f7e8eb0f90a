"""Chooses the step times that a job is planned with: this machine's cached profile of its model,
measured or completed if needed; the profile file that the job gives; or the roofline."""

import importlib.util
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from xgpt.app.needed_profile import (
    NeededProfile,
    needed_profile,
    profile_metadata,
    why_no_operators,
)
from xgpt.app.opened_job import OpenedJob
from xgpt.app.teller import Teller, elapsed_told, tell_share
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import (
    InputError,
    MissingExtraError,
    Mistake,
    StoppedEarly,
    XgptError,
    refuse,
    wrong,
)
from xgpt.core.system.machine import LARGE_SHARE, Contention, Layout, contention_words, why_no_torch
from xgpt.core.units import format_seconds
from xgpt.launch.launcher import RankProgram
from xgpt.launch.leftovers import scratch_folder
from xgpt.report.table import paragraph
from xgpt.run_folder.state import is_asked_to_stop
from xprofiler.calibration import Calibrated, load_calibration
from xprofiler.points import (
    OWN_TABLE,
    disturbed_points,
    disturbed_words,
    judge,
    missing_skeleton,
    noise_words,
    noisy_points,
    points_to_repeat,
)
from xprofiler.profile import TRANSFER, Profile, cached_profile_path, match
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xrunner.checkpoint.source import (
    cache_dir,
    config_of,
    model_at_hand,
    write_random_model,
)
from xrunner.files.lock import FolderTaken, output_lock

START_S = 1.5  # until ranks that measure have imported torch
_TIMED = frozenset(operator.value for operator in OWN_TABLE.values())
QUICK_PATIENCE_S, PATIENCE_S = 2.0, 9.0  # chosen: wait for other programs, of quick and whole ones
_LOOK_S = 0.2  # between checks whether another process still measures
_TELL_S = 60.0  # between messages about waiting for it


def timing_of(opened: OpenedJob) -> TimingSource:
    """The step times of the job's `profile:`; for `cluster: local` of this machine's profile, where
    sizes that are missing are measured briefly; else of the device's roofline."""
    job, problem = opened.job, opened.problem
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype,
                        engine=job.plan_engine, weight_dtype=problem.weight_dtype,
                        kv_dtype=problem.kv_dtype)
    if job.profile is not None:
        return _given_timing(opened, job.profile, roofline)
    if job.calibration is not None and not opened.is_local:
        calibration = load_calibration(job.calibration)
        calibration.refuse_foreign(roofline.cell(), problem.model.name, job.calibration)
        return Calibrated(roofline, calibration, job.calibration)
    if opened.is_local:
        kind = problem.cluster.device.kind
        # another engine brings its own
        why = why_no_torch("cpu" if engine_of(job).rank_per_replica else kind)
        folder = _folder_of(opened)
        if folder is None and engine_of(job).identity is not None:
            why = f"the files of {job.model}, which {job.run.engine} is timed with, are not here"
        if why is None:
            if kind == "cpu" and engine_of(job).identity is None:
                with elapsed_told(opened.tell, "compiling the native operators, once"):
                    why_no_operators()
            needed = needed_profile(job, problem, folder=folder, standby=opened.standby)
            return ProfileTiming(quick_profile(needed, opened.tell))
        of = "a generic CPU" if kind == "cpu" else problem.cluster.device.name
        opened.tell.say(paragraph(
            f"note: {why}, so nothing can be measured here; times come from the roofline of {of} "
            "and are rough"))
    return roofline


def timing_cost_s(opened: OpenedJob, like: TimingSource) -> float:
    """Approximate seconds to measure the points that `timing_of` needs for this job: as long per
    point as `like`, its times on another layout, took; 0 where none is missing."""
    if not (isinstance(like, ProfileTiming) and opened.is_local and opened.job.profile is None):
        return 0.0
    needed = needed_profile(opened.job, opened.problem, folder=_folder_of(opened))
    with suppress(InputError):
        if not needed.exceeds(load_profile(
                cached_profile_path(cache_dir() / "profiles", needed.metadata))):
            return 0.0
    known = sum(len(points) for key, points in like.profile.tables.items() if key.name in _TIMED)
    return START_S + like.profile.spent_s * len(needed.points) * len(needed.degrees) / max(known, 1)


def _folder_of(opened: OpenedJob) -> Path | None:
    """The folder of the model's files on this machine, for timing other engines than xgpt's own;
    None where there is none."""
    job, files = opened.job, opened.files
    if engine_of(job).identity is not None and job.run.weights == "random":
        if files is None or not job.output.is_dir():  # a plan alone makes no folder
            return None
        write_random_model(files.directory, files.spec, config_of(job.model, files.spec))
    if files is not None:
        return files.directory
    if engine_of(job).identity is None:
        return None
    with suppress(XgptError):
        if (found := model_at_hand(job.model)) is not None:
            return found.directory
    return None


def _given_timing(opened: OpenedJob, path: Path, fallback: TimingSource) -> ProfileTiming:
    """The step times of a profile file. Raises InputError if it is of another model, device or
    dtype; one of other kernels or libraries is used and marked in every result."""
    profile, needed = load_profile(path), profile_metadata(opened.job, opened.problem)
    refusals, marks = match(profile.metadata, needed, is_here=opened.is_local,
                            is_cpu=opened.problem.cluster.device.kind == "cpu")
    refuse(Mistake(file=str(path), line=None, key="profile", value=None, allowed=why)
           for why in refusals)
    opened.tell.say(f"profile: {path}, {judge(profile).brief}")
    for mark in marks:
        opened.tell.say(f"WARNING: the profile does not match this run: {mark}")
    return ProfileTiming(profile, fallback, marks)


def local_profile(needed: NeededProfile, tell: Teller, *, again: bool = False) -> Profile:
    """Returns the cached profile after measuring the usual sizes that are missing (`again`: all of
    them). Raises StoppedEarly when interrupted: measured points are kept, and the same command goes
    on."""
    return _profile(needed, tell, _Measurement(again=again))


def quick_profile(needed: NeededProfile, tell: Teller) -> Profile:
    """Returns the cached profile after brief measurements of sizes that this job needs and that are
    missing, noisy or disturbed (`points_to_repeat`). Raises StoppedEarly as `local_profile`."""
    return _profile(needed, tell, _Measurement(is_quick=True))


def _is_as_busy(missing: float) -> bool:
    """Whether other programs use as much of the machine now as when it was measured, or too much to
    measure it better."""
    contention = Contention()
    time.sleep(_LOOK_S)
    share = contention.others_share()
    return share is not None and share >= min(missing, LARGE_SHARE)


class _Measurement(NamedTuple):
    """Options of one measurement: see xprofiler.measure.worker.MeasureRequest."""

    is_quick: bool = False
    again: bool = False  # measure again what is cached

    @property
    def patience_s(self) -> float:
        """Most seconds for waiting for other programs and repeating points that they disturbed."""
        return QUICK_PATIENCE_S if self.is_quick else PATIENCE_S

    @property
    def words(self) -> str:
        """Words for the sizes that are measured, and how long it waits for other programs."""
        why = ("briefly, once: the sizes of this job" if self.is_quick else
               "once: all usual sizes")
        return (f"{why}; up to {format_seconds(self.patience_s)} more if other programs disturb "
                "it")

    def adds_to(self, profile: Profile, needed: NeededProfile) -> bool:
        """Whether points are missing in the profile."""
        # messages between nodes, or copies, may be missing in an otherwise complete profile
        is_others = needed.engine.identity is not None  # whose messages are part of its steps
        is_whole = is_others or needed.metadata.nodes == 1 or bool(
            profile.table(TRANSFER, link=needed.problem.cluster.inter_link.name))
        is_whole &= needed.offload is None or profile.serial_share is not None
        if not is_whole or profile.model is None or self.again:
            return True
        if not self.is_quick:
            return any(missing_skeleton(profile, degree, needed.needs) for degree in needed.degrees)
        if needed.exceeds(profile):
            return True
        if profile.learned:  # runs have corrected its times
            return False
        again = {degree: points_to_repeat(profile, degree, needed.points)
                 for degree in needed.degrees}
        share = max((own[0].apart for degree, points in again.items()
                     if (own := disturbed_points(profile, degree, points))), default=0.0)
        # beside as many other programs a repeat would be no better
        return any(again.values()) and not (share > 0 and _is_as_busy(share))


def _profile(needed: NeededProfile, tell: Teller, session: _Measurement) -> Profile:
    """The cached profile, after measuring missing points as `session` says."""
    path = cached_profile_path(cache_dir() / "profiles", needed.metadata)
    if (profile := _sufficient(path, needed, session, tell)) is not None:
        return profile
    with alone(path.parent, needed.job.output, tell, needed.engine.name):
        # another process may have measured it while this one waited
        if (profile := _sufficient(path, needed, session, tell, is_again=True)) is not None:
            return profile
        target = path.with_suffix(".again.json") if session.again else path
        is_new = _cached(target, tell if session.again else None) is None
        if is_new:
            target.unlink(missing_ok=True)
        standby = needed.standby
        contention = Contention(alive=lambda: () if standby is None else standby.processes)
        _measure(needed, target, session, tell, is_new=is_new)
        os.replace(target, path)  # `again`: the old one counts until the new one is complete
        profile = load_profile(path)
    tell.detail(f"profile: {format_seconds(profile.spent_s)} of measuring in all; "
                f"{judge(profile).brief}")
    if (warning := _warning(profile, needed, contention.others_share())) is not None:
        tell.detail(f"profile: {warning}")
    if bad := sum(len(noisy_points(profile, degree, needed.points)) for degree in needed.degrees):
        tell.say(paragraph(f"WARNING: {bad} of {len(needed.points)} sizes could not be timed well, "
                           "so the schedule may be a poor one. End other programs and repeat the "
                           "command: it times these sizes again"))
    return profile


def _warning(profile: Profile, needed: NeededProfile, others_share: float | None) -> str | None:
    """Words for doubtful measurements and their remedy; None where there are none."""
    points, others = needed.points, contention_words(others_share)
    beside = "" if others is None else f" ({others})"
    found, marked = (words([one for degree in needed.degrees
                            for one in of(profile, degree, points)])
                     for words, of in ((noise_words, noisy_points),
                                       (disturbed_words, disturbed_points)))
    if found is not None:
        return f"{found}{beside}"
    if marked is not None:
        return f"{marked}{beside}"
    return others and f"{others} (then measure again with `xgpt profile --again`)"


def _sufficient(path: Path, needed: NeededProfile, session: _Measurement, tell: Teller, *,
                is_again: bool = False) -> Profile | None:
    """The cached profile; None if points are missing in it. `is_again`: its faults were reported
    before."""
    profile = _cached(path, None if is_again else tell)
    if profile is None or session.adds_to(profile, needed):
        return None
    judgement = judge(profile)
    anew = "; `xgpt profile JOB --again` measures it again, best on an idle machine" if (
        judgement.grade == "noisy") else ""
    tell.detail(f"profile: from the cache, {profile.metadata.date}; {judgement.brief}{anew}")
    return profile


def _cached(path: Path, tell: Teller | None) -> Profile | None:
    """Reads the cached profile; None where there is none that can be read, which is no mistake of
    the user's. `tell`: takes what is wrong with it."""
    try:
        return load_profile(path) if path.is_file() else None
    except InputError as error:
        if tell is not None:
            tell.say(f"profile: the cached one is not used, {error.mistakes[0]}")
        return None


@contextmanager
def alone(folder: Path, output: Path, tell: Teller, engine: str = OWN_ENGINE) -> Iterator[None]:
    """Waits until no other process measures this engine on this host, since two would disturb each
    other, and reports that once a minute. (Other engines, which may take minutes to start, count as
    any disturbance.) Raises InputError where the cache cannot be written to, StoppedEarly where the
    job of the folder `output` is asked to stop."""
    place = folder / re.sub(r"[^\w.-]", "_", f".alone-{socket.gethostname()}-{engine}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise wrong("cache", "XDG_CACHE_HOME", str(folder),
                    f"a folder that can be written to: {cause.strerror}") from None
    begin_s, told_s = time.monotonic(), -math.inf
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(output_lock(place))
                break
            except FolderTaken as taken:
                if is_asked_to_stop(output):
                    raise StoppedEarly("asked to stop before its profile was measured; the same "
                                       "command goes on") from None
                if (now_s := time.monotonic()) - told_s >= _TELL_S:
                    told_s = now_s
                    tell.say(f"profile: waiting, {format_seconds(now_s - begin_s)} so far, for "
                             f"measurements on this host by {taken.who}")
                time.sleep(_LOOK_S)
        yield


def _measure(needed: NeededProfile, target: Path, session: _Measurement, tell: Teller, *,
             is_new: bool) -> None:
    for package in ("torch", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "run", "measuring a profile")
    of, job, cluster = needed.metadata, needed.job, needed.problem.cluster
    degrees = ", ".join(str(d) for d in needed.degrees)
    timed = (f"{of.model}'s layers" if needed.engine.identity is None
             else f"the steps of {needed.engine.name} with {of.model}")
    tell.detail(
        f"profile: {'timing' if is_new else 'timing more of'} {timed} on "
        f"{Layout(of.ranks, of.threads_per_rank).words} ({of.dtype}, tensor-parallel degree "
        f"{degrees}), {session.words}")
    for reason in needed.refused.values():
        tell.say(f"profile: left out, {reason}")
    captures = job.run.cuda_graphs and needed.engine.identity is None
    # every rank reads the request: hosts share the cache, but not /tmp
    shared = None if needed.launcher.is_here else target.parent
    with scratch_folder("xgpt-profile-", shared) as scratch:
        request, progress, stop = (scratch / name for name in ("request.json", "progress", "stop"))

        def watch() -> None:
            tell_share(tell, f"profiling {of.model}", progress)
            if is_asked_to_stop(job.output):
                stop.touch()

        for measured, count, per_node in needed.starts:
            request.write_text(json.dumps({
                "metadata": asdict(of), "model": asdict(needed.problem.model), "ranks": count,
                "degrees": measured, "refused": needed.refused, "needs": asdict(needed.needs),
                "own": asdict(needed.own), "is_quick": session.is_quick,
                "patience_s": session.patience_s, "captures": captures,
                "offload": str(needed.offload or ""),
                "near": cluster.intra_link.name, "far": cluster.inter_link.name,
                "target": str(target), "progress": str(progress), "stop": str(stop), "engine": {
                    "python": job.run.engine_python or sys.executable,
                    "model_dir": str(needed.folder), "arguments": dict(job.run.engine_args),
                    "device_kind": cluster.device.kind, "link": [
                        cluster.intra_link.latency_s, cluster.intra_link.bandwidth_bytes_per_s]}}),
                encoding="utf-8")
            try:
                needed.launcher.run(RankProgram(
                    module=needed.engine.profiler, argument=request, count=count,
                    per_node=per_node, standby=needed.standby,
                    devices_each=measured[0] if needed.engine.rank_per_replica else 0),
                    watch=watch, ask_to_stop=stop.touch)
            finally:
                tell.end_progress()
            if stop.exists():
                break
        if stop.exists():
            raise StoppedEarly("stopped; measured points are kept, and the same command goes on")
