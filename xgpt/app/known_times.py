"""Times for a job that is shorter than measuring them: from what this machine is known to take, and
kept like a profile, to which the job's own steps are added."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from xgpt.app.local_profile import WantedProfile, alone
from xgpt.app.telling import Teller
from xgpt.core.cluster import Device
from xgpt.core.errors import InputError
from xgpt.core.units import format_seconds
from xgpt.launch.launcher import RankProgram
from xgpt.launch.leftovers import passing_folder
from xprofiler.cache import cached_profile_path, changing
from xprofiler.coarse import COARSE_S, START_S, expected_s
from xprofiler.estimated import (
    Known,
    estimated,
    known_by,
    known_by_peaks,
    peaks_tell_of,
    tells_of,
)
from xprofiler.kept_peaks import kept_peaks, name_of
from xprofiler.profile import ESTIMATED, Peaks, Profile
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xrunner.checkpoint.source import cache_dir

CALIBRATES = "xprofiler.measure.calibrate"
_MOST_READ = 8  # profiles of other models, the latest that tell of this one
_MOST_OPENED = 64  # to find these among those of other code, which nobody removes
_FAR = 4.0  # times as long as measuring is worth: no calibration is needed to say so


def known_times(wanted: WantedProfile, tell: Teller, device: Device) -> Profile | None:
    """Estimated times, where measuring would cost the job more than it may save; None where it
    would not, where nothing tells of such ranks, and where the job has been measured. `device`:
    what a machine of such cores is taken to do until it has shown what it does."""
    folder = cache_dir() / "profiles"
    if not _may_be_estimated(wanted) or _is_measured(wanted, folder):
        return None
    profile = _kept(wanted, folder)
    if profile is None or not profile.learned:  # else a nearer one may have been measured since
        profile = next(filter(None, (_estimated(wanted, known) for known in chain(
            _known_by_profiles(wanted, folder),
            _known_by_peaks(wanted, tell, folder, device)))), profile)
    if profile is None or is_worth_measuring(wanted, profile):
        return None
    profile = _saved(wanted, folder, profile)
    learned = "; as runs here took since" if profile.learned else ""
    error = ProfileTiming(profile).common_error
    tell.say(
        f"profile: none is measured for a job of about {format_seconds(_job_s(wanted, profile))}; "
        f"its times are {profile.metadata.origin}{learned}, perhaps {error:.0%} off, and its "
        "own steps are added to them (`xgpt profile JOB` measures)")
    return profile


def measuring_cost_s(wanted: WantedProfile) -> float:
    """About what it takes to measure the least that a job is planned with."""
    return COARSE_S if wanted.standby is not None else COARSE_S + START_S


def is_worth_measuring(wanted: WantedProfile, profile: Profile) -> bool:
    """Whether the share of the job's time that may go into it, by these times, is as long as
    measuring takes."""
    return wanted.share * _job_s(wanted, profile) >= measuring_cost_s(wanted)


def _job_s(wanted: WantedProfile, profile: Profile) -> float:
    assert wanted.job is not None
    return expected_s(ProfileTiming(profile), wanted.model, wanted.job,
                      ranks=wanted.metadata.ranks, degree=wanted.degrees[0])


def _may_be_estimated(wanted: WantedProfile) -> bool:
    """Whether anything is known of such ranks without measuring: of our own operators on cores,
    for a job with an end, here."""
    of = wanted.metadata
    return (wanted.job is not None and wanted.share < 1 and not of.is_padded and of.nodes == 1
            and of.sharing == 1 and wanted.launcher.is_here)


def _is_measured(wanted: WantedProfile, folder: Path) -> bool:
    """Whether there is a profile of it, to which what it lacks is added."""
    return cached_profile_path(folder, wanted.metadata).is_file()


def _kept(wanted: WantedProfile, folder: Path) -> Profile | None:
    """What an earlier job was planned with, and added to, where its sizes are large enough."""
    path = cached_profile_path(folder, replace(wanted.metadata, origin=ESTIMATED))
    with suppress(InputError):
        if path.is_file() and not wanted.is_lacked_by(found := load_profile(path)):
            return found
    return None


def _saved(wanted: WantedProfile, folder: Path, profile: Profile) -> Profile:
    """The profile, which is kept from now on; or the one that is, where a run has added to that
    since it was looked for."""
    with changing(folder):
        kept = _kept(wanted, folder)
        if kept is not None and kept.learned:
            return kept
        save_profile(profile, cached_profile_path(folder, profile.metadata))
    return profile


def _known_by_profiles(wanted: WantedProfile, folder: Path) -> Iterator[Known]:
    """By what was measured here, the nearest first: the same layout of the cores, the same model,
    weights of a like size."""
    def far(profile: Profile) -> tuple[bool, bool, float]:
        own, model = profile.metadata, profile.model
        assert model is not None
        ratio = model.decoder_layer_params / wanted.model.decoder_layer_params
        return ((own.ranks, own.threads_per_rank) != (of.ranks, of.threads_per_rank),
                own.model_shape != of.model_shape, max(ratio, 1 / ratio))

    of, found = wanted.metadata, list[Profile]()
    files = sorted(folder.glob(f"{of.dtype}-*x*-*.json"), key=_changed_s, reverse=True)
    for file in files[:_MOST_OPENED]:
        with suppress(InputError):
            profile = load_profile(file)
            if tells_of(profile, of):
                found.append(profile)
        if len(found) == _MOST_READ:
            break
    for profile in sorted(found, key=far):
        if (known := known_by(profile, of)) is not None:
            yield known


def _changed_s(file: Path) -> float:
    """When it was written; long ago where another process has taken it away meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _estimated(wanted: WantedProfile, known: Known) -> Profile | None:
    """None where that does not say enough."""
    return estimated(known, wanted.model, wanted.metadata, wanted.needs, wanted.own,
                     wanted.degrees)


def _known_by_peaks(wanted: WantedProfile, tell: Teller, folder: Path,
                    device: Device) -> Iterator[Known]:
    """By what the machine does at most, which is measured once; again where others were at work
    then."""
    of = wanted.metadata
    if not peaks_tell_of(of):
        return
    name = name_of(of)
    kept = kept_peaks(folder, name)
    if kept is None or kept.is_worth_again:
        peaks = kept.peaks if kept is not None else Peaks(
            flops_per_s=device.peak_flops_per_s(of.dtype), source=device.name,
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s)
        rough = _estimated(wanted, known_by_peaks(peaks, of))
        if rough is None or wanted.share * _job_s(wanted, rough) > _FAR * measuring_cost_s(wanted):
            return
        _calibrate(wanted, tell, folder, name, "once" if kept is None else
                   f"again, since others had {kept.missing:.0%} of it")
        kept = kept_peaks(folder, name)
    if kept is not None:
        yield known_by_peaks(kept.peaks, of, missing=kept.missing)


def _calibrate(wanted: WantedProfile, tell: Teller, folder: Path, name: str, why: str) -> None:
    """Raises StoppedEarly when interrupted."""
    tell.say(f"profile: what this machine does at most, {why}, in half a second")
    with alone(folder, wanted.output, tell), passing_folder("xgpt-peaks-") as scratch:
        request = scratch / "request.json"
        request.write_text(json.dumps({
            "dtype": wanted.metadata.dtype, "threads": wanted.metadata.threads_per_rank,
            "folder": str(folder), "name": name}), encoding="utf-8")
        wanted.launcher.run(RankProgram(
            module=CALIBRATES, argument=request, count=1, standby=wanted.standby),
            watch=lambda: None)
