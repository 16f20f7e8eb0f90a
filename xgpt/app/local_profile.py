"""This machine's profile of a job's model: found in the cache, gone on with, or measured."""

import importlib.util
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from xgpt.app.profile_identity import profile_metadata
from xgpt.app.stop import is_asked_to_stop
from xgpt.app.telling import Teller, tell_share
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import InputError, MissingExtraError, Mistake, StoppedEarly, wrong
from xgpt.core.job import Job
from xgpt.core.layout import Layout
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES, format_seconds
from xgpt.launch.contention import LARGE_SHARE, Contention, in_words
from xgpt.launch.launcher import Launcher, RankProgram, launcher_of
from xgpt.launch.leftovers import passing_folder
from xgpt.launch.standby import Standby
from xprofiler.points import OWN_TABLE, Kind, Needs, Point, lacking, missing, quick_points
from xprofiler.profile import TRANSFER, Profile, ProfileMetadata, cached_profile_path
from xprofiler.profile_file import load_profile
from xprofiler.verdict import (
    disturbed,
    disturbed_words,
    judge,
    noise_words,
    noisy,
    worth_again,
)
from xrunner.checkpoint.source import cache_dir
from xrunner.engines.engine import Engine, engine_of, program_of
from xrunner.io.lock import Taken, output_lock

DEFAULT_BUDGET_S = 45.0
QUICK_PATIENCE_S, PATIENCE_SHARE = 2.0, 0.2  # for others: of a quick profile, and of a budget
_LOOK_S = 0.2  # between looks whether another process has ended measuring
_TELL_S = 60.0  # between two words of waiting for it
# no more queries than decode steps are captured for (xrunner.rules.buckets)
_GPU_NEEDS = Needs(input_tokens=2060, context_tokens=4120, queries=500, tokens=8240)
_KV_SHARE = 4  # a decode step is measured with caches of at most this part of a rank's memory
_LEAST_QUERIES = 9
REACH = 2.0  # see `lacks`


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProfile:
    """What a profile must be of, and cover."""

    metadata: ProfileMetadata
    model: ModelSpec
    needs: Needs
    own: Needs  # the sizes of the job itself
    degrees: tuple[int, ...]
    refused: dict[int, str]
    links: tuple[str, str]  # inside a node, between nodes
    launcher: Launcher  # of the ranks that measure
    standby: Standby | None  # who may be one of them
    output: Path  # of the job: a run of it that is asked to stop stops measuring, too
    engine: Engine  # whose times
    program: Callable[[Path], tuple[str, ...]]  # starts its profiler on a request; (): as ours is
    engine_settings: Mapping[str, object]  # what that is told besides
    captures: bool = True  # decode steps on GPUs, as a run of the job does

    def is_lacked_by(self, profile: Profile) -> bool:
        """Whether the profile has too little to plan with."""
        return any(lacks(profile, degree, self.points, self.own) for degree in self.degrees)

    @property
    def points(self) -> list[Point]:
        """What is measured in any case."""
        return quick_points(self.model, self.needs, self.own)


def wanted_profile(job: Job, problem: Problem, degrees: Sequence[int] | None = None,
                   folder: Path | None = None, standby: Standby | None = None) -> WantedProfile:
    """The profile this job is planned with on this machine. `degrees`: tensor-parallel degrees,
    also more than there are devices (a shard needs but one); None: what the job can use. `folder`:
    the model's, which other engines than ours measure with. `standby`: a rank that may measure."""
    cluster, fixed = problem.cluster, problem.fixed.tp_degree
    engine = engine_of(job)
    if degrees is None:
        # ranks outside the groups are stages of degree 1
        has_single = problem.fixed.tp_gpus != cluster.num_devices
        degrees = [d for d in range(1, cluster.num_devices + 1)
                   if fixed == d or (d == 1 and has_single)
                   or (fixed is None and d <= cluster.devices_per_node)]
    reasons = {degree: refuse_tp_degree(problem.model, degree) for degree in degrees}
    refused = {degree: why for degree, why in reasons.items() if why is not None}
    possible = tuple(degree for degree in reasons if degree not in refused)
    if not possible or fixed in refused:
        raise InputError([Mistake(file=str(job.source), line=None, key="tensor-parallel degree",
                                  value=d, allowed=why) for d, why in refused.items()])
    needs = needs_of(problem, job.run.kv_layout)
    return WantedProfile(metadata=profile_metadata(job, problem), model=problem.model,
                         needs=needs, own=own_sizes(problem, needs), degrees=possible,
                         refused=refused,
                         links=(cluster.intra_link.name, cluster.inter_link.name),
                         launcher=launcher_of(job, problem), standby=standby,
                         output=job.output, engine=engine,
                         captures=job.run.cuda_graphs,
                         program=partial(program_of, job, engine.profiler),
                         engine_settings={
                             "model_dir": str(folder), "arguments": job.run.engine_args,
                             "device_kind": cluster.device.kind})


