"""A profile of this machine: of few points for a job, of more where it is long, or whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from xgpt.app import local_profile as app
from xgpt.app.local_profile import (
    WantedProfile,
    local_profile,
    quick_profile,
    wanted_profile,
)
from xgpt.app.opened import open_file
from xgpt.app.profile_needs import share_of, work_of
from xgpt.app.telling import LogTeller
from xgpt.core.model import ModelSpec
from xgpt.launch.launcher import RankProgram
from xprofiler.cache import cached_profile_path
from xprofiler.coarse import START_S, JobWork, coarse_points, coarse_words, left_to_shape
from xprofiler.measure import clock, ranks, worker
from xprofiler.noise import MOST_TRIES
from xprofiler.points import Kind, Needs, Point, left_out, quick_points, skeleton
from xprofiler.profile import LearnedSteps, Profile, TableKey
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator
from xrunner.engines.engine import engine_of

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


class Kept(LogTeller):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture()
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[Point]:
    """How often each point was measured. None is noisy or disturbed, however busy the machine
    is."""
    monkeypatch.setattr("xprofiler.noise.NOISE_LIMIT", math.inf)
    monkeypatch.setattr("xprofiler.measure.disturbance.missing_share", lambda *_: 0.0)
    monkeypatch.setattr("xprofiler.measure.disturbance.Calibration.slowed", lambda _: 1.0)
    counts: Counter[Point] = Counter()
    measure = worker.Measuring._measure

    def counting(session: worker.Measuring, bench: worker.Bench, degree: int,
                 point: Point) -> None:
        counts[point] += 1
        measure(session, bench, degree, point)

    monkeypatch.setattr(worker.Measuring, "_measure", counting)
    for name, value in (("_MAX_STEPS", 5), ("_ATTEMPTS", 1), ("_PAUSE_S", 0.0)):
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr(clock, "_SIDE", 64)
    monkeypatch.setattr(clock, "_BYTES", 2**20)
    monkeypatch.setattr(app, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(app, "DEFAULT_BUDGET_S", 0.1)
    return counts


@pytest.fixture()
def wanted(tmp_path: Path) -> WantedProfile:
    path = tmp_path / "job.yaml"
    path.write_text("""
model: smollm2-135m
cluster: local
workload: {requests: {count: 20}, input_tokens: {mean: 40, std: 20, max: 80},
           output_tokens: {mean: 12, std: 5, max: 24}}
