"""Several jobs of one command: the same ranks take them one after another, with the weights they
have, and give each job's own tokens. What is measured, stopped, gone on with and merged; what a run
measured goes back into the cached profile, so that a second job measures nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import toys
from by_data_sheets import COMMAND
from job_folder import as_requests, read_lines, write_job, xgpt
from mpi_runs import call, json_of, stopped_under_way

from xprofiler.points import Needs, missing_skeleton
from xprofiler.profile import Profile, TableKey
from xprofiler.profile_file import load_profile
from xprofiler.timing import Operator

pytestmark = pytest.mark.mpi
STAGES, HALVES = "tp_degree: 1", "tp_degree: 2, tp_gpus: 2"
QUERIES = {"first": toys.random_queries(7, seed=1), "long": toys.random_queries(180, seed=2),
           "never": toys.random_queries(7, seed=1), "last": toys.random_queries(8, seed=3),
           "halves": toys.random_queries(6, seed=4)}


def states(out: str) -> list[str]:
    return [job["status"] for job in json.loads(out)["jobs"]]


def test_jobs_of_one_model_load_it_once_and_a_stop_ends_all_until_the_same_command_goes_on(
        tmp_path, llama, cache):
    words = ["submit"]
    for name, queries in QUERIES.items():
        (tmp_path / name).mkdir()
        layout, bound = HALVES if name == "halves" else STAGES, "1 us" if name == "never" else "inf"
        job = write_job(tmp_path / name, llama[0], as_requests(queries), ranks=2, schedule=(
            f"policy: rra, encode_batch: 3, decode_iterations: 4, order: input, {layout}"))
        staged = job.read_text().replace("run: {", f"run: {{stage_model: {tmp_path / 'disk'}, ")
        job.write_text(f"{staged}name: {name}\nconstraint: {{latency_s: {bound}}}\n")
        words.append(str(job))

    def loaded(name: str) -> int:
        return json_of(tmp_path / name / "out" / "metrics.json")["loaded_bytes"]

    results = tmp_path / "long" / "out" / "results.jsonl"
    process, out, told = stopped_under_way([*words, "--json"], results, cache, xgpt=COMMAND)
    assert process.returncode == 75, told  # the first that did not come to its end was stopped
    assert states(out) == ["done", "stopped", *["not started"] * 3], told
    kept = results.read_bytes()
    assert 0 < kept.count(b"\n") < 180 and loaded("first") > 0 == loaded("long")

    # its code says that no schedule keeps the bound
    done = call(*words, "--json", env=cache, code=3, xgpt=COMMAND)
    assert states(done.stdout) == ["already done", "done", "failed", "done", "done"], done.stderr
    assert loaded("long") > 0 and loaded("last") == 0 and loaded("halves") > 0
    anew = "ranks: started anew, for the job has another layout of ranks and stages\n"
    assert done.stderr.count("those of the job before") == 1 and done.stderr.count(anew) == 1
    assert results.read_bytes().startswith(kept)
    # its copy was on the node's disk while jobs read it
    assert [path.suffix for path in (tmp_path / "disk").glob("*/*")] == [".lock"]
    for name in ("first", "long", "last", "halves"):
        answers = {r["id"]: r["output_ids"] for r in read_lines(
            tmp_path / name / "out" / "results.jsonl")}
        assert len(answers) == len(QUERIES[name])
        for query in QUERIES[name][:8]:
            assert answers[query.id] == toys.generate(llama[1], query), (name, query.id)


def submitted(folder: Path, model: Path, *, count: int, longest: int, outputs: int) -> Any:
    folder.mkdir()
    queries = toys.random_queries(20, seed=count, longest=longest)
    requests = [{"id": f"q{i}", "tokens": list(queries[i % 20].input_ids),
                 "forced_tokens": 1 + (i * 7) % outputs} for i in range(count)]
    job = write_job(folder, model, requests,
                    schedule="policy: rra, encode_batch: 4, decode_iterations: 4", ranks=1)
    done = xgpt("submit", job, "--json", "--verbose", "--set",
                "workload.output_tokens=from_requests")
    assert done.returncode == 0, done.stderr
    return done


def cached(home: Path) -> Profile:
    (path,) = (p for p in (home / "xgpt" / "profiles").glob("*x1-*.json"))
    return load_profile(path)


@pytest.fixture
def home(tmp_path, cache, monkeypatch):
    """A cache in which nothing is measured yet."""
    home = tmp_path / "home"
    (home / "xgpt").mkdir(parents=True)
    native = Path(cache["XDG_CACHE_HOME"]) / "xgpt" / "native"
    (home / "xgpt" / "native").symlink_to(native.resolve())
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", cache["PYTHONPATH"])
    return home


def test_the_second_job_measures_nothing(tmp_path, llama, home, monkeypatch):
    # neither that other tests run nor what came and went with it counts
    monkeypatch.setattr("xgpt.app.running.metrics.NOTICEABLE_SHARE", 2.0)
    monkeypatch.setattr("xgpt.app.running.metrics.PASSING", 1e9)
    first = submitted(tmp_path / "first", llama[0], count=120, longest=8, outputs=20)
    assert "profile: timing" in first.stderr, first.stderr
    assert "this run was added to the profile" in first.stderr, first.stderr
    before = cached(home)
    assert before.learned
    assert all(own.steps >= 30 and own.factor > 0 for own in before.learned)
    second = submitted(tmp_path / "second", llama[0], count=150, longest=12, outputs=28)
    after = cached(home)
    assert after.tables == before.tables and after.spent_s == before.spent_s, "points measured: 0"
    assert "profile: timing" not in second.stderr and "profile: from the cache" in second.stderr
    assert len(after.learned) > len(before.learned), "and this one adds to it, too"
    file = next((home / "xgpt" / "profiles").glob("*x1-*.json"))
    shown = xgpt("profile", "show", "--verbose", file)
    assert "runs, decode" in shown.stdout and "age" in shown.stdout
    json.loads(second.stdout)
    assert os.environ["XDG_CACHE_HOME"] == str(home)


@pytest.fixture(scope="module")
def profile(measured_llama):
    done = measured_llama.done
    assert done.returncode == 0, done.stderr
    assert "does not divide" in done.stderr, "degree 3 is refused with its reason"
    return load_profile(measured_llama.profile)


def test_every_operator_degree_and_message_is_there(profile):
    assert profile.model is not None and profile.peaks is not None
    assert profile.tp_degrees == (1, 2) and list(profile.refused) == [3]
    for degree in (1, 2):
        assert not missing_skeleton(profile, degree, Needs())
        for operator in (Operator.LAYER_REST, Operator.HEAD, Operator.EMBED,
                         Operator.KV_COMPACTION):
            assert profile.table(operator.value, degree), operator
    for key in (TableKey("all_reduce", 2, "shared-memory"),
                TableKey("transfer", 1, "shared-memory"),
                TableKey("kv_handover", 1, "shared-memory"), TableKey("step_overhead")):
        assert profile.tables[key], key
    assert not any(key.name == "all_reduce" and key.tp_degree != 2 for key in profile.tables)
    samples = [s for table in profile.tables.values() for p in table for s in p.samples_s]
    assert all(s >= 0 for s in samples) and sum(s > 0 for s in samples) > 0.9 * len(samples)


def test_a_stopped_measurement_is_kept_and_gone_on_with(measured_llama, profile):
    stopped = measured_llama.stopped
    assert stopped.returncode == 75, stopped.stderr
    assert "goes on" in stopped.stderr
    kept = load_profile(measured_llama.kept)
    assert kept.tables and kept.spent_s > 0
    assert missing_skeleton(kept, 2, Needs()), "it was stopped before its end"
    assert not missing_skeleton(profile, 1, Needs()) and profile.spent_s > kept.spent_s
    for key, points in kept.tables.items():
        if key.name in ("decode_attention", "transfer"):
            quiet = {p for p in points if not (p.is_noisy or p.is_disturbed)}
            assert quiet <= set(profile.tables[key])
