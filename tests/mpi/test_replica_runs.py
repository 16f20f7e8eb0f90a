"""Replicas on real ranks: one job by two copies of the model, each with ranks of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
import toys  # noqa: E402
from given_runs import given, killed_and_gone_on, rank_of, run  # noqa: E402
from job_folder import XGPT, as_requests, read_lines  # noqa: E402
from replayed import problem_of, replayed_steps  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.copies import devices_of_copies  # noqa: E402
from xgpt.core.job import (
    LEAST_TOKENS,  # noqa: E402
    FixedSchedule,
)
from xgpt.core.queries import QueryLengths  # noqa: E402
from xgpt.core.schedule_file import load_schedule  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xrunner.rules.windows import window_of  # noqa: E402
from xscheduler.planner import Planner, PlanOptions  # noqa: E402
from xsimulator.replay.job import replay_job  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, toys.make_model("llama", directory)


@pytest.mark.parametrize(("policy", "config", "layout"), [
    pytest.param("rra", FixedSchedule(encode_batch=3, decode_iterations=4, tp_degree=2, tp_gpus=2),
                 [[0, 1], [2, 3]], marks=pytest.mark.slow),
    pytest.param("waa-c", FixedSchedule(encode_batch=2), [[0], [1], [2], [3]],
                 marks=pytest.mark.slow)])  # test_family_runs.py has two copies of a rank
def test_two_replicas_of_two_ranks(llama, tmp_path, policy, config, layout):
    directory, reference = llama
    queries, out = toys.random_queries(30, seed=8), tmp_path / "out"
    answers = {q.id: toys.generate(reference, q) for q in queries}
    problem = problem_of(directory, np.array([[len(q.input_ids), len(answers[q.id])]
                                              for q in queries]), 2)
    timing = Roofline(problem.model, problem.cluster.device, "float32")
    one = fixed_estimate(policy, problem, timing, config).changed(kv_tokens=20_000)
    out.mkdir()
    given(one.in_copies(2), problem, out / "schedule.json")
    run(directory, out, as_requests(queries), ranks=4)

    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert {r["id"]: r["output_ids"] for r in results} == answers
    measured = json.loads((out / "measured.json").read_text())
    assert [(s["stage"], s["ranks"]) for s in measured["stages"]] == list(enumerate(layout))
    half = len(layout) // 2
    assert [s["replica"] for s in measured["stages"]] == [0] * half + [1] * half
    assert measured["queries"] == 30 and measured["state"] == "done"
    steps = read_lines(out / "steps.jsonl")
    for replica in (0, 1):
        own = sorted((r for r in results if r["replica"] == replica),
                     key=lambda r: (r["encode_start_s"], r["index"]))
        assert len(own) > 5
        replayed = replay_job(problem, timing, one, QueryLengths(
            inputs=np.array([r["input_tokens"] for r in own]),
            outputs=np.array([r["output_tokens"] for r in own]),
            most_outputs=np.array([queries[r["index"]].max_new_tokens for r in own])))
        first = replica * half  # of its stages: the one that encodes
        assert [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"]) for s in steps
                if s["stage"] == first] == replayed_steps(replayed.pools[0])
        assert all(s["replica"] == replica for s in steps if s["stage"] == first)


@pytest.mark.slow  # test_replicas.py has two shapes on threads
def test_a_copy_of_two_ranks_beside_one_of_one(llama, tmp_path):
    """By schedules of their own: RRA in a pipeline, and Sarathi."""
    directory, reference = llama
    queries, out = toys.random_queries(40, seed=8), tmp_path / "out"
    answers = {q.id: toys.generate(reference, q) for q in queries}
    lengths = np.array([[len(q.input_ids), len(answers[q.id])] for q in queries])
    problem, part = problem_of(directory, lengths, 3), problem_of(directory, lengths, 1)
    timing = Roofline(problem.model, problem.cluster.device, "float32")
    two = fixed_estimate("rra", problem_of(directory, lengths, 2), timing,

            FixedSchedule(encode_batch=9, decode_iterations=4)).changed(kv_tokens=20_000)
    one = fixed_estimate("sarathi", part, timing, FixedSchedule(
        max_active=24, token_budget=16)).changed(kv_tokens=20_000)
    for estimate in (two, one):  # a window holds a copy's share: see test_family_runs.py
        window = window_of(estimate)
        assert max(window.waiting, window.present) >= 27
    out.mkdir()
    given(two.beside((one,)), problem, out / "schedule.json")
    assert load_schedule(out / "schedule.json").estimate == two.beside((one,))
    run(directory, out, as_requests(queries), ranks=3)

    results = read_lines(out / "results.jsonl")
    assert {r["id"]: r["output_ids"] for r in results} == answers and len(results) == 40
    measured = json.loads((out / "measured.json").read_text())
    assert [(s["stage"], s["replica"], s["ranks"]) for s in measured["stages"]] == [
        (0, 0, [0]), (1, 0, [1]), (2, 1, [2])]
    steps = read_lines(out / "steps.jsonl")
    for replica, (estimate, first) in enumerate([(two, 0), (one, 2)]):
        own = sorted((r for r in results if r["replica"] == replica),
                     key=lambda r: (r["encode_start_s"], r["index"]))
        replayed = replay_job(problem, timing, estimate, QueryLengths(
            inputs=np.array([r["input_tokens"] for r in own]),
            outputs=np.array([r["output_tokens"] for r in own]),
            most_outputs=np.array([queries[r["index"]].max_new_tokens for r in own])))
        pool = replayed.pools[0]
        assert [(s["kind"], s["phase"], s["iteration"], s["queries"]) for s in steps
                if s["stage"] == first] == [
            (step.kind.value, step.phase, step.iteration, encoded + decoded)
            for step, encoded, decoded in zip(pool.steps, pool.encoded.tolist(),
                                              pool.decoded.tolist(), strict=True)]


@pytest.mark.slow  # test_divisions.py plans for three ranks of a processor
def test_copies_that_the_planner_makes_unlike(llama, tmp_path):
    """Two copies on three ranks: the planner's own schedules of a pipeline and of a single rank."""
    directory, reference = llama
    queries, out = toys.random_queries(60, seed=8), tmp_path / "out"
    answers = {q.id: toys.generate(reference, q) for q in queries}
    problem = problem_of(directory, np.array([[len(q.input_ids), len(answers[q.id])]
                                              for q in queries]), 3)
    slow = replace(problem.cluster.device, bandwidth_bytes_per_s=1e7)  # so that a pipeline pays
    timing = Roofline(problem.model, slow, "float32")
    schedule = Planner(replace(
        problem, cluster=problem.cluster.with_nodes(device=slow), fixed=replace(
            problem.fixed, replicas=2)), timing,
                       PlanOptions(horizon="steady", has_margin=False)).plan()
    assert devices_of_copies(schedule.estimate) == (2, 1)
    roomy = [shape.changed(kv_tokens=max(shape.deployment.kv_tokens, 20_000))
             for shape in schedule.estimate.shapes]
    out.mkdir()
    given(roomy[0].beside(tuple(roomy[1:])), problem, out / "schedule.json")
    run(directory, out, as_requests(queries), ranks=3)

    results = read_lines(out / "results.jsonl")
    assert {r["id"]: r["output_ids"] for r in results} == answers and len(results) == 60
    assert {r["replica"] for r in results} == {0, 1}
    measured = json.loads((out / "measured.json").read_text())
    assert sorted(rank for s in measured["stages"] for rank in s["ranks"]) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in /proc")
