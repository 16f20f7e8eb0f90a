"""Static batches of a Hugging Face model, as DeepSpeed's ranks work them, here without DeepSpeed:
the same answers as transformers' `generate` and as the runner's own engine, by the replay's
steps; and what the first rank leaves in the folder."""

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from examples import some
from job_folder import read_lines
from plans import plan_of
from problems import estimate_from_flat, schedule_from_flat
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import Collector, run_in_process
from toys import EOS, random_queries, spec_of

from xgpt.core.controls import RraControls
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import save_schedule
from xrunner.backends import deepspeed_worker
from xrunner.backends.deepspeed_worker import PaddedModel
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head
from xrunner.engine.pipeline import Neighbours, Route, await_start, serve_stage
from xrunner.engine.pool_requests import Vocabulary
from xrunner.query import PreparedQuery, Sampling
from xrunner.rank.world import World
from xrunner.rules.static import StaticRule, static_rule


def rule_of(batch: int, groups: int = 1, encodes: int | None = None) -> StaticRule:
    return StaticRule(encode_batch=batch, num_groups=groups, kv_tokens=10_000,
                      encode_micro_batches=encodes or groups)


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def run(made: tuple[Path, Any], queries: Sequence[PreparedQuery], rule: StaticRule,
        sink: Collector | None = None, ranks: int = 1) -> tuple[Collector, list[PaddedModel]]:
    """Every rank holds the whole model: what the others compute is only looked at for its steps."""
    directory, model = made
    comms, sink = local_comms(ranks), sink or Collector()
    executors = [PaddedModel(model, max_positions=spec_of(directory).max_positions,
                             gives_answers=rank == 0) for rank in range(ranks)]

    def follow(rank: int) -> None:
        neighbours = Neighbours(comms[rank], Route(rank=rank, pool="all", stage=0, steps_from=0))
        await_start(neighbours, executors[rank])
        serve_stage(neighbours, executors[rank])

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True)
               for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    route = Route(rank=0, pool="all", stage=0, steps_from=None, peers=tuple(range(1, ranks)))
    head = Head(rule=rule, executor=executors[0], neighbours=Neighbours(comms[0], route), sink=sink,
                vocabulary=Vocabulary(eos_ids=frozenset([EOS]), decode_text=text_of))
    for query in queries:
        assert head.submit(query)
    head.start()
    is_complete = head.run()
    assert is_complete or sink.should_stop()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return sink, executors


FAMILIES = ("opt", "llama", "qwen2", "gpt2")
SIZES = ((4, 1, 1), (9, 1, 3), (7, 2, 4), (17, 3, 3))  # batch, groups, parts encoded


# each family with one of the sizes
@pytest.mark.parametrize(("family", "batch", "groups", "encodes"), some(
    [(family, *sizes) for family in FAMILIES for sizes in SIZES],
    lambda case: FAMILIES.index(case[0]) == SIZES.index(case[1:])))
def test_padded_batches_answer_as_generate_does(made, answered, family, batch, groups, encodes):
    queries, expected = answered(family)
    sink, _ = run(made(family), queries, rule_of(batch, groups, encodes))
    assert answers_of(sink) == expected
    assert [r.query.index for r in sink.results] == list(range(len(queries)))


@pytest.mark.parametrize(("name", "batch", "groups", "parts"), [
    ("ft", 4, 1, None), ("ft", 7, 3, None), ("dsi", 8, 1, 3), ("dsi", 8, 2, 2)])
def test_the_steps_are_those_of_the_replay(made, answered, name, batch, groups, parts):
    queries, expected = answered("opt")
    outputs = [len(expected[q.index]) for q in queries]
    problem = problem_for(made("opt")[0], queries, outputs, devices=2)
    estimate = estimated(name, problem, encode_batch=batch, decode_micro_batches=groups,
                         tp_degree=2, tp_gpus=2,
                         encode_micro_batches=None if parts is None else parts * groups)
    _, executors = run(made("opt"), queries, static_rule(estimate), ranks=2)
    pool = replayed(problem, estimate, queries, outputs).pools[0]
    for executor in executors:
        assert [step[:5] for step in steps_of(executor.log)] == [
            step[:5] for step in whole_steps(pool)]


def test_a_row_that_is_done_may_outlive_the_models_positions(made):
    """Of 128: the first row ends at 102, and goes on beside the second up to 220."""
    queries = [PreparedQuery(index=0, id="a", input_ids=tuple([7, 9] * 50), max_new_tokens=2),
               PreparedQuery(index=1, id="b", input_ids=(8, 9), max_new_tokens=120,
                             is_forced=True)]
    sink, _ = run(made("opt"), queries, rule_of(2))
    assert answers_of(sink) == generated(made("opt")[1], queries)


def test_limits_stop_strings_and_seeds_end_and_draw_as_in_the_own_engine(made):
    queries = []
    for q in random_queries(12, seed=5):
        drawn = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=q.index)
        queries.append(replace(
            q, sampling=drawn if q.index % 2 else Sampling(), is_forced=q.index % 3 == 0,
            stop=("4",) if q.index % 4 == 1 else (), max_new_tokens=25))
    sink, _ = run(made("opt"), queries, rule_of(5))
    own, _ = run_in_process(made("opt")[0], queries, num_stages=2, num_groups=2)
    found, wanted = ({r.query.index: (r.output_ids, r.finish_reason, r.text) for r in s.results}
                     for s in (sink, own))
    assert found == wanted
    assert len({reason for _, reason, _ in found.values()}) == 2
    assert any("4" not in text and reason == "stop" for _, reason, text in found.values())


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


def test_a_run_leaves_the_same_files_as_the_own_engine(plan, made):
    deepspeed_worker.run(plan, WORLD)
    results = read_lines(plan.output / "results.jsonl")
    assert [r["output_ids"] for r in results] == [
        toys.generate(made("opt")[1], q) for q in toys.random_queries(11)]
    assert [e["id"] for e in read_lines(plan.output / "errors.jsonl")] == ["bad", "long"]
    measured = json.loads((plan.output / "measured.json").read_text())
    assert (measured["state"], measured["queries"], measured["errors"]) == ("done", 11, 2)
    assert measured["output_tokens"] == sum(r["output_tokens"] for r in results)
    assert measured["stages"][0]["bytes_read"] > 0
    progress = json.loads((plan.output / "progress.json").read_text())
    assert (progress["state"], progress["done"], progress["total"]) == ("done", 11, 11)
    steps = read_lines(plan.output / "steps.jsonl")
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
    assert [r["output_ids"] for r in read_lines(results)] == [
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
