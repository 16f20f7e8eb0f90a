"""`weights: random`: the same model however it is divided, and never more of it than a slice."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from examples import some
from safetensors.torch import save_file
from toy_runs import run_in_process, split_stages
from toys import logits_of, random_queries, spec_of

from xgpt.core import catalog
from xgpt.core.hf.config import from_hf_config, written_config
from xgpt.core.model import ModelSpec
from xrunner.checkpoint.reader import CheckpointReader, open_weights
from xrunner.checkpoint.source import config_of, read_spec, write_random_model
from xrunner.files.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import WHOLE, RandomWeights, Shard
from xrunner.ops.contexts import encode_context, whole_inputs

SMALL = ModelSpec(name="small", family="llama", num_layers=4, hidden_size=48, num_heads=6,
                  num_kv_heads=2, vocab_size=97, intermediate_size=80, is_gated_mlp=True,
                  has_bias=False, has_qkv_bias=True, max_positions=128, activation="silu")
PLAIN = replace(SMALL, num_kv_heads=None, is_gated_mlp=False, has_bias=True, has_qkv_bias=None,
                has_learned_positions=True)
SHAPES = {
    "llama": SMALL, "qwen2-untied": replace(SMALL, tied_embeddings=False),
    "opt": replace(PLAIN, family="opt", activation="relu"),
    "gpt2": replace(PLAIN, family="gpt2", activation="gelu_new"),
    "t5": replace(SMALL, family="t5", num_encoder_layers=4, num_kv_heads=None, is_gated_mlp=False,
                  has_qkv_bias=None, max_positions=None, activation="relu"),
}


def folder_of(tmp_path: Path, spec: ModelSpec) -> Path:
    write_random_model(tmp_path / "model", spec)
    return tmp_path / "model"


@pytest.mark.parametrize("name", catalog.names("model"))
def test_every_shape_of_the_catalog_is_stated_and_read_back(name, tmp_path):
    folder = folder_of(tmp_path, catalog.model(name))
    assert read_spec(folder, "whatever") == catalog.model(name)
    assert isinstance(open_weights(folder, torch.float32), RandomWeights)


WRITTEN = ("opt-1.3b", "llama-2-70b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b", "smollm2-135m")


@pytest.mark.parametrize("name", WRITTEN)
def test_another_engine_reads_the_same_shape_from_it(name, tmp_path):
    spec = catalog.model(name)
    config = written_config(spec)
    write_random_model(tmp_path, spec, config)
    read = from_hf_config(config, name)
    assert (read.num_params, read.kv_elements_per_token_layer, read.rope_scaling) == (
        spec.num_params, spec.kv_elements_per_token_layer, spec.rope_scaling)
    assert read_spec(tmp_path, name) == spec and eos_ids(tmp_path) == frozenset()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]


def test_a_models_own_config_is_taken_where_it_is_at_hand(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "own": 1, "eos_token_id": 2, **written_config(catalog.model("smollm2-135m"))}))
    own = config_of(str(tmp_path), catalog.model("smollm2-135m"))
    assert own["own"] == 1 and own["eos_token_id"] is None
    assert config_of("gpt3-39b", catalog.model("gpt3-39b")) is None, "not written"


def test_a_folder_of_random_weights_has_no_text_and_no_end(tmp_path):
    folder = folder_of(tmp_path, SMALL)
    assert eos_ids(folder) == frozenset() and start_token(folder) == 0
    assert TextTokenizer(folder).decode([1, 2]) == ""


def test_a_folder_of_any_other_kind_is_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert isinstance(open_weights(tmp_path, torch.float32), CheckpointReader)


@pytest.mark.parametrize("family", some(SHAPES, lambda family: family in ("opt", "t5")))
def test_the_tokens_do_not_depend_on_how_the_model_is_divided(family, tmp_path):
    folder = folder_of(tmp_path, SHAPES[family])
    queries = [replace(q, max_new_tokens=12, is_forced=True) for q in random_queries(7)]
    answers = []
    for degrees in ((1,), (2,), (1, 1), (1, 2)):
        sink, _ = run_in_process(folder, queries, degrees=degrees, num_groups=2)
        answers.append({r.query.index: r.output_ids for r in sink.results})
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert len(set(answers[0].values())) > 1, "every query has the same answer"


def allocated_peak(work: Callable[[], object]) -> tuple[object, int]:
    """(what `work()` returns, most bytes its tensors took at any time)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        result = work()
    events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak


@pytest.mark.parametrize(("family", "degree"), some(
    product(SHAPES, (1, 2)), lambda case: case in (("llama", 1), ("t5", 2))))
def test_a_rank_holds_its_slice_and_little_more(family, degree, tmp_path):
    spec = replace(SHAPES[family], hidden_size=384, intermediate_size=1536, vocab_size=6000,
                   num_layers=6, num_encoder_layers=6 if family == "t5" else 0)
    folder = folder_of(tmp_path, spec)
    stages = split_stages(spec.num_layers, 2, encoder_layers=spec.num_encoder_layers)
    for stage in stages:
        weights = open_weights(folder, torch.bfloat16)
        shard = WHOLE if degree == 1 else Shard(1, 2)
        model, peak = allocated_peak(partial(load_stage, spec, weights, stage, shard))
        slice_bytes = weights.bytes_read
        assert model is not None
        assert 0.2 * spec.num_params * 2 / degree < slice_bytes < 0.75 * spec.num_params * 2
        # what is drawn at a time: 2^20 elements in float32; where our own products lay a weight
        # out anew, the largest lies there twice, and a piece of it a third time
        besides = max(4.5 * 2**20, 6000 * 384 * 2 + 1.5 * 2**20)
        assert slice_bytes <= peak < slice_bytes + besides, f"{slice_bytes = } {peak = }"


@pytest.mark.parametrize("family", some(SHAPES, lambda family: family in ("llama", "t5")))
def test_activations_stay_finite_in_half_precision(family, tmp_path):
    spec = replace(SHAPES[family], hidden_size=768, num_heads=12, num_kv_heads=None,
                   intermediate_size=3072)
    folder = folder_of(tmp_path, spec)
    if spec.is_encoder_decoder:
        sink, _ = run_in_process(folder, random_queries(2), num_stages=1, dtype=torch.float16)
        assert len({r.output_ids for r in sink.results}) == 2
        return
    stage = split_stages(spec.num_layers, 1)[0]
    model = StageModel(spec, open_weights(folder, torch.float16), stage, torch.float16)
    cache = torch.zeros(spec.num_layers, 2, 1, model.kv_heads, 24, spec.head_dim,
                        dtype=torch.float16)
    step = encode_context(whole_inputs([24]))
    with torch.inference_mode():
        logits = logits_of(model, model.encode(torch.arange(24), cache, step)).float()
    assert logits.isfinite().all() and 0.01 < float(logits.std()) < 100
    assert spec_of(folder) == spec
