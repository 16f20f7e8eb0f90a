"""A profile of this machine: of few points for a job, of more where it is long, or whole."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from problems import toy_problem
from profiles import amdahl, profile_of
from runs import Told

from jobs import opened as opened_job
from xgpt.app import profile as app
from xgpt.app.needed_profile import NeededProfile, job_sizes, needed_profile
from xgpt.app.opened_job import OpenedJob
from xgpt.app.profile import local_profile, quick_profile
from xgpt.app.running.metrics import LEAST_STEPS, learn, learned_of
from xgpt.app.schedule import executable, plan_job
from xgpt.app.teller import LogTeller
from xgpt.core.cluster import Link, Tier
from xgpt.core.controls import FixedSchedule
from xgpt.core.model import ModelSpec
from xgpt.core.schedule import Schedule
from xgpt.launch.launcher import RankProgram
from xprofiler.measure import probe as clock
from xprofiler.measure import ranks, streaming, worker
from xprofiler.points import MOST_TRIES, Kind, Needs, Point, quick_points, skeleton, skipped_points
from xprofiler.profile import LearnedSteps, Profile, TableKey, cached_profile_path
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator
from xrunner.files.heartbeat import ReportedStep
from xscheduler.live.step_monitor import Ratios

TOY = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=32, num_heads=2,
                num_kv_heads=1, vocab_size=64, intermediate_size=48, max_positions=200)


class Here:
    """Starts the measuring rank in this process."""

    is_here = True

    def run(self, program: RankProgram, watch: Callable[[], object],
            ask_to_stop: Callable[[], object]) -> None:
        assert program.module == "xprofiler.measure.worker" and program.count == 1
        worker.main([str(program.argument)])
        watch()


@pytest.fixture()
def measured(monkeypatch, tmp_path):
    """How often each point was measured. None is noisy or disturbed, however busy the machine
    is."""
    monkeypatch.setattr("xprofiler.points.NOISE_LIMIT", math.inf)
    monkeypatch.setattr("xprofiler.measure.ranks.missing_share", lambda *_: 0.0)
    counts: Counter[Point] = Counter()
    measure = worker.Measuring._measure

    def counting(session: worker.Measuring, bench: worker.LayerBench, degree: int,
                 point: Point) -> None:
        counts[point] += 1
        measure(session, bench, degree, point)

    monkeypatch.setattr(worker.Measuring, "_measure", counting)
    for name, value in (("_MAX_STEPS", 5), ("_ATTEMPTS", 1), ("_PAUSE_S", 0.0)):
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr(clock, "_SIDE", 64)
    monkeypatch.setattr(clock, "_BYTES", 2**20)
    monkeypatch.setattr(app, "cache_dir", lambda: tmp_path)
    return counts


def job_of(folder: Path, count: int, **sections: str) -> OpenedJob:
    return opened_job(folder, **sections, cluster="local", output="out", workload=(
        f"{{requests: {{count: {count}}}, input_tokens: {{mean: 40, std: 20, max: 80}}, "
        "output_tokens: {mean: 12, std: 5, max: 24}}"))


@pytest.fixture()
def wanted(tmp_path):
    own = job_of(tmp_path, 20, model="smollm2-135m", run=(
        "{dtype: float32, ranks: 1, threads_per_rank: 1, weights: random}"))
    found = needed_profile(own.job, replace(own.problem, model=TOY))
    assert found.own.queries == 20 and found.own.context_tokens == 80 + 24
    return replace(  # smaller, to be measured in a moment
        found, launcher=Here(),
        needs=Needs(input_tokens=100, context_tokens=130, queries=33, tokens=700),
        own=Needs(input_tokens=60, context_tokens=90, queries=9, tokens=240))


def test_a_job_begins_with_few_points_and_later_ones_add_to_them(wanted, measured):
    quick = quick_profile(wanted, LogTeller())
    points = quick_points(TOY, wanted.needs, wanted.own)
    assert set(measured) == set(points) and len(points) < 30
    assert skipped_points(quick, 1) and quick.peaks is None
    tell = Told()
    assert quick_profile(wanted, tell) == quick, "of which nothing is measured again"
    assert "from the cache" in tell.lines[0]
    smaller = replace(wanted, own=replace(wanted.own, input_tokens=15, queries=5, tokens=75))
    assert quick_points(TOY, smaller.needs, smaller.own) != points
    assert quick_profile(smaller, LogTeller()) == quick, "nor for sizes within"
    assert ProfileTiming(quick).table_errors()[TableKey("layer_rest")].is_brief

    larger = replace(wanted, own=replace(wanted.own, queries=20, tokens=600))
    quick_profile(larger, LogTeller())
    assert Point(Kind.DECODE, 33, 17) in measured and Point(Kind.REST, 700) in measured

    whole = local_profile(wanted, LogTeller())
    assert set(skeleton(TOY, wanted.needs)) <= set(measured)
    assert skipped_points(whole, 1) == [] and whole.peaks is not None
    assert whole.spent_s > quick.spent_s
    assert max(measured.values()) == 1, "no point was measured twice"
    assert local_profile(wanted, LogTeller()) == whole == quick_profile(wanted, LogTeller())


def test_copies_beside_computing_are_measured_once_where_bytes_may_lie_below_the_devices(
        wanted, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "ENOUGH_S", 0.0)
    monkeypatch.setattr("xprofiler.profile.DISTURBED_LIMIT", 99.0)  # however busy the machine is
    assert wanted.offload is None and quick_profile(wanted, LogTeller()).serial_share is None
    counts = Counter(measured)
    link = Link(name="disk", bandwidth_bytes_per_s=1e9, latency_s=0.0)
    cluster = replace(wanted.problem.cluster, tiers=(
        Tier(name="disk", memory_bytes=10**9, up=link, down=link),))
    placed = replace(wanted, problem=replace(wanted.problem, cluster=cluster))
    assert placed.offload == tmp_path, "the nearest folder that is there"
    profile = quick_profile(placed, LogTeller())
    assert 0 <= profile.serial_share <= 1 and profile.table("unpack")
    assert measured == counts, "and no other size again"
    assert quick_profile(placed, LogTeller()) == profile == quick_profile(wanted, LogTeller())
    off = replace(wanted.problem, cluster=cluster, offload="off")
    assert replace(wanted, problem=off).offload is None


def _kept(wanted: NeededProfile, change: Callable[[Profile], Profile]) -> None:
    """Changes the cached profile."""
    path = cached_profile_path(app.cache_dir() / "profiles", wanted.metadata)
    save_profile(change(load_profile(path)), path)


def test_a_cached_profile_that_cannot_be_read_is_told_of_once_and_measured_whole(wanted, measured):
    path = cached_profile_path(app.cache_dir() / "profiles", wanted.metadata)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    tell = Told()
    quick_profile(wanted, tell)
    assert measured and sum("is not used" in text for text in tell.lines) == 1
    quick_profile(wanted, LogTeller())
    whole = local_profile(wanted, LogTeller())
    assert set(measured) == set(skeleton(TOY, wanted.needs)), "and no more"
    assert skipped_points(whole, 1) == [] and max(measured.values()) == 1


def test_a_profile_that_runs_have_added_to_is_measured_no_further(wanted, measured):
    quick_profile(wanted, LogTeller())
    before = sum(measured.values())
    learned = LearnedSteps(kind="decode", rows=8.0, factor=1.1, spread=0.1, steps=99,
                           date="2026-11-23")
    _kept(wanted, lambda profile: replace(profile, learned=(learned,)))
    larger = replace(wanted, own=replace(wanted.own, queries=17, tokens=500))
    found = quick_profile(larger, LogTeller())
    assert sum(measured.values()) == before and found.learned == (learned,)
    timing, plain = ProfileTiming(found), ProfileTiming(replace(found, learned=()))
    ratio = timing.operator_s(Operator.LAYER_REST, 8.0) / plain.operator_s(
        Operator.LAYER_REST, 8.0)
    assert ratio == pytest.approx(1.1) and "scaled by later runs here" in timing.provenance()
    beyond = replace(wanted, needs=replace(wanted.needs, queries=130, tokens=2080),
                     own=replace(wanted.own, queries=130, tokens=2080))
    quick_profile(beyond, LogTeller())
    assert sum(measured.values()) > before, "more than twice what was measured"


def test_what_others_disturbed_is_measured_again_once_it_is_quieter(wanted, measured, monkeypatch):
    quick = quick_profile(wanted, LogTeller())
    key = TableKey("decode_attention")
    place = next(p for p in quick.table(key.name) if p.x > 1)

    def disturb(profile: Profile) -> Profile:
        return replace(profile, tables={**profile.tables, key: tuple(
            replace(p, missing=0.4) if p == place else p for p in profile.table(key.name))})

    _kept(wanted, disturb)
    before = Counter(measured)
    monkeypatch.setattr(app, "_is_as_busy", lambda missing: True)
    quick_profile(wanted, LogTeller())
    assert measured == before, "no better now"
    monkeypatch.setattr(app, "_is_as_busy", lambda missing: False)
    again = quick_profile(wanted, LogTeller())
    assert measured - before == Counter({Point(Kind.DECODE, int(place.x), int(place.y)): 1})
    assert not any(p.is_disturbed for p in again.table(key.name))


def test_on_a_machine_that_is_never_quiet_measuring_comes_to_an_end(wanted, measured, monkeypatch):
    quick, key = quick_profile(wanted, LogTeller()), TableKey("decode_attention")
    before, last = Counter(measured), quick.table(key.name)[-1]
    place = Point(Kind.DECODE, int(last.x), int(last.y))
    _kept(wanted, lambda profile: replace(profile, tables={**profile.tables, key: tuple(
        replace(p, missing=0.4) if (p.x, p.y) == (place.x, place.y) else p
        for p in profile.table(key.name))}))
    monkeypatch.setattr(app, "_is_as_busy", lambda missing: False)
    monkeypatch.setattr(app, "QUICK_PATIENCE_S", 0.0)
    monkeypatch.setattr("xprofiler.measure.ranks.missing_share", lambda *_: 0.5)
    for _ in range(MOST_TRIES + 2):
        profile = quick_profile(wanted, LogTeller())
    assert measured - before == Counter({place: MOST_TRIES - 1}), "once it had been before"
    kept = next(p for p in profile.table(key.name) if (p.x, p.y) == (place.x, place.y))
    assert (kept.missing, kept.tries) == (0.4, MOST_TRIES), "the best stays"


def test_a_job_of_few_queries_is_measured_at_what_its_fixed_schedule_keeps_present():
    """Two queries by a schedule for more are planned as if batches filled: of sizes beyond what
    was measured no schedule would be left."""
    few, usual = replace(toy_problem(latency_s=9.0), num_queries=2), Needs()
    assert job_sizes(few, usual).queries == 2
    for fixed in (FixedSchedule(encode_batch=6), FixedSchedule(max_active=20)):
        assert job_sizes(replace(few, fixed=fixed), usual).queries == usual.queries


# What a run's log of steps teaches the profile that it was planned with.


SHORT = ReportedStep("decode", 2, 2, 2, 45.0, 60, 0.0, 1.0)
LONG = ReportedStep("decode", 64, 64, 64, 45.0, 60, 0.0, 1.0)
ENCODE = ReportedStep("encode", 4, 160, 0, 0.0, 0, 40.0, 1.0)


@dataclass
class Ran:
    """A job that was planned, and the log of what its steps took."""

    opened: OpenedJob
    profile: Profile
    schedule: Schedule

    def expected_s(self, step: ReportedStep) -> float:
        ratio = Ratios(self.opened.problem, ProfileTiming(self.profile), self.schedule.estimate,
                       longest=104).of(0, step)
        return ratio.expected_s

    def learned(self, *took: tuple[ReportedStep, float, int]) -> dict[str, LearnedSteps]:
        """By kind, from steps that took so many times what was expected, each so often."""
        rows = []
        for step, factor, count in took:
            row = {**step._asdict(), "stage": 0, "start_s": 3.0,
                   "end_s": 3.0 + factor * self.expected_s(step)}
            del row["seconds"]
            rows += [json.dumps(row)] * count
        log = self.opened.job.output / "steps.jsonl"
        log.parent.mkdir(exist_ok=True)
        log.write_text("\n".join(rows) + "\n")
        return {own.kind: own for own in learned_of(
            self.opened, self.profile, self.schedule, log)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    opened = executable(job_of(
        tmp_path_factory.mktemp("job"), 80, model="opt-125m",
        run="{dtype: float32, ranks: 1, threads_per_rank: 1}", schedule=(
            "{policy: rra, replicas: 1, encode_batch: 16, decode_iterations: 4, encode_chunk: 0}")))
    profile = profile_of(opened.problem.model, 1, 1, amdahl(0.0))
    return Ran(opened, profile, plan_job(opened, ProfileTiming(profile)).schedule)


def test_the_ratio_of_sums_is_learned_of_one_shape(ran):
    own = ran.learned((SHORT, 0.9, 80), (LONG, 1.1, 60))["decode"]
    short_s, long_s = 80 * ran.expected_s(SHORT), 60 * ran.expected_s(LONG)
    assert own.factor == pytest.approx((0.9 * short_s + 1.1 * long_s) / (short_s + long_s),
                                       abs=1e-4)
    assert own.factor > 1.01, "most steps are short, and most time is that of the long"
    assert own.steps == 140 and own.rows == 2.0
    assert own.spread == pytest.approx(0.2 / own.factor, abs=1e-3)
    estimate = ran.schedule.estimate
    both = Ran(ran.opened, ran.profile, ran.schedule.changed(
        estimate=estimate.beside((estimate.one_copy,))))
    assert ran.learned((LONG, 1.1, 97)) and not both.learned((LONG, 1.1, 97))


@pytest.mark.parametrize("outlier", [50.0, 0.02])
def test_a_few_steps_far_out_teach_nothing(ran, outlier):
    own = ran.learned((LONG, 1.1, 97), (LONG, outlier, 3))["decode"]
    assert own.factor == pytest.approx(1.1, abs=1e-4) and own.steps == 100


@pytest.mark.parametrize("factors", [(1.0, 1.5), (1.5, 1.0)])
def test_what_was_slowed_while_the_run_lasted_teaches_nothing(ran, factors):
    """The next run would be planned for a machine that is slower than this one."""
    before, after = factors
    found = ran.learned((LONG, before, 50), (LONG, after, 150), (ENCODE, 1.2, 60))
    assert set(found) == {"encode"}
    assert set(ran.learned((LONG, 1.5, 200))) == {"decode"}, "slow from the first step on"


def test_a_kind_with_few_steps_is_not_learned_and_keeps_its_times(ran, monkeypatch):
    monkeypatch.setattr("xgpt.app.running.metrics.LONG_S", math.inf)
    found = ran.learned((LONG, 0.92, 200), (ENCODE, 1.03, LEAST_STEPS - 1))
    assert set(found) == {"decode"}
    both = ran.learned((LONG, 0.92, 200), (ENCODE, 1.03, LEAST_STEPS))
    assert set(both) == {"decode", "encode"}
    knows = Ran(ran.opened, replace(ran.profile, learned=tuple(
        replace(own, rows=8.0) for own in found.values())), ran.schedule)
    # but for the head, which is that of decode steps with as few queries
    assert knows.expected_s(ENCODE) == pytest.approx(ran.expected_s(ENCODE), rel=0.006)
    at_8 = SHORT._replace(queries=8, tokens=8, decoded=8)
    overhead_s = ProfileTiming(ran.profile).facts.step_overhead_s
    assert knows.expected_s(at_8) - overhead_s == pytest.approx(
        0.92 * (ran.expected_s(at_8) - overhead_s), rel=0.002)


def test_few_steps_that_are_long_teach_as_well(ran, monkeypatch):
    took_s = 3 * 1.2 * ran.expected_s(ENCODE)
    monkeypatch.setattr("xgpt.app.running.metrics.LONG_S", 0.99 * took_s)
    own = ran.learned((ENCODE, 1.2, 3))["encode"]
    assert own.factor == pytest.approx(1.2, abs=1e-4) and own.steps == 3
    assert not ran.learned((ENCODE, 1.2, 2)), "two may be anything"
    monkeypatch.setattr("xgpt.app.running.metrics.LONG_S", 1.01 * took_s)
    assert not ran.learned((ENCODE, 1.2, 3))


# Reads the profile slowly: two that do so at once both read what was there before either wrote.
_ADDS = """
import sys, time
from pathlib import Path
from xgpt.app.running import metrics as learn
from xprofiler.profile import LearnedSteps
read = learn.load_profile
def slowly(path):
    profile = read(path)
    time.sleep(0.4)
    return profile
