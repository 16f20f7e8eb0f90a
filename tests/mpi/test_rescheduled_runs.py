"""Real ranks whose output lengths are not those planned for: the schedule changes while they run,
and not one token does."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from given_runs import given, killed_and_gone_on  # noqa: E402
from job_folder import XGPT, read_lines, write_job  # noqa: E402

from xgpt.app.metrics import CHANGED  # noqa: E402
from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem  # noqa: E402
from xgpt.core.queries import QueryLengths  # noqa: E402
from xgpt.core.schedule import Estimate  # noqa: E402
from xgpt.core.schedule_file import load_schedule  # noqa: E402
from xprofiler.profile_file import load_profile, save_profile  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xrunner.plan import load_plan  # noqa: E402
from xrunner.rules.rra import PhaseControls, rra_rule  # noqa: E402
from xscheduler.copies import problem_on  # noqa: E402
from xsimulator.replay.job import replay_job  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.mpi
KINDS, COUNT = 20, 600  # so many different queries, repeated; schedules change after some 160


def queries_of(seed: int) -> list[Any]:
    """Of 24 to 39 tokens, where the job plans with 15."""
    made = toys.random_queries(KINDS, seed=seed, longest=6)
    return [toys.PreparedQuery(index=i, id=f"q{i}", input_ids=made[i % KINDS].input_ids,
                               max_new_tokens=20 + i % KINDS, is_forced=True)
            for i in range(COUNT)]


def call(*arguments: str, cache: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*XGPT, *arguments], capture_output=True, text=True, env=cache,
                          timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done


def slow_schedule(problem: Problem, path: Path) -> Path:
    """One that leaves time for a plan, and much to gain."""
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate("rra", problem, timing,
        FixedSchedule(encode_batch=3, decode_iterations=6))
    given(estimate, problem, path)
    return path


@pytest.mark.parametrize("outputs", [
    "{mean: 15, std: 8, max: 40}", pytest.param("observe", marks=pytest.mark.slow)])
def test_a_running_schedule_changes_and_no_token_does(tmp_path, outputs, cache, profiled):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("llama", directory)
    queries = queries_of(seed=8)
    # what they may write, and not what they will, is what `observe` goes by
    key = "forced_tokens" if outputs != "observe" else "max_tokens"
    requests = [{"id": q.id, "tokens": list(q.input_ids), key: q.max_new_tokens} for q in queries]
    job = write_job(tmp_path, directory, requests, schedule="policy: rra", ranks=2)
    # lengths are what is tested: how long steps take here is a matter of the machine's other work
    own = ("--set", f"workload.output_tokens={outputs}", "--set", "run.step_times=off")
    profiled("llama")  # the same toy
    problem = open_file(job, own[1::2]).problem
    given = slow_schedule(problem, tmp_path / "given.json")
    done = call("run", str(job), "--schedule", str(given), *own, "--json", cache=cache)
    metrics = json.loads(done.stdout)
    first = metrics["rescheduling"][0]
    assert first["choice"] == "adjust" and first["phase"] > 0, metrics["rescheduling"]
    assert first["sentence"] in " ".join(done.stderr.split()), "lines are wrapped"
    assert first["cause"] == ("observe" if outputs == "observe" else "drift")
    assert first["to"] != first["from"]
    if outputs != "observe":  # a prediction that did not come true is not taken back
        assert metrics["wall_s"]["predicted"] > 0 and CHANGED in " ".join(done.stderr.split())
    answers = {k: toys.generate(reference, queries[k]) for k in range(KINDS)} if (
        outputs != "observe") else {k: unforced(reference, queries[k]) for k in range(KINDS)}
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    mean = np.mean([r["output_tokens"] for r in results])
    assert first["mean_output_tokens"]["observed"] == pytest.approx(mean, rel=0.1)
    check_steps(problem, out, queries, results)
    assert "Changes while it ran" in (out / "report.html").read_text()


def unlike_schedule(problem: Problem, path: Path) -> Estimate:
    """A copy on two ranks beside one on a single rank, with much to gain for both."""
    two, one = (fixed_estimate("rra", part, Roofline(
        part.model, part.cluster.device, part.dtype), FixedSchedule(
            encode_batch=batch, decode_iterations=6)).one_copy
        for part, batch in ((problem_on(problem, 2), 3), (problem_on(problem, 1), 2)))
    given(two.beside((one,)), problem, path)
    return two.beside((one,))


def of_three(measured: Path, device: str, path: Path, *, quicker: float) -> Path:
    """The profile of two ranks as one of three, were their steps so many times as quick."""
    profile = load_profile(measured)
    save_profile(replace(profile, metadata=replace(
        profile.metadata, device=device, ranks=3), tables={
        key: tuple(replace(sample, samples_s=tuple(own / quicker for own in sample.samples_s))
                   for sample in samples) for key, samples in profile.tables.items()}), path)
    return path


@pytest.mark.slow  # copies that are alike change above, unlike ones in test_replicas.py
@pytest.mark.parametrize("cause", ["drift", "step times"])
def test_copies_of_two_ranks_and_of_one_change_and_no_token_does(
        tmp_path, cause, cache, measured_llama):
    """Each copy by a plan of its own, for what is seen of both."""
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("llama", directory)
    queries = queries_of(seed=8)
    requests = [{"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
                for q in queries]
    job = write_job(tmp_path, directory, requests, schedule="policy: rra", ranks=3)
    # what steps take decides here of nothing but that they may have changed
    times = of_three(measured_llama.profile, open_file(job).problem.cluster.device.name,
                     tmp_path / "of-three.json", quicker=1.0 if cause == "drift" else 4.0)
    own = [f"profile={times}", *(
        ["workload.output_tokens={mean: 15, std: 8, max: 40}", "run.step_times=off"] if (
            cause == "drift") else ["workload.output_tokens=from_requests"])]
    problem = open_file(job, own).problem
    begun = unlike_schedule(problem, tmp_path / "given.json")
    done = call("run", str(job), "--schedule", str(tmp_path / "given.json"),
                *(word for value in own for word in ("--set", value)), "--json", cache=cache)
    metrics, said = json.loads(done.stdout), " ".join(done.stderr.split())
    first = next(row for row in metrics["rescheduling"] if row["choice"] == "adjust")
    assert first["cause"] == cause and first["sentence"] in said and first["phase"] > 0
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries], "nothing is lost"
    answers = [toys.generate(reference, queries[k]) for k in range(KINDS)]
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    assert {r["replica"] for r in results} == {0, 1}
    taken = json.loads((out / "measured.json").read_text())["changes"]
    steps, stages = read_lines(out / "steps.jsonl"), {0: 0, 1: 2}  # the first of each copy
    changed = {change.get("replica", 0) for change in taken}
    assert changed == {0, 1} if cause == "drift" else changed
    for replica, shape in enumerate(begun.shapes):
        own_steps = [s for s in steps if s["stage"] == stages[replica]]
        assert {s["replica"] for s in own_steps} == {replica}
        obeyed = [(change["phase"], change["decode_iterations"]) for change in taken
                  if change.get("replica", 0) == replica]
        spans = [(0, shape.figures.decode_iterations), *obeyed]
        for (begin, iterations), (end, _) in pairwise([*spans, (10**9, 0)]):
            seen = [s["iteration"] for s in own_steps if begin <= s["phase"] < end]
            assert max(seen, default=iterations) <= iterations
            if seen and end < 10**9:  # the last phases end with the queries
                assert max(seen) == iterations
    assert "Changes while it ran" in (out / "report.html").read_text()


@pytest.mark.slow  # test_replica_runs.py kills a copy of two that are alike
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in /proc")
def test_a_job_of_unlike_copies_goes_on_after_a_rank_of_one_was_killed(tmp_path, profiled):
    """And changes again, by what the second run sees."""
    directory = tmp_path / "model"
    reference, queries = toys.make_model("llama", directory), queries_of(seed=8)
    requests = [{"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
                for q in queries]
    job, cache = write_job(tmp_path, directory, requests, schedule="policy: rra", ranks=3), (
        profiled("llama", 3))
    own = ["workload.output_tokens={mean: 15, std: 8, max: 40}", "run.step_times=off"]
    unlike_schedule(open_file(job, own).problem, tmp_path / "given.json")
    _, results, metrics = killed_and_gone_on(
        [*XGPT, "run", str(job), "--schedule", str(tmp_path / "given.json"),
         *(word for value in own for word in ("--set", value))], tmp_path / "out", cache, COUNT)
    answers = [toys.generate(reference, queries[k]) for k in range(KINDS)]
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    assert metrics["status"] == "done" and metrics["ranks"] == 3
    first = metrics["rescheduling"][0]
    assert (first["cause"], first["choice"]) == ("drift", "adjust") and first["phase"] > 0


@pytest.mark.slow
def test_where_the_caps_miss_the_bound_it_begins_with_the_quickest(tmp_path, cache):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("llama", directory)
    drawn = [replace(q, max_new_tokens=60, is_forced=False)
             for q in toys.random_queries(150, seed=8, longest=6)]
    kinds = [(q, ids) for q in drawn if len(ids := toys.generate(reference, q)) <= 20]
    assert len(kinds) >= 10, "short answers, whose models end them"
    queries = [replace(kinds[i % len(kinds)][0], index=i, id=f"q{i}") for i in range(1500)]
    requests = [{"id": q.id, "tokens": list(q.input_ids), "max_tokens": 60} for q in queries]
    job = write_job(tmp_path, directory, requests, ranks=2,
                    schedule="policy: rra, tp_degree: 1, replicas: 1")
    own = ("--set", "workload.output_tokens=observe")
    call("profile", str(job), "--budget", "1s", *own, cache=cache)
    refused = subprocess.run(
        [*XGPT, "schedule", str(job), *own, "--set", "constraint.latency_s=0.0001"],
        capture_output=True, text=True, env=cache, timeout=280, check=False)
    assert refused.returncode == 3 and "An answer of a single token takes" in refused.stderr
    found = re.search(r"tightest that can be met is ([0-9.]+) s", refused.stderr)
    assert found is not None, refused.stderr
    bound = ("--set", f"constraint.latency_s={0.7 * float(found[1])}")
    done = call("submit", str(job), *own, *bound, "--json", cache=cache)
    said, metrics = " ".join(done.stderr.split()), json.loads(done.stdout)
    assert metrics["beginning"] in said and "every query runs to its cap of 60" in said
    first = metrics["rescheduling"][0]
    assert (first["cause"], first["choice"]) == ("observe", "adjust") and first["phase"] > 0
    assert first["mean_output_tokens"]["planned"] == 60 and first["sentence"] in said
    assert first["after_queries"] < len(queries) / 4, "a small part of them"
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert all(r["output_ids"] == kinds[r["index"] % len(kinds)][1] for r in results)
    check_steps(open_file(job, (own[1], bound[1])).problem, out, queries, results,
                are_whole=False)
    shown = (out / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert metrics["beginning"] in shown and "Changes while it ran" in shown


def unforced(reference: Any, query: Any) -> list[int]:
    return toys.generate(reference, replace(query, is_forced=False))


def check_steps(problem: Problem, out: Path, queries: list[Any],
                results: list[dict[str, Any]], *, are_whole: bool = True) -> None:
    """A replay that is told of the changes takes the run's steps, its phases of their lengths.
    `are_whole`: those about the first change do not end because all queries are done."""
    estimate: Estimate = load_schedule(out / "schedule.json").estimate
    taken = json.loads((out / "measured.json").read_text())["changes"]
    rule = rra_rule(estimate)
    rule.make_room(load_plan(out / "run.json").slots)
    for change in taken:
        rule.change(PhaseControls(**{k: v for k, v in change.items() if k not in (
            "revision", "elapsed_s", "phase")}), phase=change["phase"])
    pool = replay_job(
        problem, Roofline(problem.model, problem.cluster.device, problem.dtype), estimate,
        QueryLengths(inputs=np.array([len(q.input_ids) for q in queries]),
                     outputs=np.array([r["output_tokens"] for r in results]),
                     most_outputs=np.array([q.max_new_tokens for q in queries])),
        rules=[rule]).pools[0]
    expected = [(step.kind.value, step.group, step.phase, step.iteration, int(encoded or decoded))
                for step, encoded, decoded in zip(pool.steps, pool.encoded, pool.decoded,
                                                  strict=True)]
    steps = read_lines(out / "steps.jsonl")
    for stage in estimate.deployment.stages:
        assert [(r["kind"], r["group"], r["phase"], r["iteration"], r["queries"])
                for r in steps if r["stage"] == stage.index] == expected
    if not are_whole:
        return
    begin = taken[0]["phase"]
    last = {phase: max(s[3] for s in expected if s[2] == phase) for phase in (begin - 1, begin)}
    assert last == {
        begin - 1: estimate.figures.decode_iterations,
        begin: taken[0]["decode_iterations"],
    }
