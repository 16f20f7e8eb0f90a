"""What DeepSpeed's first rank leaves in the folder: results, figures, a stop, and the rest later.
The model is transformers' own here; tests/mpi/test_deepspeed_runs.py has DeepSpeed itself."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from plans import plan_of
from problems import estimate_from_flat, schedule_from_flat

from xgpt.core.controls import RraControls
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import save_schedule
from xrunner.backends import deepspeed_worker
from xrunner.comm.point_to_point import local_comms
from xrunner.rank.world import World


def never(*_: object) -> Any:
    raise AssertionError("one rank alone")


WORLD = World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
              abort=never, split=never, duplicate=never)


def estimate_of(layers: int, **changes: Any) -> Estimate:
    values: dict[str, Any] = {
        "policy": "ft", "encode_batch": 4, "decode_batch": 4.0, "decode_iterations": 9,
        "decode_micro_batches": 1, "tp_degree": 1, "tp_gpus": 0, "throughput_qps": 1.0,
        "output_tokens_per_s": 1.0, "latency_s": 1.0, "encode_s": 1.0, "decode_iteration_s": 1.0,
        "period_s": 1.0, "memory_bytes": (1,), "memory_capacity_bytes": 2, "kv_tokens": 400,
        "fits": True, "stages": (StageAssignment(index=0, ranks=(0,), first_layer=0,
                                                 num_layers=layers),)}
    return estimate_from_flat(**{**values, **changes})


@pytest.fixture
def plan(made, tmp_path, monkeypatch):
    directory, model = made("opt")
    monkeypatch.setattr(deepspeed_worker, "load_model", lambda *_: model)
    lines = [{"id": q.id, "tokens": list(q.input_ids), "max_tokens": q.max_new_tokens}
             for q in toys.random_queries(11)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        *lines, {"id": "bad", "tokens": []}, {"id": "long", "tokens": [9] * 90}]))
    save(tmp_path, estimate_of(toys.spec_of(directory).num_layers))
    own = plan_of(tmp_path, directory, max_tokens=40, seed=0, temperature=0.0, query_kv_tokens=100,
                  engine="deepspeed")
    toys.write_spool(own, tmp_path / "requests.jsonl")
    return own


def save(folder: Path, estimate: Estimate) -> None:
    save_schedule(schedule_from_flat(
        estimate=estimate, latency_bound_s=math.inf, constraint_kind="sequence", quantile=0.99,
        status="given", bound_qps=math.inf, gap=0.0, nodes=1, seconds=0.0, fingerprint="x"),
        folder / "schedule.json")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_the_same_files_as_the_own_engine(plan, made):
    deepspeed_worker.run(plan, WORLD)
    results = lines_of(plan.output / "results.jsonl")
    assert [r["output_ids"] for r in results] == [
        toys.generate(made("opt")[1], q) for q in toys.random_queries(11)]
    assert [e["id"] for e in lines_of(plan.output / "errors.jsonl")] == ["bad", "long"]
    measured = json.loads((plan.output / "measured.json").read_text())
    assert (measured["state"], measured["queries"], measured["errors"]) == ("done", 11, 2)
    assert measured["output_tokens"] == sum(r["output_tokens"] for r in results)
    assert measured["stages"][0]["bytes_read"] > 0
    progress = json.loads((plan.output / "progress.json").read_text())
    assert (progress["state"], progress["done"], progress["total"]) == ("done", 11, 11)
    steps = lines_of(plan.output / "steps.jsonl")
    assert [s["queries"] for s in steps if s["kind"] == "encode"] == [4, 4, 3]


def test_a_stop_leaves_whole_batches_and_the_same_command_goes_on(plan, made, monkeypatch):
    results = plan.output / "results.jsonl"

    def stop_after_a_batch(sink: Any) -> bool:
        return len(sink.tally) >= 4

    with monkeypatch.context() as patched:
        patched.setattr("xrunner.files.sink.RunSink.should_stop", stop_after_a_batch)
        deepspeed_worker.run(plan, WORLD)
    measured = json.loads((plan.output / "measured.json").read_text())
    assert (measured["state"], measured["queries"]) == ("stopped", 4)
    with results.open("a") as file:
        file.write('{"id": "torn')
    deepspeed_worker.run(plan, WORLD)
    measured = json.loads((plan.output / "measured.json").read_text())
    assert (measured["state"], measured["queries_before"], measured["queries"]) == ("done", 4, 7)
    assert [r["output_ids"] for r in lines_of(results)] == [
        toys.generate(made("opt")[1], q) for q in toys.random_queries(11)]


def test_the_stop_file_ends_a_run_before_its_first_batch(plan):
    (plan.output / "stop").touch()
    deepspeed_worker.run(plan, WORLD)
    assert (plan.output / "results.jsonl").read_text() == ""
    assert json.loads((plan.output / "measured.json").read_text())["state"] == "stopped"


def test_a_schedule_of_other_stages_or_another_policy_is_refused(plan):
    estimate = estimate_of(5)
    save(plan.output, replace(estimate, controls=RraControls(
        encode_batch=5, decode_iterations=1, decode_micro_batches=1)))
    with pytest.raises(XgptError, match="static batches, ft or dsi"):
        deepspeed_worker.run(plan, WORLD)
    whole = estimate.deployment.stages[0]
    halves = tuple(replace(whole, index=rank, ranks=(rank,), first_layer=rank * whole.num_layers)
                   for rank in (0, 1))
    save(plan.output, estimate.changed(stages=halves))
    with pytest.raises(XgptError, match="the 1 that the launcher started"):
        deepspeed_worker.run(plan, WORLD)


def test_another_engines_results_are_not_gone_on_with(plan):
    assert plan.fingerprint != replace(plan, engine="xgpt").fingerprint
