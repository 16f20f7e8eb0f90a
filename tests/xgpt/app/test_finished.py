"""A job that is done says so and runs nothing; begun again, it keeps what it left."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_run
import fake_slurm
import pytest
from job_folder import xgpt
from profiles import amdahl, profile_of

from jobs import job_file
from xgpt.app import submit as several
from xgpt.app.opened_job import OpenedJob
from xgpt.app.running.finished import DONE, job_identity, move_earlier_run
from xgpt.app.teller import LogTeller
from xgpt.cli import run as command
from xgpt.core.errors import XgptError
from xgpt.core.schedule_file import write_json
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.requests.spool import Record
from xprofiler.profile import LearnedSteps, cached_profile_path
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xrunner.checkpoint.identity import model_files
from xrunner.checkpoint.source import cache_dir
from xrunner.files.lock import output_lock

COUNT = 5


class Ran(Exception):
    """The job was not taken for done."""

@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose run is done; another one would raise."""
    lines = [json.dumps({"id": str(i), "tokens": [3, 4]}) for i in range(COUNT)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n")
    path, out = job_file(
        tmp_path, model="opt-125m", cluster="local", constraint="{latency_s: 60}", output="out",
        workload="{requests: requests.jsonl, output_tokens: {mean: 9, std: 3, max: 16}}",
    ), tmp_path / "out"
    out.mkdir()
    fake_run.write_spool(out, [Record(id=str(i), line=i + 1) for i in range(COUNT)])
    (out / "results.jsonl").write_text("".join(f'{{"index": {i}}}\n' for i in range(COUNT)))
    write_json(out / "metrics.json", {"status": "done", "queries": COUNT, "errors": 0, "wall_s": 3})
    write_json(out / "job.json", {"asked": job_identity(load_job(path))})
    (out / "report.html").write_text("page")

    def ran(*_: object) -> None:
        raise Ran

    monkeypatch.setattr(command, "standby_for", ran)
    monkeypatch.chdir(tmp_path)
    return path


def test_it_is_told_in_a_line_and_in_an_object_unless_its_model_was_overwritten(job):
    done = xgpt("submit", job)
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr.splitlines()[0] == f"already done: {COUNT} of {COUNT} (out/results.jsonl)"
    assert "--again" in done.stderr and max(map(len, done.stderr.splitlines())) <= 80
    found = json.loads(xgpt("submit", job, "--json").stdout)
    assert (found["status"], found["queries"], found["queries_total"]) == (DONE, COUNT, COUNT)
    assert found["wall_s"] == 3 and found["results"] == str(job.parent / "out" / "results.jsonl")
    (job.parent / "out" / "report.html").unlink()  # which a killed launcher did not write
    assert "`xgpt report out` writes it" in xgpt("submit", job).stderr
    model = job.parent / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write_json(job.parent / "out" / "run.json", {
        "model_dir": str(model), "model_files": model_files(model)})
    assert xgpt("submit", job).returncode == 0
    (model / "config.json").write_text("{ }")
    anew = xgpt("submit", job)
    assert anew.returncode == 1 and "Ran" in anew.stderr and "config.json" in anew.stderr


def test_nothing_heavy_is_loaded_for_it(job):
    heavy = ["torch", "mpi4py", "scipy", "tokenizers", "xscheduler.planner", "xgpt.app.running.run"]
    script = ("import sys\nfrom xgpt.cli.main import main\ntry:\n    main()\nfinally:\n"
              f"    sys.exit([name for name in {heavy} if name in sys.modules] or 0)")
    done = subprocess.run([sys.executable, "-c", script, "submit", str(job)], timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "already done" in done.stderr, done.stderr


@pytest.mark.parametrize(("change", "said"), [
    ("run.seed=3", "run.seed"), ("constraint.latency_s=9", "constraint.bounds"),
    ("cluster=a40-4", "cluster"), ("workload.max_tokens=7", "workload.max_tokens"),
    ("name=job", "the requests")])
def test_another_job_is_run_and_the_change_is_named(job, change, said):
    if said == "the requests":
        (job.parent / "requests.jsonl").write_text('{"id": "0", "tokens": [5]}\n')
    run = xgpt("submit", job, "--set", change)
    assert run.returncode == 1 and "Ran" in run.stderr
    told = " ".join(run.stderr.split())
    assert f"finished results of another job (changed since: {said})" in told


def test_keys_of_another_version_are_no_change(job):
    saved = job.parent / "out" / "job.json"
    asked = json.loads(saved.read_text())["asked"]
    asked["job"]["run"]["gone"] = 1
    for bound in asked["job"]["constraint"]["bounds"]:
        bound["until"] = ""
    write_json(saved, {"asked": asked})
    assert xgpt("submit", job).returncode == 0


@pytest.mark.parametrize("spoil", [
    lambda out: (out / "metrics.json").unlink(),
    lambda out: (out / "metrics.json").write_text("{"),
    lambda out: (out / "metrics.json").write_text('{"status": "stopped", "queries": 5}'),
    lambda out: (out / "results.jsonl").write_text('{"index": 0}\n{"ind'),
    lambda out: (out / "job.json").write_text("{}"),
    lambda out: (out / "spool" / "spool.json").unlink()])
def test_what_is_not_whole_is_run(job, spoil):
    spoil(job.parent / "out")
    assert "Ran" in xgpt("submit", job).stderr


def test_begun_again_it_keeps_all_that_the_earlier_run_left(job):
    out = job.parent / "out"
    (out / "own.txt").write_text("the user's")
    before = (out / "results.jsonl").read_text()
    run = xgpt("submit", job, "--again")
    assert "Ran" in run.stderr
    (aside,) = out.glob("earlier-*")
    assert f"the earlier run's files were moved to out/{aside.name}" in run.stderr
    assert sorted(path.name for path in out.iterdir()) == [".lock", aside.name, "own.txt"]
    assert (aside / "results.jsonl").read_text() == before and (aside / "spool").is_dir()
    assert json.loads((aside / "metrics.json").read_text())["queries"] == COUNT
    assert move_earlier_run(out) is None, "nothing was left to move"


def test_no_folder_is_written_over_nor_one_that_a_run_is_writing_to(job):
    out, seen, texts = job.parent / "out", set(), ["first\n", "second\n", "third\n"]
    for text in texts:
        (out / "results.jsonl").write_text(text)
        seen.add(move_earlier_run(out))
    assert sorted((path / "results.jsonl").read_text() for path in seen) == texts
    (out / "results.jsonl").touch()
    with output_lock(out), pytest.raises(XgptError, match="another run is writing there"):
        move_earlier_run(out)
    assert (out / "results.jsonl").is_file() and {*out.glob("earlier-*")} == seen


def test_a_table_of_results_elsewhere_is_written_later_and_kept_too(job):
    done, table = xgpt("submit", job, "--results", "table.csv"), job.parent / "table.csv"
    assert done.returncode == 0 and f"results: {COUNT} rows in" in done.stderr
    lines = table.read_text().splitlines()
    assert lines[0].startswith("id,answer,") and [line[:2] for line in lines[1:]] == [
        f"{i}," for i in range(COUNT)]
    assert "Ran" in xgpt("submit", job, "--again", "--results", table).stderr
    (aside,) = (job.parent / "out").glob("earlier-*")
    assert not table.exists() and (aside / "table.csv").read_text().splitlines() == lines


def test_slurm_is_not_asked_for_what_is_done_unless_it_is_begun_again(job, tmp_path, monkeypatch):
    slurm = fake_slurm.install(tmp_path / "bin", monkeypatch)
    keys = ("--slurm", "--set", "slurm.time=60", "--set", "run.weights=random", "--set",
            "run.ranks=2")
    asked = load_job(job, ("run.weights=random", "run.ranks=2"))
    write_json(tmp_path / "out" / "job.json", {"asked": job_identity(asked)})
    done = xgpt("submit", job, *keys, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["jobs"][0]["status"] == DONE
    assert not [call for call in slurm.calls if call[0] == "sbatch"]
    again = xgpt("submit", job, *keys, "--again", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["jobs"][0]["job_id"] == "123"
    assert "--again" not in slurm.script, "requeued, it goes on"
    assert len(list((tmp_path / "out").glob("earlier-*"))) == 1


# Several jobs of one command: what a run told of its steps is planned with by those after it.


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
        patch.setattr(several.Run, "execute", lambda run: self.execute(run))
        self.slow, self.factors = slow, dict[str, list[float]]()
        self.path = Path()

    def timing_of(self, opened: OpenedJob) -> ProfileTiming:
        profile = profile_of(opened.problem.model, 1, 1, amdahl(0.0))
        self.path = cached_profile_path(cache_dir() / "profiles", profile.metadata)
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_profile(profile, self.path)
        return ProfileTiming(load_profile(self.path))

    def execute(self, run: several.Run) -> dict[str, Any]:
        assert isinstance(run.timing, ProfileTiming)
        name = run.opened.job.name
        self.factors[name] = [own.factor for own in run.timing.profile.learned]
        if name in self.slow:
            known = load_profile(self.path)
            save_profile(replace(known, learned=(*known.learned, LEARNED)), self.path)
        return {"name": name, "queries": 6}


def job_of(folder: Path, name: str, bound: str = "inf") -> Job:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return load_job(job_file(
        folder, name, name=name, model=".", cluster="local", output=f"out-{name}",
        workload="{requests: {count: 6}, input_tokens: {mean: 20, std: 5, max: 30}, "
                 "output_tokens: {mean: 6, std: 2, max: 10}}", constraint=f"{{latency_s: {bound}}}",
        schedule="{policy: rra, encode_batch: 2, decode_iterations: 4, encode_chunk: 0}",
        run="{ranks: 1, dtype: float32, threads_per_rank: 1, weights: random}"))


def test_those_after_a_run_are_planned_by_what_it_told(tmp_path, monkeypatch):
    machine, told = Machine(monkeypatch, tmp_path, ("a", "c")), Told()
    jobs = [job_of(tmp_path, "a"), job_of(tmp_path, "never", "1 us"), job_of(tmp_path, "b"),
            job_of(tmp_path, "c"), job_of(tmp_path, "d")]
    with pytest.raises(several.SomeJobsUnfinished) as caught:
        several.submit_all(jobs, told)
    assert told.turns == [f"job {i} of 5: {job.name}" for i, job in enumerate(jobs, start=1)]
    assert machine.factors == {"a": [], "b": [2.0], "c": [2.0], "d": [2.0, 2.0]}
    assert [job["status"] for job in caught.value.details["jobs"]] == [
        "done", "failed", "done", "done", "done"]


def test_what_keeps_its_bound_no_more_by_what_was_told_does_not_run(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, ("a",))
    with pytest.raises(several.SomeJobsUnfinished) as caught:
        several.submit_all([job_of(tmp_path, "a"), job_of(tmp_path, "b", BETWEEN)], Told())
    assert set(machine.factors) == {"a"} and caught.value.exit_code == 3
    assert "tightest" in caught.value.details["jobs"][1]["error"]