run: {dtype: float32, ranks: 1, threads_per_rank: 1, weights: random}
output: out
""")
    opened = open_file(path)
    found = wanted_profile(opened.job, replace(opened.problem, model=TOY))
    assert found.own.queries == 20 and found.own.context_tokens == 80 + 24
    return replace(  # smaller, to be measured in a moment
        found, launcher=Here(),  # type: ignore[arg-type]
        needs=Needs(input_tokens=100, context_tokens=130, queries=33, tokens=700),
        own=Needs(input_tokens=60, context_tokens=90, queries=9, tokens=240), share=math.inf)


def test_a_job_begins_with_few_points_and_later_ones_add_to_them(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
    quick = quick_profile(wanted, LogTeller())
    points = quick_points(TOY, wanted.needs, wanted.own)
    assert set(measured) == set(points) and len(points) < 30
    assert left_out(quick, 1) and quick.peaks is None
    assert quick_profile(wanted, LogTeller()) == quick, "of which nothing is measured again"

    larger = replace(wanted, own=replace(wanted.own, queries=20, tokens=600))
    quick_profile(larger, LogTeller())
    assert Point(Kind.DECODE, 33, 17) in measured and Point(Kind.REST, 700) in measured

    whole = local_profile(wanted, LogTeller())
    assert set(skeleton(TOY, wanted.needs)) <= set(measured)
    assert left_out(whole, 1) == [] and whole.peaks is not None
    assert whole.spent_s > quick.spent_s
    assert max(measured.values()) == 1, "no point was measured twice"
    assert local_profile(wanted, LogTeller()) == whole == quick_profile(wanted, LogTeller())


def few(wanted: WantedProfile, **changes: object) -> WantedProfile:
    """For a job of so little work that it is worth no more than the least points."""
    return replace(wanted, **{  # type: ignore[arg-type]
        "share": 0.1, "own": replace(wanted.own, queries=33, tokens=600),
        "job": JobWork(queries=33, input_tokens=660, output_tokens=300), **changes})


def test_a_job_shorter_than_its_measuring_starts_with_the_least_points(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
    short = few(wanted)
    coarse, tell = quick_profile(short, Kept()), Kept()
    least = coarse_points(TOY, short.needs, short.own)
    assert set(measured) == set(least) and len(least) <= 10
    assert quick_profile(short, tell) == coarse and max(measured.values()) == 1
    assert "from the cache" in tell.said[0] and "coarse: 8 of the 13 sizes" in tell.said[0]
    timing = ProfileTiming(coarse)
    assert "coarse" in timing.provenance()
    errors = timing.table_errors()
    assert errors[TableKey("layer_rest")].is_brief
    assert errors[TableKey("layer_rest")].interpolation >= 0.1

    smaller = few(wanted, own=replace(short.own, input_tokens=15, queries=5, tokens=75))
    assert set(coarse_points(TOY, smaller.needs, smaller.own)) - set(least), "in between"
    assert quick_profile(smaller, Kept()) == coarse and set(measured) == set(least)

    quick = quick_profile(replace(short, share=math.inf), Kept())
    assert set(measured) == set(quick_points(TOY, short.needs, short.own))
    assert max(measured.values()) == 1, "points are added, and none is thrown away"
    assert not coarse_words(quick) and "coarse" not in ProfileTiming(quick).provenance()


def test_the_longer_a_job_the_more_points_it_is_worth(
        wanted: WantedProfile, measured: Counter[Point], monkeypatch: pytest.MonkeyPatch) -> None:
    now, effort, begun = [100.0], worker.quick_effort, worker.Measuring._measure

    def measure(session: worker.Measuring, bench: worker.Bench, degree: int, point: Point) -> None:
        begun(session, bench, degree, point)
        now[0] += 0.1 * effort(point)

    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(worker.Measuring, "_measure", measure)
    least, every = (0.1 * sum(map(effort, points(TOY, wanted.needs, few(wanted).own)))
                    for points in (coarse_points, quick_points))
    counts, between = [], 10 * (START_S + (least + every) / 2)  # of a job worth some of them
    for seconds in (10.0, between, 1000.0):
        monkeypatch.setattr("xprofiler.measure.budget.expected_s",
                            lambda *_, s=seconds, **__: s)
        now[0], before = 100.0, sum(measured.values())
        cached_profile_path(app.cache_dir() / "profiles", wanted.metadata).unlink(missing_ok=True)
        profile = quick_profile(few(wanted), Kept())
        counts.append(sum(measured.values()) - before)
        assert now[0] - 100.0 <= max(0.1 * seconds - START_S, least) + 1e-9
        assert len(left_to_shape(profile, 1)) == 0 or seconds < 1000.0
    short, longer, long = counts
    assert short < longer < long == len(quick_points(TOY, wanted.needs, few(wanted).own))


def test_beside_others_no_more_than_the_least_is_measured(
        wanted: WantedProfile, measured: Counter[Point], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xprofiler.measure.budget.expected_s", lambda *_, **__: 1e6)
    monkeypatch.setattr("xprofiler.measure.disturbance.missing_share", lambda *_: 0.5)
    monkeypatch.setattr(app, "QUICK_PATIENCE_S", 0.0)
    quick_profile(few(wanted), LogTeller())
    least = set(coarse_points(TOY, wanted.needs, few(wanted).own))
    assert set(measured) == least
    monkeypatch.setattr("xprofiler.measure.disturbance.missing_share", lambda *_: 0.0)
    quick_profile(few(wanted, own=replace(wanted.own, queries=33, tokens=700, input_tokens=90)),
                  LogTeller())
    assert len(measured) > len(least) + 2, "of a job so long"


def test_what_runs_took_against_few_points_is_not_said_of_more(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
    quick_profile(few(wanted), LogTeller())
    learned = LearnedSteps(kind="decode", rows=8.0, factor=1.1, spread=0.1, steps=99,
                           date="2026-11-23")
    _kept(wanted, lambda profile: replace(profile, learned=(learned,)))
    before = sum(measured.values())
    assert quick_profile(few(wanted), LogTeller()).learned == (learned,)
    assert sum(measured.values()) == before
    assert local_profile(wanted, LogTeller(), budget_s=0.01).learned == ()


@pytest.mark.parametrize(("bound", "cluster", "expected"), [
    ("inf", "local", 0.1), ("9.0", "local", 0.2), ("9.0", "a40-4", math.inf)])
def test_a_bound_is_worth_twice_as_much_measuring(
        tmp_path: Path, bound: str, cluster: str, expected: float) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"""
model: smollm2-135m
cluster: {cluster}
workload: {{requests: {{count: 20}}, input_tokens: {{mean: 40, std: 20, max: 80}},
           output_tokens: {{mean: 12, std: 5, max: 24}}}}