learn.load_profile = slowly
kind = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
learn.add([LearnedSteps(kind=kind, rows=2.0, factor=1.25, spread=0.1, steps=50,
                        date="2026-11-26")], Path(sys.argv[1]))
"""

def test_two_processes_that_learn_at_once_both_add(ran, tmp_path):
    path = tmp_path / "profiles" / "one.json"
    path.parent.mkdir()
    save_profile(ran.profile, path)
    processes = [subprocess.Popen(
        [sys.executable, "-c", _ADDS, str(path), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for kind in ("decode", "encode")]
    for one in processes:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in processes:
        one.stdin.write("\n")
        one.stdin.flush()
    for one in processes:
        one.communicate(timeout=60)
    assert [one.returncode for one in processes] == [0, 0]
    assert {own.kind for own in load_profile(path).learned} == {"decode", "encode"}


def test_a_run_whose_times_cannot_be_kept_is_done_all_the_same(ran, tmp_path, monkeypatch):
    said: list[str] = []

    class Told:
        say = staticmethod(said.append)

    path = cached_profile_path(tmp_path / "profiles", ran.profile.metadata)
    path.parent.mkdir()
    save_profile(ran.profile, path)
    monkeypatch.setattr("xgpt.app.running.metrics.cache_dir", lambda: tmp_path)
    ran.learned((SHORT, 1.5, 2 * LEAST_STEPS))  # writes the log
    opened = replace(ran.opened, tell=Told())
    assert learn(opened, ProfileTiming(ran.profile), ran.schedule, 0.0) and not said

    def refuses(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("xgpt.app.running.metrics.save_profile", refuses)
    assert learn(opened, ProfileTiming(ran.profile), ran.schedule, 0.0) == ()
    assert said and "not added to the profile" in said[0] and str(path) in said[0]
