"""Real ranks whose output lengths are not those planned for: the schedule changes while they run,
and not one token does."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from given_runs import given
from job_folder import read_lines, write_job
from mpi_runs import call, json_of, said, sets
from replays import estimated, replayed, whole_steps

from xgpt.app.opened_job import open_file
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile_file import load_profile, save_profile
from xrunner.plan import load_plan
from xrunner.query import PreparedQuery
from xrunner.rules.rra import PhaseControls, rra_rule
from xscheduler.replicas import problem_on

pytestmark = pytest.mark.mpi
KINDS, COUNT = 20, 1800  # so many different queries, repeated; schedules change after some 160
# lengths are what is tested: how long steps take here is a matter of the machine's other work
DRIFT = ("workload.output_tokens={mean: 15, std: 8, max: 40}", "run.step_times=off")
OBSERVE = ("workload.output_tokens=observe", "run.step_times=off")


def repeated(queries: Sequence[PreparedQuery]) -> list[PreparedQuery]:
    return [replace(queries[i % len(queries)], index=i, id=f"q{i}") for i in range(COUNT)]


@pytest.fixture(scope="module")
def kinds():
    """Queries of 20 to 39 tokens, where the job plans with 15."""
    return [replace(query, max_new_tokens=20 + query.index, is_forced=True)
            for query in toys.random_queries(KINDS, seed=8, longest=6)]


def job_of(folder: Path, model: Path, queries: Sequence[PreparedQuery], *, ranks: int = 2,
           key: str = "forced_tokens") -> Path:
    return write_job(folder, model, [
        {"id": q.id, "tokens": list(q.input_ids), key: q.max_new_tokens} for q in queries],
        schedule="policy: rra", ranks=ranks)


def answers_of(out: Path, answers: Sequence[list[int]]) -> list[dict[str, Any]]:
    """The results, in which nothing is lost and no token is another."""
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [f"q{i}" for i in range(COUNT)]
    assert all(r["output_ids"] == answers[r["index"] % len(answers)] for r in results)
    assert "Changes while it ran" in (out / "report.html").read_text()
    return results


@pytest.mark.parametrize("own", [DRIFT, pytest.param(OBSERVE, marks=pytest.mark.slow)])
def test_a_running_schedule_changes_and_no_token_does(tmp_path, llama, own, profiled, kinds):
    out, is_observed, queries = tmp_path / "out", own is OBSERVE, repeated(kinds)
    # what they may write, and not what they will, is what `observe` goes by
    job = job_of(tmp_path, llama[0], queries, key="max_tokens" if is_observed else "forced_tokens")
    problem = open_file(job, own).problem
    # leaves time for a plan, and much to gain
    slow = estimated("rra", problem, encode_batch=3, decode_iterations=6)
    done = call("run", job, "--schedule", given(slow, problem, tmp_path / "given.json"),
                *sets(*own), "--json", "--verbose", env=profiled("llama"))
    metrics = json.loads(done.stdout)
    first = metrics["rescheduling"][0]
    assert first["choice"] == "adjust" and first["phase"] > 0, metrics["rescheduling"]
    assert first["sentence"] in said(done) and first["to"] != first["from"]
    assert first["cause"] == ("observe" if is_observed else "drift")
    assert metrics["is_predicted_for_lengths"] is is_observed
    if not is_observed:  # a prediction that did not come true is not taken back
        assert metrics["wall_s"]["predicted"] > 0 and (
            "the schedule was changed during the run" in said(done))
    results = answers_of(out, [toys.generate(llama[1], replace(
        query, is_forced=not is_observed)) for query in kinds])
    mean = np.mean([r["output_tokens"] for r in results])
    assert first["mean_output_tokens"]["observed"] == pytest.approx(mean, rel=0.1)
    check_steps(problem, out, queries, results)


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
        tmp_path, llama, cause, cache, measured_llama, kinds):
    """Each copy by a plan of its own, for what is seen of both."""
    out = tmp_path / "out"
    job = job_of(tmp_path, llama[0], repeated(kinds), ranks=3)
    # what steps take decides here of nothing but that they may have changed
    times = of_three(measured_llama.profile, open_file(job).problem.cluster.device.name,
                     tmp_path / "of-three.json", quicker=1.0 if cause == "drift" else 4.0)
    own = [f"profile={times}", *(
        DRIFT if cause == "drift" else ["workload.output_tokens=from_requests"])]
    problem = open_file(job, own).problem
    two, one = (estimated("rra", problem_on(problem, ranks), encode_batch=batch,
                          decode_iterations=6).one_copy for ranks, batch in ((2, 3), (1, 2)))
    begun = two.beside((one,))
    done = call("run", job, "--schedule", given(begun, problem, tmp_path / "given.json"),
                *sets(*own), "--json", "--verbose", env=cache)
    metrics = json.loads(done.stdout)
    first = next(row for row in metrics["rescheduling"] if row["choice"] == "adjust")
    assert first["cause"] == cause and first["sentence"] in said(done) and first["phase"] > 0
    results = answers_of(out, [toys.generate(llama[1], query) for query in kinds])
    assert {r["replica"] for r in results} == {0, 1}
    taken = json_of(out / "measured.json")["changes"]
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


def check_steps(problem: Problem, out: Path, queries: list[Any],
                results: list[dict[str, Any]]) -> None:
    """A replay that is told of the changes takes the run's steps, its phases of their lengths."""
    estimate: Estimate = load_schedule(out / "schedule.json").estimate
    taken = json_of(out / "measured.json")["changes"]
    rule = rra_rule(estimate)
    rule.make_room(load_plan(out / "run.json").slots)
    for change in taken:
        rule.change(PhaseControls(**{k: v for k, v in change.items() if k not in (
            "revision", "elapsed_s", "phase")}), phase=change["phase"])
    expected = whole_steps(replayed(problem, estimate, queries, [
        r["output_tokens"] for r in results], rules=[rule]).pools[0])
    steps = read_lines(out / "steps.jsonl")
    for stage in estimate.deployment.stages:
        assert [(r["kind"], r["group"], r["phase"], r["iteration"], r["queries"], r["tokens"])
                for r in steps if r["stage"] == stage.index] == expected
    begin = taken[0]["phase"]
    last = {phase: max(s[3] for s in expected if s[2] == phase) for phase in (begin - 1, begin)}
    assert last == {begin - 1: estimate.figures.decode_iterations,
                    begin: taken[0]["decode_iterations"]}
