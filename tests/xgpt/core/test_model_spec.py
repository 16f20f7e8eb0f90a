"""ModelSpec from Hugging Face's config.json, and the parameters it counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.hf.config import from_hf_config
from xgpt.core.model import ModelSpec

OPT_125M = {
    "model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "vocab_size": 50272, "ffn_dim": 3072, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True}
LLAMA_31 = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024, "n_inner": None}
T5_11B = {"model_type": "t5", "num_layers": 24, "d_model": 1024, "num_heads": 128, "d_kv": 128,
          "d_ff": 65536, "vocab_size": 32128, "feed_forward_proj": "relu"}


def _shape(spec: ModelSpec) -> ModelSpec:
    return replace(spec, hub_id=None, wheel=None, source="", name="")


@pytest.mark.parametrize(("config", "row"), [
    (OPT_125M, "opt-125m"), (LLAMA_31, "llama-3.1-8b"), (QWEN, "qwen2.5-0.5b"), (GPT2, "gpt2"),
    (T5_11B, "t5-11b")])
def test_a_config_reads_as_the_catalogs_row(config: dict[str, Any], row: str) -> None:
    read, kept = from_hf_config(config, row), catalog.model(row)
    # the catalog leaves to defaults what the config spells out, and the other way round
    same = {"num_kv_heads": kept.kv_heads, "has_qkv_bias": kept.qkv_bias}
    assert _shape(replace(read, num_kv_heads=read.kv_heads, has_qkv_bias=read.qkv_bias)) == _shape(
        replace(kept, **same))


@pytest.mark.parametrize(("config", "key"), [
    ({"model_type": "bert"}, "model_type"), ({}, "model_type"),
    ({**OPT_125M, "do_layer_norm_before": False}, "do_layer_norm_before"),
    ({**OPT_125M, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ({**LLAMA_31, "rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
    ({**QWEN, "use_sliding_window": "yes"}, "use_sliding_window"),
    ({k: v for k, v in OPT_125M.items() if k != "ffn_dim"}, "ffn_dim")])
def test_what_cannot_run_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        from_hf_config(config, "x")


def test_both_spellings_of_rope_settings_read_alike() -> None:
    new = {k: v for k, v in LLAMA_31.items() if k not in ("rope_theta", "rope_scaling")}
    scaling = LLAMA_31["rope_scaling"]
    assert isinstance(scaling, dict)
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert from_hf_config(new, "x") == from_hf_config(LLAMA_31, "x")


def test_a_tied_head_is_counted_once() -> None:
    spec = catalog.model("smollm2-135m")
    untied = replace(spec, tied_embeddings=False)
    assert untied.num_params - spec.num_params == spec.vocab_size * spec.hidden_size


def test_fewer_key_value_heads_shrink_the_cache_and_the_projections() -> None:
    many, few = catalog.model("llama-2-7b"), replace(catalog.model("llama-2-7b"), num_kv_heads=8)
    assert many.kv_elements_per_token_layer == 4 * few.kv_elements_per_token_layer == 2 * 4096
    assert many.attention_params - few.attention_params == 2 * 4096 * 24 * 128


def test_an_encoder_decoder_counts_cross_attention() -> None:
    spec = catalog.model("t5-11b")
    assert spec.is_encoder_decoder and not catalog.model("opt-13b").is_encoder_decoder
    extra = spec.decoder_layer_params - spec.encoder_layer_params
    assert extra == spec.attention_params + spec.hidden_size
