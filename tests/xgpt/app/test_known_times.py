"""A job that is shorter than measuring starts with what this machine is known to take."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from laid_out import amdahl, profile_of

from xgpt.app import known_times as app
from xgpt.app import learn as learning
from xgpt.app import local_profile, plan, timing
from xgpt.app.known_times import known_times
from xgpt.app.learn import has_learned_since
from xgpt.app.local_profile import WantedProfile
from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import JobPlanner, plan_job
from xgpt.app.telling import LogTeller
from xgpt.core import catalog
from xgpt.core.errors import InfeasibleError
from xgpt.launch.launcher import RankProgram
from xprofiler.cache import cached_profile_path
from xprofiler.estimated import Known
from xprofiler.kept_peaks import KeptPeaks, keep_peaks, kept_peaks, name_of
from xprofiler.profile import LearnedSteps, Peaks, Profile
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.source_errors import ESTIMATED_ERROR
from xscheduler.planner import PlanOptions

PEAKS = Peaks(flops_per_s=4e11, bandwidth_bytes_per_s=2e10, source="measured")
LEARNED = LearnedSteps(kind="decode", rows=5.0, factor=1.6, spread=0.1, steps=99,
                       date="2026-11-26")


class Machine:
    """One whose ranks are asked for what they would measure. `profiled`: how often points were
    measured; `calibrated`: how often peaks were, while others had `missing` of it."""

    is_here, missing = True, 0.0

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.profiled, self.calibrated = folder / "profiles", 0, 0
        self.folder.mkdir()
        for module in (app, local_profile, timing):
            patch.setattr(module, "cache_dir", lambda: folder)
        patch.setattr("xgpt.app.learn.cache_dir", lambda: folder)
        patch.setattr(local_profile, "launcher_of", lambda *_: self)
        patch.setattr("xgpt.app.profile_identity.why_no_operators", str)
        patch.setattr(timing, "why_no_operators", str)
        patch.setattr(timing, "quick_profile", self.measure)
        patch.setattr(timing, "refining_s", lambda *_, **__: 0.0)

    def run(self, program: RankProgram, watch: object, ask_to_stop: object = None) -> None:
        assert program.module == app.CALIBRATES and program.count == 1
        self.calibrated += 1
        asked = json.loads(program.argument.read_text(encoding="utf-8"))
        keep_peaks(Path(asked["folder"]), asked["name"], KeptPeaks(PEAKS, self.missing))

    def measure(self, wanted: WantedProfile, tell: LogTeller) -> Profile:
        self.profiled += 1
        found = replace(profile_of(wanted.model, 1, 2, amdahl(0.1), dtype=wanted.metadata.dtype),
                        metadata=wanted.metadata)
        save_profile(found, cached_profile_path(self.folder, wanted.metadata))
        return found


class Kept(LogTeller):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture()
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def job_of(folder: Path, *, count: int = 5, bound: str = "inf", model: str = "smollm2-135m",
           ranks: int = 1, run: str = "") -> OpenedJob:
    path = folder / "job.yaml"
    path.write_text(f"""
model: {model}
cluster: local
workload: {{requests: {{count: {count}}}, input_tokens: {{mean: 40, std: 20, max: 80}},
           output_tokens: {{mean: 12, std: 5, max: 24}}}}