constraint: {{latency_s: {bound}}}
run: {{dtype: bfloat16, weights: random}}
output: out
""")
    opened = open_file(path)
    problem = opened.problem
    assert share_of(problem, engine_of(opened.job)) == expected
    assert math.isinf(share_of(replace(problem, num_queries=None), engine_of(opened.job)))
    assert work_of(problem) == JobWork(
        queries=20, input_tokens=math.ceil(20 * problem.lengths.inputs.mean),
        output_tokens=math.ceil(20 * problem.lengths.outputs.mean))


def _kept(wanted: WantedProfile, change: Callable[[Profile], Profile]) -> None:
    """Changes the cached profile."""
    path = cached_profile_path(app.cache_dir() / "profiles", wanted.metadata)
    save_profile(change(load_profile(path)), path)


def test_a_cached_profile_that_cannot_be_read_is_told_of_once(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
    path = cached_profile_path(app.cache_dir() / "profiles", wanted.metadata)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    tell = Kept()
    quick_profile(few(wanted), tell)
    assert measured and sum("left aside" in text for text in tell.said) == 1


def test_a_profile_that_runs_have_added_to_is_measured_no_further(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
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
    assert ratio == pytest.approx(1.1) and "as runs here took since" in timing.provenance()
    beyond = replace(wanted, needs=replace(wanted.needs, queries=130, tokens=2080),
                     own=replace(wanted.own, queries=130, tokens=2080))
    quick_profile(beyond, LogTeller())
    assert sum(measured.values()) > before, "more than twice what was measured"


def test_what_others_disturbed_is_measured_again_once_it_is_quieter(
        wanted: WantedProfile, measured: Counter[Point],
        monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_on_a_machine_that_is_never_quiet_measuring_comes_to_an_end(
        wanted: WantedProfile, measured: Counter[Point],
        monkeypatch: pytest.MonkeyPatch) -> None:
    quick, key = quick_profile(wanted, LogTeller()), TableKey("decode_attention")
    before, last = Counter(measured), quick.table(key.name)[-1]
    place = Point(Kind.DECODE, int(last.x), int(last.y))
    _kept(wanted, lambda profile: replace(profile, tables={**profile.tables, key: tuple(
        replace(p, missing=0.4) if (p.x, p.y) == (place.x, place.y) else p
        for p in profile.table(key.name))}))
    monkeypatch.setattr(app, "_is_as_busy", lambda missing: False)
    monkeypatch.setattr(app, "QUICK_PATIENCE_S", 0.0)
    monkeypatch.setattr("xprofiler.measure.disturbance.missing_share", lambda *_: 0.5)
    for _ in range(MOST_TRIES + 2):
        profile = quick_profile(wanted, LogTeller())
    assert measured - before == Counter({place: MOST_TRIES - 1}), "once it had been before"
    kept = next(p for p in profile.table(key.name) if (p.x, p.y) == (place.x, place.y))
    assert (kept.missing, kept.tries) == (0.4, MOST_TRIES), "the best stays"


def test_measuring_a_profile_measures_it_whole(
        wanted: WantedProfile, measured: Counter[Point]) -> None:
    quick_profile(wanted, LogTeller())
    whole = local_profile(wanted, LogTeller(), budget_s=0.01)
    assert set(measured) == set(skeleton(TOY, wanted.needs)), "and no more, in so short a time"
    assert left_out(whole, 1) == [] and max(measured.values()) == 1


def test_the_time_left_is_true_when_points_take_as_long_as_they_should(
        wanted: WantedProfile, monkeypatch: pytest.MonkeyPatch, measured: Counter[Point],
        tmp_path: Path) -> None:
    now, told = [100.0], []
    effort = worker.quick_effort

    def measure(session: worker.Measuring, _bench: worker.Bench, _degree: int,
                point: Point) -> None:
        now[0] += 0.07 * effort(point)

    def save(session: worker.Measuring, *, force: bool = False) -> None:
        told.append((now[0], session._outlook()[1]))

    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(worker.Measuring, "_measure", measure)
    monkeypatch.setattr(worker.Measuring, "_save", save)
    monkeypatch.setattr(app, "load_profile", lambda _: Profile(metadata=wanted.metadata, tables={}))
    monkeypatch.setattr(app.os, "replace", lambda *_: None)
    quick_profile(wanted, LogTeller())
    assert len(told) > 10
    for at, left_s in told:
        assert left_s == pytest.approx(told[-1][0] - at, abs=1e-6)
