"""`xgpt submit` with real ranks, by each policy that a job may name: what is in the folder then."""

import json

import pytest
import toys
from job_folder import as_requests, read_lines, write_job
from mpi_runs import answered, call, json_of, said, sets
from safetensors.torch import load_file, save_file

from xgpt.core.schedule_file import load_schedule
from xrunner.ops.cpu.products import is_int8_served

pytestmark = pytest.mark.mpi


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow, id="-".join(map(str, case[:3])))


# test_exact_runs.py has real ranks under most of these
@pytest.mark.parametrize(("policy", "family", "ranks", "more"), [
    pytest.param("waa-c", "llama", 2, "encode_batch: 1", id="waa-c"),
    *(slow("rra", family, ranks, "encode_batch: 3, decode_iterations: 4, tp_degree: 1")
      for family in ("llama", "opt") for ranks in (1, 2, 3)),
    slow("rra", "llama", 2, "encode_batch: 3, decode_iterations: 4, tp_degree: 2, tp_gpus: 2"),
    slow("vllm", "llama", 2, "max_active: 6, token_budget: 64, tp_degree: 1"),
    slow("vllm", "opt", 2, "max_active: 6, token_budget: 64, tp_degree: 1"),
    slow("orca", "llama", 2, "max_active: 5, tp_degree: 1"),
    slow("orca", "opt", 2, "tp_degree: 2, tp_gpus: 2"),
    slow("sarathi", "gpt2", 2, "max_active: 8, token_budget: 16, tp_degree: 1"),
    slow("ft", "llama", 2, "encode_batch: 6, tp_degree: 1"),
    slow("ft", "t5", 2, "encode_batch: 6, tp_degree: 1"),
    slow("dsi", "opt", 2, "encode_batch: 8, encode_micro_batches: 4, tp_degree: 1"),
    slow("dsi", "t5", 2, "tp_degree: 1")])
