"""Jobs resolved to Problems: shapes, devices, dtypes, lengths; what a fingerprint tells apart."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.hf.config import from_hf_config
from xgpt.core.problem import UNLIMITED, output_room
from xgpt.core.system import machine as local
from xgpt.job.job_lengths import DEFAULT_MAX_TOKENS
from xgpt.job.resolve import resolve, resolve_dtype
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, Requests
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.memory import capacity_bytes, kv_bytes
from xsimulator.plans import StagePlans
from xsimulator.rough.pool_memory import PoolMemory

LINES = [{"id": "a", "tokens": [1, 2, 3], "forced_tokens": 4},
         {"id": "b", "tokens": [1] * 10, "forced_tokens": 20, "max_tokens": 30}]
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "vocab_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
PROMPTS = "workload={requests: prompts.jsonl%s}"
GPT2 = "model=gpt2"
FILES = "workload={input_tokens: {file: %s.csv}, output_tokens: {file: %s.csv}}"
CPU = ("cluster={device: {kind: cpu, memory_bytes: %s, flops_per_s: {float32: 160e9, bfloat16: %s}"
       ", bandwidth_bytes_per_s: 13 GB}, devices_per_node: 1, intra_link: pcie3-x16}")


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path, LINES)
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "a", "max_tokens": 9}\nbad\n{"prompt": "b"}\n', encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("input,output\n3,1\n30,10\n", encoding="utf-8")
    (tmp_path / "far.csv").write_text("1000,20\n20,1000\n", encoding="utf-8")
    (tmp_path / "one.csv").write_text("7\n9\n", encoding="utf-8")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


def write_lines(folder, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "tokens.jsonl").write_text(text, encoding="utf-8")


def resolved(folder, *overrides, lengths=None):
    """As the launcher does. `lengths`: of the prompts in tokens, where they were tokenised."""
    own = job(folder, *overrides, workload="{task: S}")
    if own.workload.requests is None:
        return resolve(own)
    rows = [row for row in read_requests(own.workload.requests) if isinstance(row, Request)]
    known = lengths
    if known is None and all(row.tokens is not None for row in rows):
        known = [len(row.tokens) for row in rows]
    return resolve(own, requests=Requests(
        input_tokens=None if known is None else np.array(known, np.int64),
        are_tokenised=lengths is not None,
        caps=np.array([row.output_cap(0) for row in rows], np.int64),
        forced=np.array([row.forced_tokens or 0 for row in rows], np.int64),
        may_stop=np.array([bool(row.stop) for row in rows], bool)))


NO_RUNNER = "no runner under xgpt does"


@pytest.mark.parametrize(("overrides", "lengths", "said"), [
    (("model=someone/something",), None, "config.json is fetched"),
    ((PROMPTS % "",), None, "workload.input_tokens.*tokenised"),
    ((PROMPTS % ", output_tokens: from_requests",), [7, 9],
     "2 of 2 requests have no forced_tokens"),
    ((PROMPTS % ", max_tokens: 40", GPT2), [2000, 1024], "no prompt has a token and is shorter"),
    (("model=t5-11b", "schedule.order=prefix"), None, "order = 'prefix': another for an encoder"),
    ((FILES % ("one", "one"),), None, "no column input")])
def test_what_cannot_be_resolved_is_wrong_input(folder, overrides, lengths, said):
    """The commands' corpus has others."""
    with pytest.raises(InputError, match=re.compile(said, re.S)):
        resolved(folder, *overrides, lengths=lengths)


def test_a_catalog_job_a_folder_and_a_hub_id_resolve_to_their_rows(folder):
    problem = resolved(folder)
    assert problem.model == catalog.model("opt-13b")
    assert problem.cluster == catalog.cluster("a40-4")
    assert problem.lengths.outputs.quantile(0.99) == 63
    assert (problem.dtype, problem.weight_dtype) == ("bfloat16", "bfloat16")
    assert problem.num_queries is None
    assert problem.default_max_tokens == 80, "the longest output planned for"
    assert resolved(folder, "workload.requests={count: 2000}").num_queries == 2000
    nine = "{mean: 9, std: 1, max: 20}"
    toy = resolved(folder, "model=./toy",
                   f"workload={{input_tokens: {nine}, output_tokens: {nine}}}").model
    assert (toy.name, toy.num_layers) == ("toy", 2)
    assert resolved(folder, "model=facebook/opt-125m").model.name == "opt-125m"
    shape = catalog.model("opt-125m")
    fetched = job(folder, "model=someone/something", workload="{task: S}")
    assert resolve(fetched, model=shape).model is shape