def local_profile(wanted: WantedProfile, tell: Teller, *, budget_s: float | None = None,
                  again: bool = False) -> Profile:
    """The cached profile; measured, or gone on with, where points of the skeleton are missing, or
    where `budget_s` leaves time for more than went into it. Raises StoppedEarly when interrupted:
    what was measured is kept, and the same command goes on."""
    def is_enough(profile: Profile) -> bool:
        return (not again and profile.spent_s >= (budget_s or 0.0)
                and _is_whole(profile, wanted))

    session = _Measurement(budget_s=DEFAULT_BUDGET_S if budget_s is None else budget_s,
                           why="every size that jobs usually have", again=again)
    return _profile(wanted, tell, session, is_enough)


def quick_profile(wanted: WantedProfile, tell: Teller) -> Profile:
    """The cached profile; where it lacks sizes that this job needs, or has them with repeats that
    disagree, or disturbed, these are measured briefly, each so often at most as `worth_again` says.
    Raises StoppedEarly as `local_profile`."""
    def is_enough(profile: Profile) -> bool:
        points = wanted.points
        if wanted.is_lacked_by(profile):
            return False
        if profile.learned:  # runs have told what its times are worth
            return True
        again = {degree: worth_again(profile, degree, points) for degree in wanted.degrees}
        share = max((own[0].apart for degree, own_points in again.items()
                     if (own := disturbed(profile, degree, own_points))), default=0.0)
        # what is measured beside as much else is no better
        return not any(again.values()) or (share > 0 and _is_as_busy(share))

    session = _Measurement(is_quick=True, why="the sizes that this job has")
    return _profile(wanted, tell, session, is_enough)


def _is_as_busy(missing: float) -> bool:
    """Whether others have as much of the machine now as when it was measured, or too much to
    measure anything better."""
    contention = Contention()
    time.sleep(_LOOK_S)
    share = contention.others_share()
    return share is not None and share >= min(missing, LARGE_SHARE)


def _is_whole(profile: Profile, wanted: WantedProfile) -> bool:
    """Whether it has every point of the skeleton."""
    return not any(missing(profile, degree, wanted.needs) for degree in wanted.degrees)


class _Measurement(NamedTuple):
    """What is measured in one go, and why: see xprofiler.measure.worker.MeasureRequest."""

    why: str
    is_quick: bool = False
    budget_s: float = 0.0
    again: bool = False  # anew, whatever is cached

    @property
    def patience_s(self) -> float:
        """Seconds that may go on waiting for other programs, and on measuring again what they
        disturbed."""
        return QUICK_PATIENCE_S if self.is_quick else max(
            QUICK_PATIENCE_S, PATIENCE_SHARE * min(self.budget_s, DEFAULT_BUDGET_S))

    @property
    def words(self) -> str:
        """How long it takes, and why."""
        how_long = f"about {format_seconds(self.budget_s)}" if self.budget_s else "briefly"
        return (f"{how_long}, once: {self.why}; up to {format_seconds(self.patience_s)} more where "
                "other programs disturb it")


