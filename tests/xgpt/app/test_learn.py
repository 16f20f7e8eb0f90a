"""What a run's log of steps teaches the profile that it was planned with."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from profiles import amdahl, profile_of

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.running.metrics import LEAST_STEPS, learn, learned_of
from xgpt.app.schedule import executable, plan_job
from xgpt.core.schedule import Schedule
from xprofiler.profile import LearnedSteps, Profile, cached_profile_path
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xrunner.files.beat import ToldStep
from xscheduler.live.pace import Ratios

SHORT = ToldStep("decode", 2, 2, 2, 45.0, 60, 0.0, 1.0)
LONG = ToldStep("decode", 64, 64, 64, 45.0, 60, 0.0, 1.0)
ENCODE = ToldStep("encode", 4, 160, 0, 0.0, 0, 40.0, 1.0)


@dataclass
class Ran:
    """A job that was planned, and the log of what its steps took."""

    opened: OpenedJob
    profile: Profile
    schedule: Schedule

    def expected_s(self, step: ToldStep) -> float:
        ratio = Ratios(self.opened.problem, ProfileTiming(self.profile), self.schedule.estimate,
                       longest=104).of(0, step)
        return ratio.expected_s

    def learned(self, *took: tuple[ToldStep, float, int]) -> dict[str, LearnedSteps]:
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
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text("""
model: opt-125m
cluster: local
workload: {requests: {count: 80}, input_tokens: {mean: 40, std: 20, max: 80},
           output_tokens: {mean: 12, std: 5, max: 24}}
schedule: {policy: rra, replicas: 1, encode_batch: 16, decode_iterations: 4, encode_chunk: 0}
run: {dtype: float32, ranks: 1, threads_per_rank: 1}
output: out
""")
    opened = executable(open_file(path))
    profile = profile_of(opened.problem.model, 1, 1, amdahl(0.0))
    return Ran(opened, profile, plan_job(opened, ProfileTiming(profile)).schedule)


def test_the_ratio_of_sums_is_learned(ran):
    own = ran.learned((SHORT, 0.9, 80), (LONG, 1.1, 60))["decode"]
    short_s, long_s = 80 * ran.expected_s(SHORT), 60 * ran.expected_s(LONG)
    assert own.factor == pytest.approx((0.9 * short_s + 1.1 * long_s) / (short_s + long_s),
                                       abs=1e-4)
    assert own.factor > 1.01, "most steps are short, and most time is that of the long"
    assert own.steps == 140 and own.rows == 2.0
    assert own.spread == pytest.approx(0.2 / own.factor, abs=1e-3)


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


def test_a_run_of_two_shapes_teaches_nothing(ran):
    estimate = ran.schedule.estimate
    both = Ran(ran.opened, ran.profile, ran.schedule.changed(
        estimate=estimate.beside((estimate.one_copy,))))
    assert ran.learned((LONG, 1.1, 97)) and not both.learned((LONG, 1.1, 97))


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