@pytest.mark.parametrize(("cluster", "ranks", "nodes", "per_node"), [
    ("a40-4", 2, 1, 2), ("a40-48", 8, 1, 8), ("a40-48", 12, 2, 6), ("a40-48", 48, 6, 8)])
def test_ranks_take_a_part_of_the_cluster_evenly(folder, cluster, ranks, nodes, per_node):
    part = resolved(folder, f"cluster={cluster}", f"run.ranks={ranks}").cluster
    assert (part.num_nodes, part.devices_per_node) == (nodes, per_node)


def test_a_local_cluster_is_built(folder, monkeypatch):
    monkeypatch.setattr(local, "_query_gpus", list)
    here = resolved(folder, "cluster=local", "run.ranks=3").cluster
    assert (here.num_devices, here.device.kind) == (3, "cpu")


@pytest.mark.parametrize(("wish", "device", "rates", "dtype"), [
    ("auto", "A40", None, "bfloat16"), ("auto", "T4", None, "float16"),
    ("float32", "T4", None, "float32"),
    # on a CPU bfloat16 alone, and only with a unit for it
    ("auto", "cpu", {"float32": 1e11}, "float32"),
    ("auto", "cpu", {"float32": 1e11, "float16": 1e11}, "float32"),
    ("auto", "cpu", {"float32": 1e11, "bfloat16": 1e12}, "bfloat16")])
def test_auto_takes_the_best_dtype_a_device_has(wish, device, rates, dtype):
    own = catalog.device(device) if rates is None else replace(
        catalog.device("A40"), kind="cpu", flops_per_s=tuple(rates.items()))
    assert resolve_dtype(wish, own) == dtype


@pytest.mark.parametrize(("brain", "memory", "held"), [
    ("85e9", "64 GiB", "bfloat16"),  # OPT-13B as float32 takes 48 GiB, more than half
    ("85e9", "128 GiB", "float32"), ("300e9", "128 GiB", "bfloat16")])
def test_weights_are_widened_where_that_is_quicker_and_has_room(folder, brain, memory, held):
    problem = resolved(folder, CPU % (memory, brain))
    assert (problem.dtype, problem.weight_dtype) == ("bfloat16", held)
    forced = resolved(folder, CPU % (memory, brain), "run.weight_dtype=bfloat16")
    assert forced.weight_dtype == "bfloat16"


@pytest.mark.parametrize(("flag", "is_refused"), [
    ("avx512_vnni", False), ("avx_vnni", False), ("avx2", True)])
def test_int8_is_for_processors_that_multiply_bytes(folder, monkeypatch, flag, is_refused):
    monkeypatch.setattr(local, "_cpuinfo", lambda root: f"flags\t\t: avx512f {flag}\n")
    asked = ("cluster=local", "run.ranks=1", "run.weight_dtype=int8")
    if is_refused:
        with pytest.raises(InputError, match="VNNI"):
            resolved(folder, *asked)
    else:
        assert resolved(folder, *asked).weight_dtype == "int8"


@pytest.mark.parametrize(("key", "wish", "engine", "other"), [
    ("weight_dtype", "fp8", "vllm", "fastertransformer"),
    ("kv_dtype", "fp8", "vllm", "fastertransformer"),
    ("weight_dtype", "int8", "fastertransformer", "deepspeed"),
    ("kv_dtype", "int8", "tensorrt-llm", "vllm")])
def test_8_bits_are_planned_as_engines_execute_them_and_refused_where_they_would_be_run(
        folder, key, wish, engine, other):
    problem = resolved(folder, f"run.{key}={wish}", f"plan.engine={engine}")
    assert getattr(problem, key) == wish and problem.dtype == "bfloat16"
    for asked in ((), (f"plan.engine={other}",),
                  (f"plan.engine={engine}", "slurm={partition: gpu, nodes: 1}")):
        with pytest.raises(InputError, match=f"(?s)(?=.*{NO_RUNNER})(?=.*{engine})"):
            resolved(folder, f"run.{key}={wish}", *asked)


