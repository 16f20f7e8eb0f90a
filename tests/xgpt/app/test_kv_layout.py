"""How KV entries lie is decided by device, policy and job, and what is not executed is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import opened
from xgpt.app.checks import refuse_what_cannot_run, refuse_what_no_machine_runs
from xgpt.app.kv_layout import lies_in_blocks
from xgpt.app.opened import OpenedJob
from xgpt.app.telling import LogTeller
from xgpt.core.errors import InputError
from xgpt.core.job_file import load_job
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xscheduler.planner import plan
from xscheduler.room import kv_tokens_for, slots_for

POLICIES = {"rra": "policy: rra, encode_batch: 4, decode_iterations: 8", "waa-c":
            "policy: waa-c, encode_batch: 1", "orca": "policy: orca, max_active: 8",
            "ft": "policy: ft, encode_batch: 4"}


def laid_out(folder, cluster, model="opt-1.3b", layout="auto", schedule=POLICIES["rra"]):
    return opened(folder, model=model, cluster=cluster, run=f"{{kv_layout: {layout}}}",
                  workload="{requests: {count: 200}, task: S}",
                  schedule=f"{{{schedule}, replicas: 1, tp_degree: 1}}")


def estimate_of(own: OpenedJob) -> Estimate:
    problem = own.problem
    return plan(problem, Roofline(problem.model, problem.cluster.device, problem.dtype)).estimate


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Estimate]:
    folder = tmp_path_factory.mktemp("planned")
    return {name: estimate_of(laid_out(folder, "a40-4", schedule=schedule))
            for name, schedule in POLICIES.items()}


@pytest.mark.parametrize(("policy", "cluster", "layout", "in_blocks"), [
    ("rra", "a40-4", "auto", True), ("rra", "local", "auto", False),
    ("rra", "a40-4", "rows", False), ("rra", "local", "blocks", True),
    ("waa-c", "a40-4", "auto", True), ("waa-c", "local", "blocks", True),
    ("orca", "local", "blocks", False),  # in blocks by itself, whatever is reserved
    ("ft", "a40-4", "auto", False)])
def test_a_gpus_memory_is_taken_in_blocks_and_a_cpus_in_rows(
        tmp_path, estimates, policy, cluster, layout, in_blocks):
    own = laid_out(tmp_path, cluster, layout=layout)
    assert lies_in_blocks(own, estimates[policy]) is in_blocks


@pytest.mark.parametrize(("policy", "model", "layout", "words"), [
    ("orca", "opt-1.3b", "rows", "auto or blocks with orca"),
    ("ft", "opt-1.3b", "blocks", "auto or rows with ft"),
    ("rra", "t5-11b", "blocks", "auto or rows with an encoder-decoder model")])
def test_what_is_not_executed_is_refused(tmp_path: Path, estimates: dict[str, Estimate],
                                         policy: str, model: str, layout: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lies_in_blocks(laid_out(tmp_path, "local", model, layout), estimates[policy])


@pytest.mark.parametrize("engine", ["vllm", "deepspeed"])
def test_another_engine_lays_out_its_own(tmp_path: Path, engine: str) -> None:
    laid_out(tmp_path, "local", schedule=POLICIES["ft"])
    asked = [f"run.engine={engine}", "run.kv_layout=rows", "run.deterministic=true"]
    job = load_job(tmp_path / "job.yaml", asked)
    for refuse in (refuse_what_no_machine_runs, lambda job: refuse_what_cannot_run(
            job, LogTeller())):
        with pytest.raises(InputError) as refused:
            refuse(job)
        assert {"run.kv_layout", "run.deterministic"} <= {
            mistake.key for mistake in refused.value.mistakes}


def test_room_for_changes_is_tokens_where_it_was_rows(tmp_path: Path,
                                                      estimates: dict[str, Estimate]) -> None:
    own, estimate = laid_out(tmp_path, "a40-4"), estimates["rra"]
    figures, deployment = estimate.figures, estimate.deployment
    full = estimate.changed(memory_bytes=tuple(figures.memory_capacity_bytes
                                               for _ in figures.memory_bytes))
    longest = 20 * deployment.group_kv_tokens
    planned = slots_for(full, own.problem, longest, 1.0)
    assert slots_for(full, own.problem, longest, 2.0) == planned, "no memory for one row more"
    assert slots_for(full, own.problem, longest, 2.0, in_blocks=True) > planned
    # as many tokens as planned where nothing is left, more where something is, never too many
    assert kv_tokens_for(full, own.problem, 10**9) == deployment.group_kv_tokens
    most = kv_tokens_for(estimate, own.problem, 10**9)
    assert most > deployment.group_kv_tokens
    assert kv_tokens_for(estimate, own.problem, most - 1) == most - 1
