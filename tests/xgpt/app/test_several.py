"""Several jobs of one command: what is wrong shows before the first runs, and what a run told of
its steps is planned with by those after it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiles import amdahl, profile_of

from xgpt.app import submit as several
from xgpt.app.opened import OpenedJob
from xgpt.app.schedule import Plan
from xgpt.app.telling import LogTeller
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xprofiler.profile import LearnedSteps, cached_profile_path
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xrunner.checkpoint.source import cache_dir

LEARNED = LearnedSteps(kind="decode", rows=8.0, factor=2.0, spread=0.1, steps=99, date="2026-11-26")
SHAPE = {"model_type": "opt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
         "ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 64, "eos_token_id": 3}
BETWEEN = "0.02"  # seconds: between what an answer takes before and after that


class Told(LogTeller):
    """Keeps the turns of the jobs."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def say(self, message: str) -> None:
        self.turns += [line[3:] for line in message.splitlines() if line.startswith("== ")]


class Machine:
    """One rank whose profile is cached; `slow`: names of jobs whose runs tell that steps take twice
    as long. Ranks alone are played."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, slow: tuple[str, ...]) -> None:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr("xgpt.app.schedule.timing_of", self.timing_of)
        patch.setattr(several, "execute", self.execute)
        self.slow, self.factors = slow, dict[str, list[float]]()
        self.path = Path()

    def timing_of(self, opened: OpenedJob) -> ProfileTiming:
        profile = profile_of(opened.problem.model, 1, 1, amdahl(0.0))
        self.path = cached_profile_path(cache_dir() / "profiles", profile.metadata)
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_profile(profile, self.path)
        return ProfileTiming(load_profile(self.path))

    def execute(self, plan: Plan) -> dict[str, Any]:
        assert isinstance(plan.timing, ProfileTiming)
        name = plan.opened.job.name
        self.factors[name] = [own.factor for own in plan.timing.profile.learned]
        if name in self.slow:
            known = load_profile(self.path)
            save_profile(replace(known, learned=(*known.learned, LEARNED)), self.path)
        return {"name": name, "queries": 6}


def job_of(folder: Path, name: str, bound: str = "inf") -> Job:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    path = folder / f"{name}.yaml"
    path.write_text(f"""
name: {name}
model: .
cluster: local
workload: {{requests: {{count: 6}}, input_tokens: {{mean: 20, std: 5, max: 30}},
           output_tokens: {{mean: 6, std: 2, max: 10}}}}
constraint: {{latency_s: {bound}}}
schedule: {{policy: rra, encode_batch: 2, decode_iterations: 4, encode_chunk: 0}}
run: {{ranks: 1, dtype: float32, threads_per_rank: 1, weights: random}}
output: out-{name}
""")
    return load_job(path)


def test_those_after_a_run_are_planned_by_what_it_told(tmp_path, monkeypatch):
    machine, told = Machine(monkeypatch, tmp_path, ("a", "c")), Told()
    jobs = [job_of(tmp_path, "a"), job_of(tmp_path, "never", "1 us"), job_of(tmp_path, "b"),
            job_of(tmp_path, "c"), job_of(tmp_path, "d")]
    with pytest.raises(several.SomeNotDone) as caught:
        several.submit_all(jobs, told)
    assert told.turns == [
        *(f"planning job {i} of 5: {job.name}" for i, job in enumerate(jobs, start=1)),
        "running job 1 of 5: a",
        "planning job 3 of 5 by what those before it took: b", "running job 3 of 5: b",
        "planning job 4 of 5 by what those before it took: c", "running job 4 of 5: c",
        "planning job 5 of 5 by what those before it took: d", "running job 5 of 5: d"]
    assert machine.factors == {"a": [], "b": [2.0], "c": [2.0], "d": [2.0, 2.0]}
    assert [job["status"] for job in caught.value.details["jobs"]] == [
        "done", "failed", "done", "done", "done"]


def test_where_runs_tell_nothing_a_job_is_planned_once(tmp_path, monkeypatch):
    machine, told = Machine(monkeypatch, tmp_path, ()), Told()
    done = several.submit_all([job_of(tmp_path, "a"), job_of(tmp_path, "b")], told)
    assert [turn.partition(":")[0] for turn in told.turns] == [
        "planning job 1 of 2", "planning job 2 of 2", "running job 1 of 2", "running job 2 of 2"]
    assert machine.factors == {"a": [], "b": []}
    assert [job["status"] for job in done["jobs"]] == ["done", "done"]


def test_what_keeps_its_bound_no_more_by_what_was_told_does_not_run(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, ("a",))
    with pytest.raises(several.SomeNotDone) as caught:
        several.submit_all([job_of(tmp_path, "a"), job_of(tmp_path, "b", BETWEEN)], Told())
    assert set(machine.factors) == {"a"} and caught.value.exit_code == 3
    assert "tightest" in caught.value.details["jobs"][1]["error"]