@pytest.mark.parametrize("wish", ["fp8", "int8"])
def test_entries_of_8_bits_take_half_the_memory_and_half_the_bytes_of_a_step(folder, wish):
    plain, narrow = (resolved(folder, "plan.engine=tensorrt-llm", *more)
                     for more in ((), (f"run.kv_dtype={wish}",)))
    assert plain.kv_dtype == plain.dtype and plain.kv_item_bytes == 2 * narrow.kv_item_bytes
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=4)
    held = [kv_bytes(problem, (stage,), 100.0)[0] for problem in (plain, narrow)]
    assert held[0] == 2 * held[1]
    times = [Roofline(plain.model, plain.cluster.device, "bfloat16", engine="tensorrt-llm",
                      kv_dtype=problem.kv_dtype).operator_s(
        Operator.DECODE_ATTENTION, 256.0, 4000.0) for problem in (plain, narrow)]
    assert 1.7 < times[0] / times[1] < 2.0


def test_what_an_engine_keeps_of_a_gpus_memory_is_not_planned(folder):
    own, sglang = (resolved(folder, *more).cluster.device for more in ((), ("plan.engine=sglang",)))
    kept = catalog.engine("sglang").reserve_gb * 1e9
    assert own.reserved_bytes == 0 and capacity_bytes(own) - capacity_bytes(sglang) == kept > 1e9


def test_a_cache_of_tensorrt_llm_takes_its_share_of_what_weights_and_steps_leave(folder):
    """And has room for all that a request may write before it is admitted."""
    own, engine = (resolved(folder, *more) for more in ((), ("plan.engine=tensorrt-llm",)))
    device = engine.cluster.device
    assert capacity_bytes(device) == device.memory_bytes > capacity_bytes(own.cluster.device)
    plan = StagePlans(engine, Roofline(engine.model, device, "bfloat16")).both(1, 0)
    pool, step = PoolMemory(engine, plan), (np.array([64.0]), np.array([8.0]))
    (beside,) = pool.fullest(np.zeros(1), *step)
    (tokens,) = pool.most_tokens(float(device.memory_bytes), *step)
    taken = kv_bytes(engine, plan.stages, tokens).max()
    assert taken == pytest.approx(0.9 * (device.memory_bytes - beside))
    assert own.adjustment.admission.rule is None
    assert engine.adjustment.admission.rule == "reserve"
    asked = resolved(folder, "plan.engine=tensorrt-llm", "schedule.admission=greedy")
    assert asked.adjustment.admission.rule == "greedy"


@pytest.mark.parametrize(("overrides", "tokens", "pairs"), [
    (("workload={requests: tokens.jsonl, output_tokens: from_requests}",), None,
     [[3, 4], [10, 20]]),
    # every query to its cap, which ends where the model's positions do
    ((PROMPTS % ", max_tokens: 40",), [7, 9], [[7, 9], [9, 40]]),
    ((PROMPTS % ", max_tokens: 4000", GPT2), [7, 1000], [[7, 9], [1000, 24]]),
    # prompts beyond the positions, and of no token, are left out
    ((PROMPTS % ", max_tokens: 40", GPT2), [7, 1024], [[7, 9]]),
    ((PROMPTS % ", max_tokens: 40", "model=t5-11b"), [7, 0], [[7, 9]]),
    ((FILES % ("lengths", "lengths"),), None, [[3, 1], [30, 10]]),
    ((FILES % ("far", "far"), GPT2), None, [[1000, 20], [20, 1000]])])
def test_lengths_of_requests_are_joint(folder, overrides, tokens, pairs):
    assert resolved(folder, *overrides, lengths=tokens).lengths.pairs.tolist() == pairs


