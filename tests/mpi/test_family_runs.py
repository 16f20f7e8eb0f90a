"""RRA in chunks of three sizes, two copies of one rank, and Sarathi as the planner chooses it, on
real ranks: tokens equal `generate`, the replay takes the run's steps, and a run of which a rank was
killed is completed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
import toys  # noqa: E402
from given_runs import given, killed_and_gone_on, run  # noqa: E402
from job_folder import XGPT, as_requests, read_lines  # noqa: E402
from replayed import problem_of  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem  # noqa: E402
from xgpt.core.queries import QueryLengths  # noqa: E402
from xgpt.core.schedule import Estimate  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xrunner.query import PreparedQuery  # noqa: E402
from xrunner.rules.windows import window_of  # noqa: E402
from xscheduler.planner import Planner, PlanOptions  # noqa: E402
from xsimulator.replay.job import replay_job  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.mpi
CHUNKS = (3, 11, 64)  # of inputs of up to 20 tokens: parts of one, of two queries, whole ones
slow = pytest.mark.slow


class Toy(NamedTuple):
    directory: Path
    queries: list[PreparedQuery]
    answers: dict[str, list[int]]
    reference: Any  # transformers' model

    def problem(self, devices: int) -> Problem:
        return problem_of(self.directory, np.array(
            [[len(q.input_ids), len(self.answers[q.id])] for q in self.queries]), devices)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    reference, queries = toys.make_model("llama", directory), toys.random_queries(30, seed=8)
    return Toy(directory, queries, {q.id: toys.generate(reference, q) for q in queries},
               reference)


@slow  # test_exact_runs.py has chunks on ranks, the engine's tests their replay
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_three_sizes_on_two_stages(toy, tmp_path, chunk):
    problem = toy.problem(devices=2)
    one = estimated("rra", problem, FixedSchedule(
        encode_batch=4, decode_iterations=5, encode_chunk=chunk))
    steps = check_run(toy, tmp_path / "out", problem, one, copies=1)
    mixed = [step for step in steps if step[0] == "mixed"]
    assert mixed and max(tokens for *_, queries, tokens in mixed) > 1
    assert len(one.deployment.stages) == 2


def test_two_copies_of_one_rank(toy, tmp_path):
    problem = toy.problem(devices=1)
    one = estimated("rra", problem, FixedSchedule(encode_batch=6, decode_iterations=4))
    # A copy's window holds its whole share, which it keeps: with a smaller one, a copy whose next
    # queries come late because the other was not let run decodes on without them, and no replay of
    # its queries knows when.
    assert window_of(one).waiting >= 0.6 * len(toy.queries)
    check_run(toy, tmp_path / "out", problem, one, copies=2)


@slow  # chunks are encoded beside decoding in test_exact_runs.py
def test_what_auto_chooses_of_those_that_encode_beside_decoding(toy, tmp_path):
    problem = toy.problem(devices=2)
    problem = replace(problem, fixed=replace(problem.fixed, policies=("sarathi", "vllm")))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    planned = Planner(problem, timing, PlanOptions(horizon="steady", has_margin=False)).steady()
    copies = planned.deployment.replicas
    part = replace(problem, cluster=problem.cluster.with_nodes(
        num_nodes=1, devices_per_node=2 // copies))
    one = planned.estimate.one_copy.changed(kv_tokens=20_000)
    steps = check_run(toy, tmp_path / "out", part, one, copies=copies)
    assert any(kind == "mixed" for kind, *_ in steps)


def estimated(policy: str, problem: Problem, config: object) -> Estimate:
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    found: Estimate = fixed_estimate(policy, problem, timing, config)
    return found.changed(kv_tokens=20_000)


def check_run(toy: Toy, out: Path, problem: Problem, one: Estimate,
              copies: int) -> list[tuple[Any, ...]]:
    """Runs so many copies of an estimate; asserts that they answer as `generate` does and take the
    steps of a replay of the queries that each took. The steps."""
    out.mkdir()
    given(one.in_copies(copies) if copies > 1 else one, problem, out / "schedule.json")
    stages = one.deployment.stages
    run(toy.directory, out, as_requests(toy.queries), ranks=copies * one.deployment.num_devices)
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in toy.queries]
    assert {r["id"]: r["output_ids"] for r in results} == toy.answers
    logged, found = read_lines(out / "steps.jsonl"), []
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    for copy in range(copies):
        own = sorted((r for r in results if r.get("replica", 0) == copy),
                     key=lambda r: (r["encode_start_s"] if copies > 1 else 0.0, r["index"]))
        assert len(own) > 5
        pool = replay_job(problem, timing, one, QueryLengths(
            inputs=np.array([r["input_tokens"] for r in own]),
            outputs=np.array([r["output_tokens"] for r in own]),
            most_outputs=np.array([toy.queries[r["index"]].max_new_tokens for r in own]))).pools[0]
        expected = [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
                     tokens + decoded) for step, encoded, decoded, tokens in zip(
            pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
            strict=True)]
        for stage in range(len(stages)):
            assert [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
                    for s in logged if s["stage"] == copy * len(stages) + stage] == expected
        found += expected
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in /proc")
@pytest.mark.parametrize(("policy", "config", "copies"), [
    pytest.param("rra", FixedSchedule(encode_batch=3, decode_iterations=8, encode_chunk=2), 1,
                 marks=slow, id="chunks"),
    pytest.param("sarathi", FixedSchedule(max_active=6, token_budget=8), 2, marks=slow),
    pytest.param("rra", FixedSchedule(encode_batch=3, decode_iterations=8), 2, marks=slow,
                 id="two-copies-of-two-ranks")])
def test_a_run_goes_on_after_a_rank_was_killed(toy, tmp_path, profiled, policy, config, copies):
    ranks = 4 if policy == "rra" and copies == 2 else 2
    query = PreparedQuery(index=0, id="q0", input_ids=(7, 8, 9), max_new_tokens=40, is_forced=True)
    requests = [{"id": f"q{i}", "tokens": list(query.input_ids), "forced_tokens": 40}
                for i in range(300)]
    job = job_folder.write_job(tmp_path, toy.directory, requests, ranks=ranks,
                               schedule=f"policy: {policy}, replicas: {copies}")
    problem = open_file(job).problem
    part = replace(problem, cluster=problem.cluster.with_nodes(
        num_nodes=1, devices_per_node=ranks // copies))
    one = estimated(policy, part, config)
    file = given(one.in_copies(copies) if copies > 1 else one, problem, tmp_path / "given.json")
    cache = profiled("llama", ranks)
    found = killed_and_gone_on([*XGPT, "run", str(job), "--schedule", str(file)],
                               tmp_path / "out", cache, count=300)
    (expected,) = {tuple(row["output_ids"]) for row in found.results}
    assert list(expected) == toys.generate(toy.reference, query)