def test_a_job_of_two_replicas_goes_on_after_one_was_killed(llama, tmp_path, profiled):
    directory, reference = llama
    requests = [{"id": f"q{i}", "tokens": [7, 8, 9], "forced_tokens": 40} for i in range(300)]
    job = job_folder.write_job(
        tmp_path, directory, requests, ranks=2, schedule="policy: rra, encode_batch: 3, "
        "decode_iterations: 8, replicas: 2")
    cache, out = profiled("llama"), tmp_path / "out"
    before, results, metrics = killed_and_gone_on(
        [*XGPT, "run", str(job), "--schedule", str(two_copies(job))], out, cache, count=300)
    query = toys.PreparedQuery(index=0, id="q0", input_ids=(7, 8, 9), max_new_tokens=40,
                               is_forced=True)
    expected = toys.generate(reference, query)
    assert all(r["output_ids"] == expected for r in results)
    assert {r["replica"] for r in results[before:]} == {0, 1}
    assert (metrics["queries"], metrics["ranks"], metrics["status"]) == (300, 2, "done")
    assert [(s["replica"], s["ranks"]) for s in metrics["stages"]] == [(0, [0]), (1, [1])]
    assert (out / "report.html").stat().st_size > 10_000


@pytest.mark.slow  # test_replicas.py takes queries back from heads on threads
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in /proc")
@pytest.mark.parametrize("slow", [0, 1])
def test_what_a_stopped_copy_has_not_begun_is_the_others(llama, tmp_path, slow):
    directory, reference = llama
    query = toys.PreparedQuery(index=0, id="q0", input_ids=(7, 8, 9), max_new_tokens=40,
                               is_forced=True)
    requests = [{"id": f"q{i}", "tokens": [7, 8, 9], "forced_tokens": 40} for i in range(300)]
    out, problem = tmp_path / "out", problem_of(directory, np.array([[3, 40]] * 300), 1)
    timing = Roofline(problem.model, problem.cluster.device, "float32")
    one = fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=3, decode_iterations=4)).changed(kv_tokens=20_000)
    out.mkdir()
    given(one.in_copies(2), problem, out / "schedule.json")
    pulses = Pulses(out, slow)
    run(directory, out, requests, ranks=2, routing=LEAST_TOKENS, watch=pulses.look)

    assert pulses.count >= 3, "the job was over before the copy was stopped"
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [r["id"] for r in requests]
    expected = toys.generate(reference, query)
    assert all(r["output_ids"] == expected for r in results)
    given_out = [i for line in read_lines(out / "underway.jsonl") for i in line]
    assert set(given_out) == set(range(300))
    if slow:  # else nobody is there meanwhile who routes
        assert len(given_out) > 300, "some twice"
        assert sum(r["replica"] == slow for r in results) < 150


class Pulses:
    """Stops a rank for most of the time from its first answers on."""

    def __init__(self, out: Path, rank: int) -> None:
        self._out, self._rank, self._pid = out, rank, 0
        self._turn_s, self._is_stopped, self.count = 0.0, False, 0

    def look(self) -> None:
        results = self._out / "results.jsonl"
        if not (results.is_file() and results.stat().st_size):
            return
        self._pid = self._pid or rank_of(os.getpid(), self._rank)
        if time.monotonic() > self._turn_s:
            self._signal(signal.SIGCONT if self._is_stopped else signal.SIGSTOP)
            self._turn_s = time.monotonic() + (0.25 if self._is_stopped else 0.02)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)
        self._is_stopped = number is signal.SIGSTOP
        self.count += self._is_stopped


def two_copies(job: Path) -> Path:
    """A schedule of one rank each."""
    problem = open_file(job).problem
    part = replace(problem, cluster=problem.cluster.with_nodes(num_nodes=1, devices_per_node=1))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate("rra", part, timing, FixedSchedule(
        encode_batch=3, decode_iterations=8)).in_copies(2)
    return given(estimate, problem, job.with_name("two.json"))