def test_submit_runs_what_the_job_names(tmp_path, profiled, policy, family, ranks, more):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference, queries = toys.make_model(family, directory), toys.random_queries(24, seed=9)
    requests = as_requests(queries)
    requests.insert(3, {"id": "bad", "tokens": []})
    requests.insert(7, {"id": "alien", "tokens": [1, toys.VOCAB + 4]})
    chunk = "encode_chunk: 0, " if policy in ("rra", "waa-c") else ""
    job = write_job(tmp_path, directory, requests, ranks=ranks,
                    schedule=f"policy: {policy}, replicas: 1, {chunk}{more}")
    # in blocks, as on GPUs: test_exact_runs.py has WAA in rows
    layout = ["run.kv_layout=blocks", "schedule.admission=future-peak"] if policy == "waa-c" else []
    done = call("submit", job, "--json", *sets(*layout), env=profiled(family, ranks))
    results, metrics = answered(out, queries, reference), json.loads(done.stdout)
    assert [(e["line"], e["id"]) for e in read_lines(out / "errors.jsonl")] == [
        (4, "bad"), (8, "alien")]
    assert (metrics["queries"], metrics["errors"], metrics["status"]) == (24, 2, "done")
    assert all(metrics[key]["predicted"] > 0 for key in ("throughput_qps", "latency_p99_s"))
    estimate = load_schedule(out / "schedule.json").estimate
    assert estimate.policy == policy
    variables = dict(pair.split(": ") for pair in more.split(", "))
    assert {name: estimate.variables[name] for name in variables if not name.startswith("tp_")} == {
        name: int(value) for name, value in variables.items() if not name.startswith("tp_")}
    pools = estimate.deployment.pools
    assert [(s["role"], s["ranks"]) for s in metrics["stages"]] == [
        (pool.role, list(stage.ranks)) for pool in pools for stage in pool.stages]
    if len(pools) == 1 and ranks > 1:
        size = (directory / "model.safetensors").stat().st_size
        assert max(s["bytes_read"] / len(s["ranks"]) for s in metrics["stages"]) < size
    for stage in metrics["stages"]:
        assert 0 < stage["kv_peak_bytes"] <= stage["kv_bytes"] and stage["kv_planned_bytes"] > 0
        assert policy == "rra" or stage["rows_compacted"] == 0
    steps = read_lines(out / "steps.jsonl")
    kinds = {s["kind"] for s in steps} - {"cross_kv"}
    assert {s["stage"] for s in steps} == {*range(len(metrics["stages"]))}
    assert {"decode"} < kinds <= {"encode", "decode", "mixed"}
    assert ("mixed" in kinds) == (policy in ("orca", "sarathi"))
    latencies = {round(r["encode_start_s"] + r["latency_s"], 5) for r in results}
    assert (len(latencies) <= 8) == (policy in ("ft", "dsi")), "results come batch by batch"
    if policy == "waa-c":
        assert json_of(out / "run.json")["kv_in_blocks"] is True
        assert estimate.controls.admission.rule == "future-peak"
        encode, decode = metrics["stages"]
        assert encode["handover_bytes"] == decode["handover_bytes"] > 0 < encode["handover_s"]
        assert all(s["kind"] == s["role"] for s in steps)
    assert (out / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(("forecast", "weights"), [
    ("cap", "length: 1"),
    pytest.param("{kind: mean, bins: 2}", "length: 1", marks=pytest.mark.slow),
    ("cap", "deadline: 1, length: 0")])
def test_formed_batches_answer_as_those_in_the_inputs_order(tmp_path, profiled, forecast, weights):
    """The reference's tokens are those of `ft` in the input's order, as above."""
    directory, out = tmp_path / "model", tmp_path / "out"
    reference, queries = toys.make_model("llama", directory), toys.random_queries(24, seed=9)
    requests = [{**request, "deadline_s": 2000 - place}
                for place, request in enumerate(as_requests(queries))]
    job = write_job(tmp_path, directory, requests, ranks=2, schedule=(
        f"policy: ft, replicas: 1, tp_degree: 1, batches: {{most: 6, {weights}}}, "
        f"forecast: {forecast}"))
    call("submit", job, env=profiled("llama", 2))
    results, metrics = answered(out, queries, reference), json_of(out / "metrics.json")
    assert (metrics["queries"], metrics["errors"], metrics["status"]) == (24, 0, "done")
    if forecast == "cap":
        keys = [request["max_tokens" if weights == "length: 1" else "deadline_s"]
                for request in requests]
        begun = sorted((row["encode_start_s"], key)
                       for row, key in zip(results, keys, strict=True))
        assert [key for _, key in begun] == sorted(keys)


def test_a_model_that_lacks_a_layer_is_refused_before_anything_is_measured(tmp_path, cache):
    toys.make_model("llama", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"  # less by a layer than the config says
    save_file({name: tensor for name, tensor in load_file(weights).items()
               if not name.startswith("model.layers.4.")}, weights)
    job = write_job(tmp_path, tmp_path / "model", as_requests(toys.random_queries(14)), ranks=2,
                    schedule="policy: rra")
    told = call("submit", job, env=cache, code=2).stderr
    assert "profile" not in told and "model.layers.4" in told and "no such tensor" in told


# with a profile of its own for each layout
@pytest.mark.slow
@pytest.mark.skipif(not is_int8_served(), reason="this processor has no VNNI")
def test_a_job_of_8_bit_products_says_how_far_its_tokens_are_the_models_own(tmp_path, llama, cache):
    """And they are the same in every layout."""
    queries, answers = toys.random_queries(12, seed=5), []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job = write_job(folder, llama[0], as_requests(queries), ranks=ranks, schedule=(
            "policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1"))
        done = call("submit", job, "--json", *sets("run.weight_dtype=int8"), env=cache)
        answers.append([row["output_ids"] for row in read_lines(folder / "out" / "results.jsonl")])
        agreement = json.loads(done.stdout)["agreement"]
        assert agreement["positions"] == sum(len(query.input_ids) for query in queries)
        assert 0 < agreement["agreeing"] <= agreement["positions"]
        assert said(done).count("int8: the most likely next token is that of float32") == 1
    assert answers[0] == answers[1] and len(answers[0]) == 12
