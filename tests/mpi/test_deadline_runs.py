"""Deadlines of real runs: what is done and what expired are all requests, each once, over kills and
resumes; the share in time is as predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import ToyJob, await_lines

from xgpt.app.opened_job import open_file
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xscheduler.evaluator import predict

COUNT = 1500
RRA = "policy: rra, encode_batch: 6, decode_iterations: 4, order: input"
LATER = "constraint: {on_deadline: stop, attainment: 0.001, confidence: 0.5, deadline_s: "


def toy_job(folder: Path, schedule: str = RRA, limits: str = "", **more: Any) -> ToyJob:
    job = ToyJob(folder=folder, schedule=schedule, count=COUNT, **more).write()
    job.file.write_text(job.file.read_text() + limits + "\n")
    return job


def expired(job: ToyJob) -> set[int]:
    """Requests of errors.jsonl, each of which is there once and expired."""
    path = job.output / "errors.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {row["line"] - 1 for row in rows if row["code"] == "expired"}
    assert len(found) == len(rows)
    return found


def check_each_once(job: ToyJob) -> None:
    answers = [int(name[1:]) for name, _ in job.answers()]
    assert answers == sorted(answers)
    assert sorted([*answers, *expired(job)]) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "schedule"), [
    (1, RRA), (2, f"{RRA}, replicas: 2"), (2, "policy: waa-c, encode_batch: 6, order: input")])
def test_what_half_of_the_time_leaves_is_run_by_the_same_command(tmp_path, ranks, schedule):
    whole = toy_job(tmp_path / "whole", schedule, f"{LATER}1e6}}", ranks=ranks)
    assert whole.run_to_end().returncode == 0
    facts = json.loads((whole.output / "measured.json").read_text())
    half_s = facts["began_s"] + facts["wall_s"] / 2
    job = toy_job(tmp_path / "half", schedule, f"{LATER}{half_s}}}", ranks=ranks)
    stopped = job.run_to_end()
    assert stopped.returncode == 4, stopped.stderr
    assert 0 < len(expired(job)) < COUNT and "requests had not begun" in stopped.stderr
    check_each_once(job)
    assert job.run_to_end().returncode == 0
    check_each_once(job)
    assert job.answers() == whole.answers() and not expired(job)


@pytest.mark.slow
def test_no_line_is_lost_or_doubled_where_runs_are_killed(tmp_path):
    job = toy_job(tmp_path, RRA, f"{LATER}1e6}}", ranks=2)
    for at in (5, 200):  # the second while results of the first are kept
        process = job.start()
        assert await_lines(job, process, at)
        process.kill()
        process.wait(60)
        process.communicate()
    done = job.lines()
    kept = json.loads((job.output / "started.json").read_text())
    (job.output / "started.json").write_text(json.dumps({**kept, "at": kept["at"] - 2e6}))
    assert job.run_to_end().returncode == 4
    check_each_once(job)
    assert job.lines().items() >= done.items()
    process = job.start()  # the rest, to its end
    assert await_lines(job, process, len(job.lines()) + 20)
    process.kill()
    process.communicate()
    assert job.run_to_end().returncode == 0
    check_each_once(job)
    assert len(job.answers()) == COUNT


POLICIES = (RRA, "policy: orca, max_active: 8, order: input",
            "policy: ft, encode_batch: 8, order: input",
            "policy: sarathi, max_active: 8, token_budget: 64, order: input")


def submitted(job: ToyJob) -> Any:
    """The content of metrics.json of a run that measures its step times first."""
    words = [sys.executable, "-m", "xgpt.cli.main", "submit", str(job.file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600,
                          env={**os.environ, "XDG_CACHE_HOME": str(job.folder.parent / "cache")})
    assert done.returncode == 0, done.stderr
    return json.loads((job.output / "metrics.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", POLICIES)
def test_the_share_in_time_is_as_predicted(tmp_path, schedule):
    """Steps may be slower than predicted, all by one factor, where other programs are at work."""
    took_s = submitted(toy_job(tmp_path / "first", schedule))["wall_s"]["measured"]
    for place, spread in enumerate((0.6, 1.2)):  # of the deadlines, as a share of that time
        job = toy_job(tmp_path / f"own{place}", schedule,
                      "constraint: {attainment: 0.01, confidence: 0.5}")
        drawn = np.random.default_rng(5).uniform(0, spread * took_s, COUNT)
        rows = map(json.loads, (job.folder / "requests.jsonl").read_text().splitlines())
        (job.folder / "requests.jsonl").write_text("".join(
            json.dumps({**row, "deadline_s": 5 + float(own)}) + "\n"
            for row, own in zip(rows, drawn, strict=True)))
        metrics = submitted(job)
        slower = metrics["wall_s"]["measured"] / metrics["wall_s"]["predicted"]
        ends = predict(open_file(job.file, need="lengths").problem,
                       ProfileTiming(load_profile(job.output / "profile.json")),
                       load_schedule(job.output / "schedule.json").estimate).ends
        began_s = json.loads((job.output / "measured.json").read_text())["began_s"]
        share = metrics["attainment"]
        assert share["predicted"] == ends.in_time(delay_s=began_s)
        found = ends.in_time(slower, began_s)
        assert abs(share["measured"] - found) <= 0.08, (share, slower)
