"""What a run measured goes back into the cached profile that it was planned with.

Its steps, by kind, against the profile's own times: so that the next job on this machine measures
nothing, and one that began with a quick profile knows better afterwards. Only of a run that was
whole, that others left alone, and whose steps took as long at its end as at its beginning: a
disturbed one, or one that was slowed in its middle, says nothing of the machine."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from xgpt.app.opened import OpenedJob
from xgpt.core.schedule import Schedule
from xgpt.launch.contention import NOTICEABLE_SHARE
from xprofiler.profile import LearnedSteps, Profile, cached_profile_path, changing
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import LEARNED_KEPT, ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.checkpoint.source import cache_dir
from xrunner.io.beat import ToldStep
from xscheduler.live.pace import KINDS, Ratio, Ratios

LEAST_STEPS = 30  # of a kind on a stage that a run must have taken for it to tell
# or so few, which took so long together: a job of few queries encodes them in a few long steps
_FEW_STEPS, LONG_S = 3, 1.0
_MOST_STEPS = 2000  # of a stage, the latest, that are looked at
PASSING = 1.3  # by which a kind's last third may be slower, or quicker, than its first
_EXTREME = 0.1  # of a kind's steps, those whose ratios are farthest out, half at each end


def learn(opened: OpenedJob, timing: TimingSource, schedule: Schedule,
          others_share: float | None) -> tuple[LearnedSteps, ...]:
    """Adds what the run in the job's folder took to the cached profile; what was added: nothing
    where the profile is another's or the run was disturbed."""
    if not (isinstance(timing, ProfileTiming) and opened.is_local and opened.job.profile is None):
        return ()
    if others_share is not None and others_share >= NOTICEABLE_SHARE:
        return ()
    path = cached_profile_path(cache_dir() / "profiles", timing.profile.metadata)
    if not path.is_file():
        return ()
    found = learned_of(opened, timing.profile, schedule, opened.job.output / "steps.jsonl")
    try:
        if found:
            add(found, path)
        return found
    except OSError as error:  # the run is done, and stays so
        opened.tell.say(f"note: this run's steps are not added to the profile: {error}")
        return ()


def add(found: Sequence[LearnedSteps], path: Path) -> None:
    """Adds what a run took to the profile at `path`, after what others add at the same time."""
    with changing(path.parent):
        known = load_profile(path)
        kept = [own for kind in KINDS for own in (
            *(own for own in known.learned if own.kind == kind),
            *(own for own in found if own.kind == kind))[-LEARNED_KEPT:]]
        save_profile(replace(known, learned=tuple(kept)), path)


def has_learned_since(timing: TimingSource) -> bool:
    """Whether runs have told the cached profile more than these times of it know."""
    if not isinstance(timing, ProfileTiming):
        return False
    path = cached_profile_path(cache_dir() / "profiles", timing.profile.metadata)
    return path.is_file() and load_profile(path).learned != timing.profile.learned


def learned_of(opened: OpenedJob, profile: Profile, schedule: Schedule,
               steps: Path) -> tuple[LearnedSteps, ...]:
    """What the run's steps took against the profile's own times, of the slowest stage by kind;
    nothing of copies of several shapes, whose stages are not those of the first over again."""
    if schedule.estimate.others:
        return ()
    own = ProfileTiming(replace(profile, learned=()))
    known = opened.problem.queries
    longest = opened.problem.lengths.inputs.max + opened.problem.lengths.outputs.max
    if known is not None:
        longest = max(longest, int(known.reserves.max(initial=1)))
    ratios = Ratios(opened.problem, own, schedule.estimate, longest=longest)
    by_place: dict[tuple[int, str], list[Ratio]] = {}
    for line in steps.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] not in KINDS:
            continue
        step = ToldStep(
            row["kind"], row["queries"], row["tokens"], row["decoded"], row["context_tokens"],
            row["longest_context"], row["input_tokens"], row["end_s"] - row["start_s"])
        if (ratio := ratios.of(row["stage"], step)) is not None:
            by_place.setdefault((row["stage"], step.kind), []).append(ratio)
    found = []
    for kind in KINDS:
        stages = [taken[-_MOST_STEPS:] for (_, own_kind), taken in by_place.items()
                  if own_kind == kind and _tell(taken)]
        if not stages:
            continue
        slowest = max(stages, key=factor_of)
        if _is_passing(slowest):
            continue
        factor = factor_of(slowest)
        low, high = np.exp(np.quantile([own.log for own in slowest], (0.25, 0.75)))
        found.append(LearnedSteps(
            kind=kind, rows=float(np.median([own.rows for own in slowest])),
            factor=round(factor, 4), spread=round(float(high - low) / factor, 4),
            steps=len(slowest), date=date.today().isoformat()))
    return tuple(found)


def _tell(ratios: Sequence[Ratio]) -> bool:
    """Whether these steps are enough to tell what others of their kind take."""
    took_s = sum(own.expected_s * math.exp(own.log) for own in ratios)
    return len(ratios) >= LEAST_STEPS or (len(ratios) >= _FEW_STEPS and took_s >= LONG_S)


def _is_passing(ratios: Sequence[Ratio]) -> bool:
    """Whether what these steps were slowed by came, or went, while the run lasted."""
    third = len(ratios) // 3
    change = factor_of(ratios[-third:], 2 * _EXTREME) / factor_of(ratios[:third], 2 * _EXTREME)
    return not 1 / PASSING <= change <= PASSING


def factor_of(ratios: Sequence[Ratio], extreme: float = _EXTREME) -> float:
    """Seconds that these steps took, together, over those they were expected to take, without the
    extreme share of them: a job's time is their sum, of which long steps are the larger part."""
    logs, expected_s = np.array([(own.log, own.expected_s) for own in ratios]).T
    low, high = np.quantile(logs, (extreme / 2, 1 - extreme / 2))
    kept = (logs >= low) & (logs <= high)
    return float(np.sum(expected_s[kept] * np.exp(logs[kept])) / np.sum(expected_s[kept]))
