"""A replica is a pipeline: vLLM divides the layers into stages, and works a step in each."""

import os
import signal
from pathlib import Path
from typing import Any

import by_data_sheets
import pytest
import toys
from job_folder import as_requests, read_lines
from mpi_runs import call
from replays import replayed, whole_steps
from vllm_jobs import vllm_job

from xgpt.app.opened_job import open_file
from xgpt.core.schedule_file import load_schedule
from xrunner.backends.vllm.child import EngineChild
from xrunner.backends.vllm.protocol import Added, Step
from xrunner.backends.vllm.settings import EngineSettings
from xrunner.checkpoint.source import read_spec
from xrunner.engine.pipeline import ExecutorDied
from xrunner.query import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
QUERIES = toys.random_queries(30)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A toy of five layers: three, and two."""
    folder = tmp_path_factory.mktemp("deep")
    return folder, toys.make_modern(
        "llama", folder, hidden_size=128, intermediate_size=192, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("policy", [
    "rra, encode_batch: 5, decode_iterations: 4, encode_chunk: 0, decode_micro_batches: 1",
    "rra, encode_batch: 5, decode_iterations: 4, encode_chunk: 0, decode_micro_batches: 2",
    "sarathi, max_active: 7, token_budget: 16"])  # a group for each stage
def test_two_stages_execute_a_schedule_exactly(tmp_path, deep, vllm_python, cache, policy):
    folder, model = deep
    job = vllm_job(tmp_path, folder, vllm_python, as_requests(QUERIES),
                   f"policy: {policy}, order: input, replicas: 1, tp_degree: 1", ranks=2)
    call("submit", job, "--json", env=cache, timeout_s=800, xgpt=by_data_sheets.COMMAND)
    results, out = read_lines(tmp_path / "out" / "results.jsonl"), tmp_path / "out"
    assert {line["id"]: line["output_ids"] for line in results} == {
        q.id: toys.generate(model, q) for q in QUERIES}
    estimate = load_schedule(out / "schedule.json").estimate
    assert [stage.tp_degree for stage in estimate.deployment.stages] == [1, 1]
    logged = read_lines(out / "steps.jsonl")
    assert [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in logged] == whole_steps(replayed(
                open_file(job).problem, estimate, QUERIES,
                [line["output_tokens"] for line in results]).pools[0])
    assert all(one["end_s"] <= other["start_s"] + 1e-6
               for one, other in zip(logged, logged[1:], strict=False)), "a stage's own times"


def under(process: int) -> list[int]:
    """The processes that it started."""
    return [int(word) for task in Path(f"/proc/{process}/task").iterdir()
            for word in (task / "children").read_text().split()]


def test_steps_are_under_way_together_and_a_stage_that_dies_ends_the_engine(
        tmp_path, deep, vllm_python):
    folder, model = deep
    spec = read_spec(folder, str(folder))
    child = EngineChild(vllm_python, tmp_path / "log", ())
    try:
        child.load(EngineSettings(
            model_dir=folder, dtype="float32", max_queries=2, max_tokens=120, kv_tokens=240,
            kv_token_bytes=4 * spec.kv_elements_per_token_layer * spec.num_layers, stages=(3, 2),
            cores=[[0], [0]], arguments={}).load)
        assert child.await_ready()
        queries: dict[str, Any] = {q.id: q for q in QUERIES[:2]}
        given: dict[str, list[int]] = {name: [] for name in queries}
        for name, query in queries.items():
            child.send(Step([(name, len(query.input_ids))],
                             [Added(name, list(query.input_ids), Sampling())]))
        for _ in range(8):  # of each step the tokens come while the other's is under way
            for name in queries:
                (token,) = child.finish().values()
                given[name].append(token.value)
                child.send(Step([(name, 1)]))
        assert all(toys.generate(model, query)[:8] == given[name][:query.max_new_tokens]
                   for name, query in queries.items())
        assert child._process is not None
        (last,) = [pid for pid in under(child._process.pid)
                   if b"Worker_PP1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(last, signal.SIGKILL)
        with pytest.raises(ExecutorDied):
            for _ in range(3):
                child.finish()
    finally:
        child.close()