constraint: {{latency_s: {bound}}}
schedule: {{policy: rra, encode_chunk: 0}}
run: {{dtype: float32, ranks: {ranks}, threads_per_rank: {2 // ranks}, weights: random{run}}}
output: out
""")
    return replace(open_file(path), tell=Kept())


def wanted_of(opened: OpenedJob) -> WantedProfile:
    return local_profile.wanted_profile(opened.job, opened.problem)


def test_a_short_job_measures_no_point_and_a_long_one_does(
        tmp_path: Path, machine: Machine) -> None:
    short = job_of(tmp_path)
    found = plan_job(short)
    assert (machine.profiled, machine.calibrated) == (0, 1)
    assert isinstance(found.timing, ProfileTiming)
    assert found.timing.provenance().startswith("estimated from this machine's peaks on cpu-")
    assert "estimated from this machine's peaks" in str(found)
    (said,) = (text for text in short.tell.said if "none is measured" in text)
    assert f"perhaps {ESTIMATED_ERROR:.0%} off" in said and "\n" not in said

    plan_job(job_of(tmp_path, count=8))
    assert (machine.profiled, machine.calibrated) == (0, 1), "the peaks are kept"
    plan_job(job_of(tmp_path, count=20_000))
    assert (machine.profiled, machine.calibrated) == (1, 1)
    again = plan_job(job_of(tmp_path))
    assert machine.profiled == 2 and "estimated" not in again.timing.provenance(), (
        "what was measured counts")


def test_a_job_that_is_long_beyond_doubt_is_measured_without_a_calibration(
        tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, count=200_000))
    assert (machine.profiled, machine.calibrated) == (1, 0)


def test_only_what_plans_a_job_estimates(tmp_path: Path, machine: Machine) -> None:
    JobPlanner(job_of(tmp_path))
    assert machine.profiled == 1
    plan_job(job_of(tmp_path, model="opt-125m"), options=PlanOptions(horizon="steady"))
    assert machine.profiled == 2


def test_other_models_tell_more_than_peaks(tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    assert (machine.profiled, machine.calibrated) == (1, 0)
    found = plan_job(job_of(tmp_path))
    assert (machine.profiled, machine.calibrated) == (1, 0)
    assert "estimated like opt-125m" in found.timing.provenance()
    own = wanted_of(job_of(tmp_path))
    estimate, truth = found.timing, ProfileTiming(profile_of(
        catalog.model("smollm2-135m"), 1, 2, amdahl(0.1)))
    assert app.expected_s(estimate, own.model, own.job, ranks=1, degree=1) == pytest.approx(
        app.expected_s(truth, own.model, own.job, ranks=1, degree=1), rel=0.5)


def test_a_profile_that_says_too_little_is_passed_over(tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    (path,) = machine.folder.glob("float32-*.json")
    profile = load_profile(path)
    save_profile(replace(profile, tables={
        key: points for key, points in profile.tables.items() if key.name != "head"}), path)
    found = plan_job(job_of(tmp_path))
    assert (machine.profiled, machine.calibrated) == (1, 1)
    assert "estimated from this machine's peaks" in found.timing.provenance()


def test_eight_short_jobs_leave_what_was_measured_in_reach(
        tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    (path,) = machine.folder.glob("float32-*.json")
    measured = load_profile(path)
    for number in range(16):  # younger, and each unable to serve
        for metadata in (replace(measured.metadata, model_shape=str(number), kernels="another"),
                         replace(measured.metadata, model_shape=str(number),
                                 origin="estimated like another")):
            save_profile(replace(measured, metadata=metadata),
                         cached_profile_path(machine.folder, metadata))
    assert len(list(machine.folder.glob("*float32-*.json"))) == 33
    found = plan_job(job_of(tmp_path))
    assert "estimated like opt-125m" in found.timing.provenance()


def test_a_profile_that_another_process_takes_away_is_none(
        tmp_path: Path, machine: Machine) -> None:
    gone = machine.folder / "float32-1x2-gone.json"
    gone.symlink_to(tmp_path / "nowhere")  # listed, and not there
    found = plan_job(job_of(tmp_path))
    assert "estimated from this machine's peaks" in found.timing.provenance()


def test_a_profile_interrupted_before_its_first_point_is_passed_over(
        tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    (path,) = machine.folder.glob("float32-*.json")
    save_profile(replace(load_profile(path), tables={}), path)
    found = plan_job(job_of(tmp_path))
    assert (machine.profiled, machine.calibrated) == (1, 1)
    assert "estimated from this machine's peaks" in found.timing.provenance()


@pytest.mark.parametrize("run", [", temperature: 0.8", ", weight_dtype: int8"])
def test_what_peaks_say_nothing_of_is_measured(
        tmp_path: Path, machine: Machine, run: str) -> None:
    assert known_times(wanted_of(job_of(tmp_path, run=run)), LogTeller(),
                       job_of(tmp_path).problem.cluster.device) is None
    assert not machine.calibrated


def test_a_nearer_source_counts_until_runs_have_told(tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path))
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    found = plan_job(job_of(tmp_path)).timing
    assert isinstance(found, ProfileTiming)
    assert "estimated like opt-125m" in found.provenance()
    path = cached_profile_path(machine.folder, found.profile.metadata)
    told = replace(load_profile(path), learned=(LEARNED,), metadata=replace(
        found.profile.metadata, origin="estimated from this machine's peaks"))
    save_profile(told, path)
    again = plan_job(job_of(tmp_path)).timing
    assert "estimated from this machine's peaks" in again.provenance()


def test_of_several_ranks_nothing_is_known_without_their_messages(
        tmp_path: Path, machine: Machine) -> None:
    plan_job(job_of(tmp_path, count=200_000, model="opt-125m"))  # on one rank
    assert known_times(wanted_of(job_of(tmp_path, ranks=2)), LogTeller(),
                       job_of(tmp_path).problem.cluster.device) is None


def test_what_runs_took_is_added_and_kept(tmp_path: Path, machine: Machine) -> None:
    first = plan_job(job_of(tmp_path)).timing
    assert isinstance(first, ProfileTiming)
    path = cached_profile_path(machine.folder, first.profile.metadata)
    save_profile(replace(load_profile(path), learned=(LEARNED,)), path)
    assert has_learned_since(first)
    second = plan_job(job_of(tmp_path, count=7)).timing
    assert isinstance(second, ProfileTiming) and second.profile.learned == (LEARNED,)
    assert "as runs here took since: decode steps x 1.60" in second.provenance()
    assert machine.profiled == 0


def test_what_a_run_adds_while_times_are_estimated_anew_stays(
        tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_job(job_of(tmp_path)).timing
    assert isinstance(first, ProfileTiming)
    path = cached_profile_path(machine.folder, first.profile.metadata)

    def meanwhile(wanted: WantedProfile, known: Known) -> Profile | None:
        if not load_profile(path).learned:
            assert learning.add([LEARNED], path, first.profile.metadata.origin)
        return estimate(wanted, known)

    estimate = app._estimated
    monkeypatch.setattr(app, "_estimated", meanwhile)
    second = plan_job(job_of(tmp_path)).timing
    assert isinstance(second, ProfileTiming) and second.profile.learned == (LEARNED,)
    assert load_profile(path).learned == (LEARNED,)


def test_what_a_run_took_is_added_to_no_other_estimate(
        tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "learned_of", lambda *_: (LEARNED,))
    job = job_of(tmp_path)
    first = plan_job(job)
    plan_job(job_of(tmp_path, model="opt-125m", count=200_000))
    second = plan_job(job)  # while the first runs: by opt-125m
    assert learning.learn(job, first.timing, first.schedule, None) == ()
    assert not has_learned_since(second.timing)
    assert learning.learn(job, second.timing, second.schedule, None) == (LEARNED,)
    assert has_learned_since(second.timing)


def test_margins_are_as_wide_as_estimates_may_be_off(tmp_path: Path, machine: Machine) -> None:
    found = plan_job(job_of(tmp_path, bound="60"))
    assert machine.profiled == 0
    margin = found.schedule.margin
    assert margin.factor >= math.exp(ESTIMATED_ERROR)
    assert "since estimated times may be off" in margin.note


@pytest.mark.parametrize("bound", ["0.0001", "3"])
def test_a_bound_that_estimates_do_not_keep_is_measured_for(
        tmp_path: Path, machine: Machine, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bound == "3":  # that costs much of a job's time by margins alone
        monkeypatch.setattr(plan, "timing_cost_s", lambda *_: 1e-9)
    job = job_of(tmp_path, bound=bound)
    try:
        found = plan_job(job)
    except InfeasibleError:
        assert bound == "0.0001"
    else:
        assert "estimated" not in found.timing.provenance()
    assert machine.profiled == 1


def test_peaks_of_a_machine_that_others_used_are_measured_again(
        tmp_path: Path, machine: Machine) -> None:
    machine.missing = 0.43
    found = plan_job(job_of(tmp_path))
    assert "peaks (measured while others had 43% of it) on" in found.timing.provenance()
    machine.missing = 0.0
    again = job_of(tmp_path)
    assert "others had" not in plan_job(again).timing.provenance()
    assert any("at most, again, since others had 43% of it" in said for said in again.tell.said)
    plan_job(job_of(tmp_path))
    assert machine.calibrated == 2


def test_of_a_machine_that_is_never_quiet_the_best_of_three_stays(
        tmp_path: Path, machine: Machine) -> None:
    machine.missing = 0.43
    for _ in range(5):
        found = plan_job(job_of(tmp_path))
    assert machine.calibrated == 3 and "others had 43% of it" in found.timing.provenance()


def test_of_disturbed_peaks_the_better_are_kept(tmp_path: Path) -> None:
    keep_peaks(tmp_path, "one", KeptPeaks(PEAKS, 0.4))
    keep_peaks(tmp_path, "one", KeptPeaks(replace(
        PEAKS, flops_per_s=1e11, bandwidth_bytes_per_s=3e10), 0.2))
    assert kept_peaks(tmp_path, "one") == KeptPeaks(
        replace(PEAKS, bandwidth_bytes_per_s=3e10), 0.2, tries=2)


def test_peaks_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    metadata = profile_of(catalog.model("opt-125m"), 1, 2, amdahl(0.1)).metadata
    assert kept_peaks(tmp_path, name_of(metadata)) is None
    keep_peaks(tmp_path, name_of(metadata), KeptPeaks(PEAKS, 0.0))
    keep_peaks(tmp_path, "another", KeptPeaks(replace(PEAKS, flops_per_s=1e9), 0.0))
    assert kept_peaks(tmp_path, name_of(metadata)) == KeptPeaks(PEAKS, 0.0)
    for text in ("{", "[]", '{"another": {"flops_per_s": "x"}}'):
        (tmp_path / "peaks.json").write_text(text, encoding="utf-8")
        assert kept_peaks(tmp_path, "another") is None
    for key in ("flops_per_s", "bandwidth_bytes_per_s"):
        for value in (0.0, -1.0, 1e-300, math.inf, math.nan, 10**400):
            written = {"flops_per_s": 1e11, "bandwidth_bytes_per_s": 1e10, "source": "",
                       "missing": 0.0, "tries": 1, key: value}
            (tmp_path / "peaks.json").write_text(json.dumps({"one": written}), encoding="utf-8")
            assert kept_peaks(tmp_path, "one") is None