def test_lengths_of_two_sources_are_not_joint_and_end_at_their_maxima(folder):
    five = ", output_tokens: {mean: 5, std: 1, max: 9}"
    problem = resolved(folder, PROMPTS % five, lengths=[7, 9])
    assert (problem.lengths.inputs.max, problem.lengths.outputs.max) == (9, 9)
    assert problem.num_queries == 2, "the bad line is no query"
    mixed = resolved(folder, FILES % ("one", "lengths")).lengths
    assert mixed.pairs is None and (mixed.inputs.max, mixed.outputs.max) == (9, 10)
    beside = resolved(folder, GPT2, PROMPTS % (
        ", max_tokens: 4000, input_tokens: {mean: 500, std: 9, max: 1000}"))
    assert beside.lengths.outputs.max == 24, "they end where the positions do"
    uncapped = resolved(folder, PROMPTS % "", lengths=[7, 9])
    assert uncapped.lengths.outputs.max == uncapped.default_max_tokens == DEFAULT_MAX_TOKENS
    assert resolved(folder, "workload.task=C2").lengths.inputs.max == 1024
    narrow = resolved(folder, "workload={input_tokens: {mean: 9, std: 1e-9, max: 20}, "
                              "output_tokens: {mean: 5, std: 0, max: 9}}").lengths
    assert (narrow.inputs.mean, narrow.outputs.mean) == (9, 5)
    relative = resolved(folder, "model=t5-11b", "workload={input_tokens: {mean: 2e4, std: 9, max: "
                        "30000}, output_tokens: {mean: 5, std: 1, max: 9}}").lengths
    assert relative.inputs.max == 30_000, "relative positions have no limit"


@pytest.mark.parametrize("outputs", ["from_requests", "observe", "{mean: 9, std: 2, max: 20}"])
def test_forced_outputs_beyond_the_positions_are_left_out_of_the_plan(folder, outputs):
    """They become error records: a file with one was refused, or planned for as if it ran."""
    lines = [{"id": "a", "tokens": [1] * 7, "forced_tokens": 5},
             {"id": "b", "tokens": [1] * 9, "forced_tokens": 1016}]
    write_lines(folder, lines)
    asked = (GPT2, "workload={requests: tokens.jsonl, input_tokens: from_requests, output_tokens: "
             f"{outputs}}}")
    problem = resolved(folder, *asked, lengths=[7, 9])
    assert problem.lengths.inputs.max == 7 and problem.lengths.outputs.max in (5, 20)
    assert problem.queries.most_outputs.tolist() == [5, 0]
    assert problem.queries.reserves.tolist() == [12, 1]
    write_lines(folder, lines[1:])
    with pytest.raises(InputError, match="forced_tokens fit after it into the model's 1024"):
        resolved(folder, *asked, lengths=[9])


def test_a_schedule_fits_jobs_of_the_same_shape_dtype_and_ranks(folder):
    base = resolved(folder).fingerprint
    assert len(base) == 16
    same = [(), ("workload.task=T",), ("constraint.latency_s=3",),
            ("cluster=h100-8", "run.ranks=4"), ("schedule.encode_batch=3",)]
    assert {resolved(folder, *overrides).fingerprint for overrides in same} == {base}
    other = [("model=opt-6.7b",), ("run.dtype=float16",), ("run.ranks=2",)]
    found = {resolved(folder, *overrides).fingerprint for overrides in other}
    assert len(found) == 3 and base not in found
    # a config.json spells out what the row leaves to defaults
    shape = replace(catalog.model("opt-13b"), name="mine", hub_id=None, source="config.json",
                    num_kv_heads=40, head_size=128, has_qkv_bias=True)
    assert resolve(job(folder, workload="{task: S}"), model=shape).fingerprint == base


BART = {"model_type": "bart", "vocab_size": 97, "d_model": 48, "encoder_layers": 3,
        "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_position_embeddings": 32}


def test_an_encoder_takes_none_of_its_decoders_positions():
    inputs, bart = np.array([1, 31, 32, 33]), from_hf_config(BART, "toy")
    decoder = replace(catalog.model("opt-13b"), max_positions=32)
    assert output_room(bart, inputs).tolist() == [32, 32, 32, 0]
    assert output_room(decoder, inputs).tolist() == [31, 1, 0, -1]
    assert output_room(catalog.model("t5-11b"), inputs).tolist() == [UNLIMITED] * 4
    assert int(output_room(bart, 7)) == 32 and int(output_room(decoder, 7)) == 25
