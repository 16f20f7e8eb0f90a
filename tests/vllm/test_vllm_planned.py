"""Plans for vLLM use steps timed as they run: two replicas at once, whose start counts."""

import json
import shutil
from pathlib import Path

import pytest
from mpi_runs import call

from xgpt.core.schedule_file import load_schedule
from xprofiler.profile import ENGINE_START, TableKey
from xprofiler.profile_file import load_profile

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_two_replicas_of_random_weights_are_timed_together_and_run(
        tmp_path: Path, toy, vllm_python, cache):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(toy[0] / "config.json", model)  # no weights, no tokenizer
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {model}\ncluster: local\noutput: out\n"
        "workload: {requests: {count: 30}, input_tokens: {mean: 20, std: 5, max: 40}, "
        "output_tokens: {mean: 9, std: 3, max: 16}}\n"
        "schedule: {policy: sarathi, max_active: 9, token_budget: 64, replicas: 2}\n"
        f"run: {{engine: vllm, engine_python: {vllm_python}, weights: random, ranks: 2, "
        "threads_per_rank: 1}\n")
    done = call("submit", job, "--json", env=cache, timeout_s=1700)
    metrics, out = json.loads(done.stdout), tmp_path / "out"
    assert (metrics["status"], metrics["queries"], metrics["weights"]) == ("done", 30, "random")
    deployment = load_schedule(out / "schedule.json").deployment
    assert (deployment.replicas, deployment.tp_degree) == (2, 1)
    profile = load_profile(out / "profile.json")
    assert profile.tp_degrees == (1,) and profile.metadata.ranks == 2
    (start,) = profile.tables[TableKey(ENGINE_START)]
    assert start.x == 2, "engines at once"
    load = metrics["load_s"]
    assert load["predicted"] == pytest.approx(start.median_s, abs=0.1) and load["measured"] > 0