def _profile(wanted: WantedProfile, tell: Teller, session: _Measurement,
             is_enough: Callable[[Profile], bool]) -> Profile:
    """The cached profile if it is enough; else the session adds to it."""
    path = cached_profile_path(cache_dir() / "profiles", wanted.metadata)

    def serves(profile: Profile) -> bool:
        # messages between nodes may not have been timed; then the rest of it is gone on with
        has_messages = wanted.metadata.nodes == 1 or bool(
            profile.table(TRANSFER, link=wanted.links[1]))
        return has_messages and profile.model is not None and is_enough(profile)

    if (profile := _sufficient(path, serves, tell)) is not None:
        return profile
    with alone(path.parent, wanted.output, tell, wanted.engine.name):
        # another process may have measured it while this one waited
        if (profile := _sufficient(path, serves, tell, is_again=True)) is not None:
            return profile
        target = path.with_suffix(".again.json") if session.again else path
        is_new = _cached(target, tell if session.again else None) is None
        if is_new:
            target.unlink(missing_ok=True)
        standby = wanted.standby
        contention = Contention(alive=lambda: () if standby is None else standby.processes)
        _measure(wanted, target, session, tell, is_new=is_new)
        os.replace(target, path)  # `again`: what was there counts until its successor is whole
        profile = load_profile(path)
    tell.say(f"profile: {format_seconds(profile.spent_s)} of measuring in all; "
             f"{judge(profile).brief}")
    for warning in _warnings(profile, wanted, contention.others_share()):
        tell.say(f"profile: {warning}")
    return profile


def _warnings(profile: Profile, wanted: WantedProfile, others_share: float | None) -> list[str]:
    """What is doubtful about what was just measured, and what to do about it."""
    points = wanted.points
    found = noise_words([one for degree in wanted.degrees
                         for one in noisy(profile, degree, points)])
    others = in_words(others_share)
    marked = disturbed_words([one for degree in wanted.degrees
                              for one in disturbed(profile, degree, points)])
    if found is None and marked is not None:
        return [marked if others is None else f"{marked} ({others})"]
    if found is None:
        return [] if others is None else [
            f"{others} (then measure it anew with `xgpt profile --again`)"]
    cause = "" if others is None else f" ({others})"
    return [f"WARNING: {found}{cause}. The schedule may be a poor one. End what else runs here and "
            "repeat the command: it measures these sizes again"]


def _sufficient(path: Path, is_enough: Callable[[Profile], bool], tell: Teller, *,
                is_again: bool = False) -> Profile | None:
    """The cached profile, if nothing is to be added to it. is_again: what is wrong with it was
    told."""
    profile = _cached(path, None if is_again else tell)
    if profile is None or not is_enough(profile):
        return None
    judgement = judge(profile)
    anew = "; `xgpt profile JOB --again` measures it anew, best on a quiet machine" if (
        judgement.grade == "noisy") else ""
    tell.say(f"profile: from the cache, {profile.metadata.date}; {judgement.brief}{anew}")
    return profile


def _cached(path: Path, tell: Teller | None) -> Profile | None:
    """Reads the cached profile; None where there is none, or none that can be read: a cache is no
    input of the user's. tell: whom to tell what is wrong with it."""
    try:
        return load_profile(path) if path.is_file() else None
    except InputError as error:
        if tell is not None:
            tell.say(f"profile: the cached one is left aside, {error.mistakes[0]}")
        return None


@contextmanager
def alone(folder: Path, output: Path, tell: Teller, engine: str = OWN_ENGINE) -> Iterator[None]:
    """One process at a time measures with an engine on a host: two would disturb each other. What
    another engine does meanwhile, which may take minutes to start, is seen as any disturbance. Who
    waits says so once a minute. Raises InputError where the cache cannot be written to,
    StoppedEarly where the job of the folder `output` is asked to stop."""
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
            except Taken as taken:
                if is_asked_to_stop(output):
                    raise StoppedEarly("asked to stop before its profile was measured; the same "
                                       "command goes on") from None
                if (now_s := time.monotonic()) - told_s >= _TELL_S:
                    told_s = now_s
                    tell.say(f"profile: waiting, {format_seconds(now_s - begin_s)} so far, for "
                             f"what is measured on this host by {taken.who}")
                time.sleep(_LOOK_S)
        yield


