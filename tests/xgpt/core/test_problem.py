"""Jobs resolved to Problems: shapes, devices, dtypes, lengths; what a fingerprint tells apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.problem import Problem
from xgpt.core.system import machine as local
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.job.job_lengths import DEFAULT_MAX_TOKENS
from xgpt.job.resolve import resolve, resolve_dtype
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, Requests
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.memory import capacity_bytes, kv_bytes

BASE = "model: opt-13b\ncluster: a40-4\nworkload: {task: S}\n"
LINES = [{"id": "a", "tokens": [1, 2, 3], "forced_tokens": 4},
         {"id": "b", "tokens": [1] * 10, "forced_tokens": 20, "max_tokens": 30}]
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "vocab_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "tokens.jsonl").write_text(tokens, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "a", "max_tokens": 9}\nbad\n{"prompt": "b"}\n', encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("input,output\n3,1\n30,10\n", encoding="utf-8")
    (tmp_path / "one.csv").write_text("7\n9\n", encoding="utf-8")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


def _job(folder: Path, *overrides: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(BASE, encoding="utf-8")
    return load_job(path, overrides)


def _resolve(folder: Path, *overrides: str) -> Problem:
    return _resolved(_job(folder, *overrides))


def _resolved(job: Job, token_lengths: Sequence[int] | None = None) -> Problem:
    """As the launcher does. `token_lengths`: of the prompts, where they were tokenised."""
    if job.workload.requests is None:
        return resolve(job)
    rows = [row for row in read_requests(job.workload.requests) if isinstance(row, Request)]
    lengths = token_lengths
    if lengths is None and all(row.tokens is not None for row in rows):
        lengths = [len(row.tokens or ()) for row in rows]
    return resolve(job, requests=Requests(
        input_tokens=None if lengths is None else np.array(lengths, np.int64),
        are_tokenised=token_lengths is not None,
        caps=np.array([row.output_cap(0) for row in rows], np.int64),
        forced=np.array([row.forced_tokens or 0 for row in rows], np.int64),
        may_stop=np.array([bool(row.stop) for row in rows], bool)))


def _refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        _resolve(folder, *overrides)
    return str(caught.value)


def test_a_catalog_job_resolves_to_its_rows(folder: Path) -> None:
    problem = _resolve(folder)
    assert problem.model == catalog.model("opt-13b")
    assert problem.cluster == catalog.cluster("a40-4")
    assert problem.lengths.outputs.quantile(0.99) == 63
    assert (problem.dtype, problem.num_queries) == ("bfloat16", None)
    assert problem.default_max_tokens == 80, "the longest output planned for"


def test_synthetic_requests_are_counted(folder: Path) -> None:
    assert _resolve(folder, "workload.requests={count: 2000}").num_queries == 2000


def test_a_local_folders_config_is_the_model(folder: Path) -> None:
    problem = _resolve(folder, "model=./toy", "workload={input_tokens: {mean: 9, std: 1, max: 20}, "
                                              "output_tokens: {mean: 9, std: 1, max: 20}}")
    assert (problem.model.name, problem.model.num_layers) == ("toy", 2)


@pytest.mark.parametrize(("config", "reason"), [
    ("{", "cannot be read"), ("[]", "not a JSON object"), ('{"model_type": "bert"}', "model_type"),
    (json.dumps({**LLAMA, "hidden_size": "8"}), "hidden_size"),
    (json.dumps({**LLAMA, "num_attention_heads": 0}), "num_attention_heads = 0"),
    (json.dumps({**LLAMA, "rope_theta": None}), "config.json")])
def test_a_config_that_is_no_model_is_wrong_input(folder: Path, config: str, reason: str) -> None:
    (folder / "toy" / "config.json").write_text(config, encoding="utf-8")
    assert reason in _refused(folder, "model=./toy")


def test_a_hub_id_is_its_catalog_row_or_needs_the_fetched_shape(folder: Path) -> None:
    assert _resolve(folder, "model=facebook/opt-125m").model.name == "opt-125m"
    assert "config.json is fetched" in _refused(folder, "model=someone/something")
    shape = catalog.model("opt-125m")
    assert resolve(_job(folder, "model=someone/something"), model=shape).model is shape


@pytest.mark.parametrize(("cluster", "ranks", "nodes", "per_node"), [
    ("a40-4", 2, 1, 2), ("a40-48", 8, 1, 8), ("a40-48", 12, 2, 6), ("a40-48", 48, 6, 8)])
def test_ranks_take_a_part_of_the_cluster_evenly(folder: Path, cluster: str, ranks: int, nodes: int,
                                                 per_node: int) -> None:
    part = _resolve(folder, f"cluster={cluster}", f"run.ranks={ranks}").cluster
    assert (part.num_nodes, part.devices_per_node) == (nodes, per_node)


@pytest.mark.parametrize(("ranks", "reason"), [(5, "at most 4"), (13, "at most 4")])
def test_more_ranks_than_devices_are_refused(folder: Path, ranks: int, reason: str) -> None:
    assert reason in _refused(folder, f"run.ranks={ranks}")


def test_ranks_that_divide_unevenly_over_nodes_are_refused(folder: Path) -> None:
    assert "evenly" in _refused(folder, "cluster=a40-16", "run.ranks=13")


def test_local_makes_as_many_workers_as_ranks(folder: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_query_gpus", list)
    problem = _resolve(folder, "cluster=local", "run.ranks=3")
    assert (problem.cluster.num_devices, problem.cluster.device.kind) == (3, "cpu")


def test_an_inline_cluster_is_built(folder: Path) -> None:
    cluster = _resolve(folder, "cluster={device: {memory_bytes: 8 GiB, "
                               "flops_per_s: {float32: 1e13}, bandwidth_bytes_per_s: 100 GB}, "
                               "devices_per_node: 2, intra_link: {latency_s: 10 us, "
                               "bandwidth_bytes_per_s: 1 GB}}").cluster
    assert cluster.device.memory_bytes == 8 * 2**30 and cluster.num_devices == 2
    assert cluster.device.bandwidth_bytes_per_s == 100e9
    assert cluster.link_between(0, 1).latency_s == pytest.approx(1e-5)


@pytest.mark.parametrize(("device", "dtype"), [("A40", "bfloat16"), ("T4", "float16")])
def test_auto_takes_the_best_dtype_a_gpu_has(device: str, dtype: str) -> None:
    assert resolve_dtype("auto", catalog.device(device)) == dtype
    assert resolve_dtype("float32", catalog.device(device)) == "float32"


def test_auto_on_a_cpu_is_bfloat16_only_with_a_unit_for_it() -> None:
    cpu = replace(catalog.device("A40"), kind="cpu", flops_per_s=(("float32", 1e11),))
    assert resolve_dtype("auto", cpu) == "float32"
    half = replace(cpu, flops_per_s=(("float32", 1e11), ("float16", 1e11)))
    assert resolve_dtype("auto", half) == "float32"
    brain = replace(cpu, flops_per_s=(("float32", 1e11), ("bfloat16", 1e12)))
    assert resolve_dtype("auto", brain) == "bfloat16"


_CPU = ("cluster={{device: {{kind: cpu, memory_bytes: {memory}, flops_per_s: {{float32: 160e9, "
        "bfloat16: {brain}}}, bandwidth_bytes_per_s: 13 GB}}, devices_per_node: 1, "
        "intra_link: pcie3-x16}}")


@pytest.mark.parametrize(("brain", "memory", "held"), [
    ("85e9", "64 GiB", "bfloat16"),  # OPT-13B as float32 takes 48 GiB, more than half
    ("85e9", "128 GiB", "float32"), ("300e9", "128 GiB", "bfloat16")])
def test_weights_are_widened_where_that_is_quicker_and_has_room(
        folder: Path, brain: str, memory: str, held: str) -> None:
    problem = _resolve(folder, _CPU.format(brain=brain, memory=memory))
    assert (problem.dtype, problem.weight_dtype) == ("bfloat16", held)
    forced = _resolve(folder, _CPU.format(brain=brain, memory=memory), "run.weight_dtype=bfloat16")
    assert forced.weight_dtype == "bfloat16"


@pytest.mark.parametrize(("dtype", "wish"), [
    ("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_weights_narrower_or_of_another_kind_are_refused(
        folder: Path, dtype: str, wish: str) -> None:
    said = _refused(folder, _CPU.format(brain="1e9", memory="128 GiB"), f"run.dtype={dtype}",
                    f"run.weight_dtype={wish}")
    assert "run.weight_dtype" in said and dtype in said


def test_weights_on_a_gpu_are_of_the_runs_dtype(folder: Path) -> None:
    assert _resolve(folder).weight_dtype == "bfloat16"
    assert "on CPUs" in _refused(folder, "run.weight_dtype=float32")


@pytest.mark.parametrize(("flag", "refused"), [("avx512_vnni", False), ("avx_vnni", False),
                                               ("avx2", True)])
def test_int8_is_for_processors_that_multiply_bytes(
        folder: Path, monkeypatch: pytest.MonkeyPatch, flag: str, refused: bool) -> None:
    monkeypatch.setattr(local, "_cpuinfo", lambda root: f"flags\t\t: avx512f {flag}\n")
    asked = ("cluster=local", "run.ranks=1", "run.weight_dtype=int8")
    if refused:
        assert "VNNI" in _refused(folder, *asked)
        return
    assert _resolve(folder, *asked).weight_dtype == "int8"


@pytest.mark.parametrize(("key", "wish", "engine", "other"), [
    ("weight_dtype", "fp8", "vllm", "fastertransformer"),
    ("kv_dtype", "fp8", "vllm", "fastertransformer"),
    ("weight_dtype", "int8", "fastertransformer", "deepspeed"),
    ("kv_dtype", "int8", "tensorrt-llm", "vllm")])
def test_8_bits_are_planned_as_engines_execute_them_and_refused_where_they_would_be_run(
        folder: Path, key: str, wish: str, engine: str, other: str) -> None:
    problem = _resolve(folder, f"run.{key}={wish}", f"plan.engine={engine}")
    assert getattr(problem, key) == wish and problem.dtype == "bfloat16"
    for asked in ((), (f"plan.engine={other}",),
                  (f"plan.engine={engine}", "slurm={partition: gpu, nodes: 1}")):
        refusal = _refused(folder, f"run.{key}={wish}", *asked)
        assert "no runner under xgpt does" in refusal and engine in refusal


@pytest.mark.parametrize("key", ["weight_dtype", "kv_dtype"])
def test_fp8_is_refused_on_this_machine(folder: Path, key: str) -> None:
    assert "no runner under xgpt does" in _refused(
        folder, f"run.{key}=fp8", "cluster=local", "run.ranks=1")


@pytest.mark.parametrize("wish", ["fp8", "int8"])
def test_entries_of_8_bits_take_half_the_memory_and_half_the_bytes_of_a_step(
        folder: Path, wish: str) -> None:
    plain, narrow = (_resolve(folder, "plan.engine=tensorrt-llm", *more)
                     for more in ((), (f"run.kv_dtype={wish}",)))
    assert plain.kv_dtype == plain.dtype and plain.kv_item_bytes == 2 * narrow.kv_item_bytes
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=4)
    held = [kv_bytes(problem, (stage,), 100.0)[0] for problem in (plain, narrow)]
    assert held[0] == 2 * held[1]
    times = [Roofline(plain.model, plain.cluster.device, "bfloat16", engine="tensorrt-llm",
                      kv_dtype=problem.kv_dtype).operator_s(
        Operator.DECODE_ATTENTION, 256.0, 4000.0) for problem in (plain, narrow)]
    assert 1.7 < times[0] / times[1] < 2.0


def test_what_an_engine_keeps_of_a_gpus_memory_is_not_planned(folder: Path) -> None:
    own, sglang = (_resolve(folder, *more).cluster.device for more in ((), ("plan.engine=sglang",)))
    kept = catalog.engine("sglang").reserve_gb * 1e9
    assert own.reserved_bytes == 0 and capacity_bytes(own) - capacity_bytes(sglang) == kept > 1e9


def test_requests_give_joint_lengths(folder: Path) -> None:
    problem = _resolve(folder, "workload={requests: tokens.jsonl, output_tokens: from_requests}")
    assert problem.lengths.pairs is not None and problem.num_queries == 2
    assert problem.lengths.pairs.tolist() == [[3, 4], [10, 20]]


def test_tokenised_lengths_are_taken_from_the_caller(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, "
                       "output_tokens: {mean: 5, std: 1, max: 9}}")
    problem = _resolved(job, [7, 9])
    assert (problem.lengths.inputs.max, problem.lengths.outputs.max) == (9, 9)
    assert problem.num_queries == 2, "the bad line is no query"


def test_prompts_that_nobody_tokenised_are_refused_with_the_way_out(folder: Path) -> None:
    reason = _refused(folder, "workload={requests: prompts.jsonl}")
    assert "workload.input_tokens" in reason and "tokenised" in reason


def test_outputs_that_nobody_forced_are_refused(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, output_tokens: from_requests}")
    with pytest.raises(InputError, match="2 of 2 requests have no forced_tokens"):
        _resolved(job, [7, 9])


def test_observe_plans_every_query_to_its_cap(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, max_tokens: 40}")
    lengths = _resolved(job, [7, 9]).lengths
    assert lengths.pairs is not None and lengths.pairs.tolist() == [[7, 9], [9, 40]]
    assert "cap" in lengths.outputs.note


def test_observe_without_any_cap_uses_the_documented_one(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl}")
    problem = _resolved(job, [7, 9])
    assert problem.lengths.outputs.max == problem.default_max_tokens == DEFAULT_MAX_TOKENS


def test_observed_caps_end_where_the_models_positions_do(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, max_tokens: 4000}", "model=gpt2")
    lengths = _resolved(job, [7, 1000]).lengths
    assert lengths.pairs is not None and lengths.pairs.tolist() == [[7, 9], [1000, 24]]


def test_observed_outputs_beside_given_inputs_end_there_too(folder: Path) -> None:
    problem = _resolve(folder, "model=gpt2", "workload={requests: prompts.jsonl, max_tokens: 4000, "
                               "input_tokens: {mean: 500, std: 9, max: 1000}}")
    assert problem.lengths.outputs.max == 24


def test_prompts_beyond_the_positions_are_left_out_of_the_plan(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, max_tokens: 40}", "model=gpt2")
    assert _resolved(job, [7, 1024]).lengths.inputs.max == 7
    with pytest.raises(InputError, match="no prompt has a token and is shorter"):
        _resolved(job, [2000, 1024])


def test_prompts_that_tokenise_to_nothing_are_left_out_of_the_plan(folder: Path) -> None:
    job = _job(folder, "workload={requests: prompts.jsonl, max_tokens: 40}", "model=t5-11b")
    assert _resolved(job, [7, 0]).lengths.inputs.mean == 7


@pytest.mark.parametrize("outputs", ["from_requests", "observe", "{mean: 9, std: 2, max: 20}"])
def test_forced_outputs_beyond_the_positions_are_left_out_of_the_plan(
        folder: Path, outputs: str) -> None:
    """They become error records: a file with one was refused, or planned for as if it ran."""
    lines = [{"id": "a", "tokens": [1] * 7, "forced_tokens": 5},
             {"id": "b", "tokens": [1] * 9, "forced_tokens": 1016}]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = _job(folder, "model=gpt2", "workload={requests: tokens.jsonl, input_tokens: "
                       f"from_requests, output_tokens: {outputs}}}")
    problem = _resolved(job, [7, 9])
    assert problem.lengths.inputs.max == 7 and problem.lengths.outputs.max in (5, 20)
    assert problem.queries is not None and problem.queries.most_outputs.tolist() == [5, 0]
    assert problem.queries.reserves.tolist() == [12, 1]
    lines.pop(0)
    (folder / "tokens.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(InputError, match="forced_tokens fit after it into the model's 1024"):
        _resolved(job, [9])


def test_a_file_of_both_sides_is_joint_and_of_one_is_not(folder: Path) -> None:
    both = _resolve(folder, "workload={input_tokens: {file: lengths.csv}, "
                            "output_tokens: {file: lengths.csv}}").lengths
    assert np.corrcoef(*both.pairs.T)[0, 1] == pytest.approx(1)
    mixed = _resolve(folder, "workload={input_tokens: {file: one.csv}, "
                             "output_tokens: {file: lengths.csv}}").lengths
    assert mixed.pairs is None and (mixed.inputs.max, mixed.outputs.max) == (9, 10)
    assert "columns input and output" in _refused(
        folder, "workload={input_tokens: {file: one.csv}, output_tokens: {file: one.csv}}")


def test_lengths_beyond_the_models_positions_are_refused(folder: Path) -> None:
    reason = _refused(folder, "model=gpt2", "workload.task=C2")
    assert "1664" in reason and "1024 positions of gpt2" in reason
    assert _resolve(folder, "workload.task=C2").lengths.inputs.max == 1024


def test_joint_lengths_are_checked_pair_by_pair(folder: Path) -> None:
    (folder / "lengths.csv").write_text("1000,20\n20,1000\n", encoding="utf-8")
    files = ("workload={input_tokens: {file: lengths.csv}, output_tokens: {file: lengths.csv}}",
             "model=gpt2")
    assert _resolve(folder, *files).lengths.inputs.max == 1000


def test_a_model_of_relative_positions_has_no_limit(folder: Path) -> None:
    lengths = _resolve(folder, "model=t5-11b", "workload={input_tokens: {mean: 9e4, std: 9, "
                               "max: 100000}, output_tokens: {mean: 5, std: 1, max: 9}}").lengths
    assert lengths.inputs.max == 100_000


def test_a_hair_of_spread_is_none(folder: Path) -> None:
    lengths = _resolve(folder, "workload={input_tokens: {mean: 9, std: 1e-9, max: 20}, "
                               "output_tokens: {mean: 5, std: 0, max: 9}}").lengths
    assert (lengths.inputs.mean, lengths.outputs.mean) == (9, 5)


def test_a_schedule_fits_jobs_of_the_same_shape_dtype_and_ranks(folder: Path) -> None:
    base = _resolve(folder).fingerprint
    assert len(base) == 16 and base == _resolve(folder).fingerprint
    same = [("workload.task=T",), ("constraint.latency_s=3",), ("cluster=h100-8", "run.ranks=4"),
            ("schedule.encode_batch=3",)]
    assert {_resolve(folder, *overrides).fingerprint for overrides in same} == {base}
    other = [("model=opt-6.7b",), ("run.dtype=float16",), ("run.ranks=2",)]
    found = {_resolve(folder, *overrides).fingerprint for overrides in other}
    assert len(found) == 3 and base not in found


def test_a_fingerprint_ignores_where_the_same_shape_came_from(folder: Path) -> None:
    # config.json spells out what the row leaves to defaults
    shape = replace(catalog.model("opt-13b"), name="mine", hub_id=None, source="config.json",
                    num_kv_heads=40, head_size=128, has_qkv_bias=True)
    assert resolve(_job(folder), model=shape).fingerprint == _resolve(folder).fingerprint
