"""Two replicas of vLLM on this machine: tokens are `generate`'s, and each replica's steps are those
of a replay of its own queries."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from given_runs import given, toy_plan
from job_folder import as_requests, read_lines
from replays import estimated, problem_for, replayed, whole_steps

from xgpt.core.controls import FIXED, LEAST_QUERIES
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xrunner.backends.vllm.row import version_in

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
KINDS, COUNT = 20, 200  # so many different queries, repeated
MADE = toys.random_queries(KINDS)
QUERIES = [replace(MADE[i % KINDS], index=i, id=f"q{i}") for i in range(COUNT)]


def two_replicas(python: str, folder: Path, out: Path, policy: str, variables: dict[str, int],
                 outputs: Sequence[int], arrival_s: FloatArray | None = None,
                 ) -> tuple[Problem, Estimate]:
    """Runs the queries by two ranks with an engine each, without the command around them.
    `arrival_s`: when they arrive, [queries]; None: they are there."""
    out.mkdir()
    problem = problem_for(folder, QUERIES, outputs)
    one = estimated(policy, problem, **variables)
    given(one.in_copies(2), problem_for(folder, QUERIES, outputs, 2), out / "schedule.json")
    requests = out.with_suffix(".jsonl")
    requests.write_text("".join(json.dumps(line) + "\n" for line in as_requests(QUERIES)))
    plan = replace(toy_plan(folder, out, query_kv_tokens=100), engine="vllm", routing=FIXED,
                   engine_python=python, engine_version=" ".join(version_in(python)))
    toys.write_spool(plan, requests)
    if arrival_s is not None:
        plan = replace(plan, arrives=True, routing=LEAST_QUERIES)
        np.save(out / "spool" / "arrivals.npy", arrival_s)
    LocalLauncher().run(RankProgram(module="xrunner.backends.vllm.vllm_worker",
                                    argument=plan.save(), count=2), watch=lambda: None)
    return problem, one


@pytest.mark.parametrize(("policy", "variables"), [
    ("sarathi", {"max_active": 7, "token_budget": 16}),
    pytest.param("rra", {"encode_batch": 5, "decode_iterations": 4}, marks=pytest.mark.slow),
    pytest.param("vllm", {"max_active": 6, "token_budget": 24}, marks=pytest.mark.slow)])
def test_each_replica_takes_the_steps_of_its_queries_replay(tmp_path, toy, vllm_python, policy,
                                                            variables):
    expected = [toys.generate(toy[1], q) for q in MADE]
    out = tmp_path / "out"
    problem, one = two_replicas(vllm_python, toy[0], out, policy, variables,
                                [len(expected[i % KINDS]) for i in range(COUNT)])
    results = read_lines(out / "results.jsonl")
    assert [line["id"] for line in results] == [q.id for q in QUERIES]
    assert all(line["output_ids"] == expected[line["index"] % KINDS] for line in results)
    measured = json.loads((out / "measured.json").read_text())
    assert [stage["replica"] for stage in measured["stages"]] == [0, 1]
    for replica in (0, 1):
        own = [line for line in results if line["replica"] == replica]
        assert COUNT // 3 < len(own) < COUNT
        steps: list[tuple[Any, ...]] = [
            (s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in read_lines(out / "steps.jsonl") if s["replica"] == replica]
        lengths = np.array([line["output_tokens"] for line in own])
        assert steps == whole_steps(replayed(
            problem, one, [QUERIES[line["index"]] for line in own], lengths).pools[0])


def test_replicas_answer_requests_that_arrive(tmp_path, toy, vllm_python):
    expected = [toys.generate(toy[1], q) for q in MADE]
    arrival_s = 0.02 * np.arange(COUNT)
    two_replicas(vllm_python, toy[0], tmp_path / "out", "vllm", {
        "max_active": 6, "token_budget": 24}, [len(expected[i % KINDS]) for i in range(COUNT)],
        arrival_s)
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [line["output_ids"] for line in results] == [expected[i % KINDS] for i in range(COUNT)]
    assert [line["arrival_s"] for line in results] == pytest.approx(arrival_s.tolist())
    skew_s = 0.05  # between the clocks of ranks, which leave a barrier one after the other
    assert all(line["arrival_s"] <= line["encode_start_s"] + skew_s for line in results)
    assert {line["replica"] for line in results} == {0, 1}