def _measure(wanted: WantedProfile, target: Path, session: _Measurement, tell: Teller, *,
             is_new: bool) -> None:
    for package in ("torch", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "run", "measuring a profile")
    of = wanted.metadata
    degrees = ", ".join(str(d) for d in wanted.degrees)
    timed = (f"{of.model}'s layers" if wanted.engine.identity is None
             else f"the steps of {wanted.engine.name} with {of.model}")
    tell.say(
        f"profile: {'timing' if is_new else 'timing more of'} {timed} on "
        f"{Layout(of.ranks, of.threads_per_rank).words} ({of.dtype}, tensor-parallel degree "
        f"{degrees}), {session.words}")
    for reason in wanted.refused.values():
        tell.say(f"profile: left out, {reason}")
    # every rank reads the request: hosts have the cache in common, but not /tmp
    shared = None if wanted.launcher.is_here else target.parent
    with passing_folder("xgpt-profile-", shared) as scratch:
        request, progress, stop = (scratch / name for name in ("request.json", "progress", "stop"))
        near, far = wanted.links
        request.write_text(json.dumps({
            "metadata": asdict(of), "model": asdict(wanted.model), "degrees": wanted.degrees,
            "refused": wanted.refused, "needs": asdict(wanted.needs), "own": asdict(wanted.own),
            "is_quick": session.is_quick, "budget_s": session.budget_s,
            "patience_s": session.patience_s, "captures": wanted.captures, "near": near,
            "far": far, "target": str(target), "progress": str(progress),
            "stop": str(stop), "engine": dict(wanted.engine_settings)}),
            encoding="utf-8")

        def watch() -> None:
            tell_share(tell, "profiling", progress)
            if is_asked_to_stop(wanted.output):
                stop.touch()

        try:
            command = wanted.program(request)
            ranks = RankProgram(module=wanted.engine.profiler, argument=request, command=command,
                                count=1 if command else of.ranks,
                                standby=None if command else wanted.standby)
            wanted.launcher.run(ranks, watch=watch, ask_to_stop=stop.touch)
        finally:
            tell.end_progress()
        if stop.exists():
            raise StoppedEarly("stopped; what was measured is kept, and the same command goes on")


def needs_of(problem: Problem, kv_layout: str = "auto") -> Needs:
    """The job's own sizes where they are larger than usual ones. `kv_layout`: the job's wish; what
    lies in blocks, as it does on GPUs by default, is copied for nobody."""
    usual = Needs() if problem.cluster.device.kind == "cpu" else _GPU_NEEDS
    inputs, outputs = problem.lengths.inputs.max, problem.lengths.outputs.max
    context = max(usual.context_tokens, inputs + max(outputs, problem.default_max_tokens))
    per_query = (problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
                 * min(context, problem.model.max_positions or context)
                 # a step of an encoder-decoder model is measured with as long a cache for its input
                 * (2 if problem.model.is_encoder_decoder else 1))
    room = problem.cluster.device.memory_bytes // _KV_SHARE // per_query
    return Needs(input_tokens=max(usual.input_tokens, inputs), context_tokens=context,
                 queries=max(min(usual.queries, room), _LEAST_QUERIES),
                 tokens=max(usual.tokens, inputs),
                 moves_rows=kv_layout == "rows" or problem.model.is_encoder_decoder or (
                     problem.cluster.device.kind == "cpu")).within(problem.model)


def own_sizes(problem: Problem, usual: Needs) -> Needs:
    """The sizes of the job itself; `usual` where it does not say how many queries it has."""
    lengths, count = problem.lengths, problem.num_queries
    if any(problem.fixed.value_of(name) for name in ("encode_batch", "max_active")):
        count = None  # it is planned for as many as these keep present, which may be more
    inputs = lengths.inputs.max
    return Needs(
        input_tokens=inputs,
        context_tokens=inputs + max(lengths.outputs.max, problem.default_max_tokens),
        queries=usual.queries if count is None else min(max(count, 1), usual.queries),
        tokens=usual.tokens if count is None else max(
            min(math.ceil(count * lengths.inputs.mean), usual.tokens), inputs))


def lacks(profile: Profile, degree: int, points: Sequence[Point], own: Needs) -> bool:
    """Whether a job of these points has larger sizes than the profile; of one that runs have added
    to, than REACH times its largest: it says how far its lines go on, and the next run adds what it
    sees there. `own`: the job's own sizes, which count where points lie beyond them."""
    reach = REACH if profile.learned else 1.0
    most = {Kind.DECODE: (own.queries, own.context_tokens), Kind.REST: (own.tokens, 0),
            Kind.CROSS: (own.queries, own.input_tokens), Kind.COMPACTION: (0, own.context_tokens)}
    for point in lacking(profile, degree, points):
        table = profile.table(OWN_TABLE[point.kind].value, degree)
        x, y = most.get(point.kind, (own.input_tokens, point.y))
        if not table or min(point.x, x) > reach * max(one.x for one in table) or (
                min(point.y, y) > reach * max(max(one.y for one in table), 1)):
            return True
    return False
