"""Models that are planned and not executed: their parameters are those that are published, their
caches what their attention leaves, and whoever would run them is told."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.hf.config import PLANNED_TYPES, from_hf_config
from xgpt.core.model import (
    ModelSpec,
    active_params,
    kv_elements_of_rank,
    model_from_dict,
    refuse_tp_degree,
)
from xprofiler.profile import model_shape
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "vocab_size": 129280, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "rope_scaling": {"type": "yarn", "factor": 40},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "vocab_size": 102400, "quantization_config": None}
SCOUT = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
    "vocab_size": 202048, "max_position_embeddings": 10485760, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False}
MAVERICK = SCOUT | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 10240, "vocab_size": 262208, "sliding_window": 1024,
    "max_position_embeddings": 131072}
EXECUTED: dict[str, dict[str, Any]] = {  # sizes of the published config.json
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False},
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 32000, "sliding_window": 4096},
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "intermediate_size": 14336, "vocab_size": 256000, "sliding_window": 4096},
    "gemma-3-4b": GEMMA3,
    "phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 17920,
        "vocab_size": 100352, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False},
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}}
ALL: dict[str, dict[str, Any]] = {
    "deepseek-v3": DEEPSEEK_V3, "deepseek-v2-lite": V2_LITE, "llama-4-scout": SCOUT,
    "llama-4-maverick": MAVERICK, "scout-that-sees": {"model_type": "llama4", "text_config": SCOUT},
    "gemma-3-4b": {"model_type": "gemma3", "text_config": GEMMA3}}


def shape(name: str) -> ModelSpec:
    return from_hf_config(ALL[name], name)


@pytest.mark.parametrize(("name", "total", "active"), [
    ("deepseek-v3", 671e9, 37e9), ("deepseek-v2-lite", 15.7e9, 2.4e9),
    ("llama-4-scout", 109e9, 17e9), ("llama-4-maverick", 400e9, 17e9)])
def test_parameters_are_those_that_are_published(name, total, active):
    """Within 2 %: Scout's have the vision tower among them. Published active ones are with the
    embedding or without one of its copies."""
    spec = shape(name)
    assert spec.num_params == pytest.approx(total, rel=0.02)
    assert active_params(spec) - spec.embedding_params == pytest.approx(active, rel=0.04) or (
        active_params(spec) == pytest.approx(active, rel=0.04))


@pytest.mark.parametrize(("name", "total", "active"), [
    ("qwen3-8b", 8.19e9, 0.0), ("mistral-7b", 7.24e9, 0.0), ("gemma-2-9b", 9.24e9, 0.0),
    ("gemma-3-4b", 3.88e9, 0.0), ("phi-4", 14.66e9, 0.0), ("qwen3-30b-a3b", 30.5e9, 3.3e9),
    ("mixtral-8x7b", 46.7e9, 12.9e9)])
def test_parameters_of_what_is_executed_too_are_those_of_the_model_cards(name, total, active):
    """Gemma 3's are those of its text model: the card's 4.3e9 less the vision tower's."""
    spec = from_hf_config(EXECUTED[name], name)
    assert spec.num_params == pytest.approx(total, rel=0.003)
    if active:
        assert active_params(spec) == pytest.approx(active, rel=0.02)


def test_parameters_of_layers_of_two_kinds_are_added_up():
    attention = SCOUT["hidden_size"] * 128 * 2 * (40 + 8)
    mixture, dense = 5120 * (128 * (3 * 8192 + 1) + 3 * 8192), 3 * 5120 * 16384
    layers = 48 * (attention + 2 * 5120) + 24 * (mixture + dense)
    assert abs(shape("llama-4-maverick").num_params
               - (layers + 2 * 202048 * 5120 + 5120)) <= 48


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_a_token_leaves_its_latent_vector_and_every_rank_holds_it_whole(name):
    spec = shape(name)
    assert spec.kv_elements_per_token_layer == 512 + 64
    assert kv_elements_of_rank(spec, 8) == kv_elements_of_rank(spec, 1) == 576
    assert kv_elements_of_rank(shape("llama-4-scout"), 8) == 2 * 8 * 128 / 8


@pytest.mark.parametrize("name", ALL)
def test_each_says_what_of_it_is_not_executed_and_comes_back_from_json(name):
    from dataclasses import asdict

    spec = shape(name)
    assert spec.planned_only and model_from_dict(asdict(spec)) == spec
    with pytest.raises(InputError, match="num_hidden_layers"):
        values = ALL[name]
        text = values.get("text_config", values) | {"num_hidden_layers": None}
        from_hf_config(values | {"text_config": text} if "text_config" in values else text, name)


def test_every_planned_kind_is_among_these():
    assert {values["model_type"] for values in ALL.values()} == set(PLANNED_TYPES)


def test_a_model_that_sees_is_planned_as_its_text_model():
    seeing, text = shape("scout-that-sees"), shape("llama-4-scout")
    assert seeing.num_params == text.num_params and "vision" in seeing.planned_only
    with pytest.raises(InputError, match="text_config"):
        from_hf_config({"model_type": "gemma3"}, "x")


def test_degrees_divide_what_every_token_goes_through_too():
    spec = shape("llama-4-scout")
    assert refuse_tp_degree(spec, 8) is None
    experts = spec.decoder.experts
    assert experts is not None
    odd = replace(spec, decoder=replace(spec.decoder, experts=replace(experts, shared=8193)))
    assert "shared experts" in str(refuse_tp_degree(odd, 8))


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-maverick"])
def test_times_grow_with_size_and_fall_in_relation_to_it(name):
    source = Roofline(shape(name), catalog.device("H200"), "bfloat16", engine="vllm")
    x = np.geomspace(1, 1e5, 60)
    for operator in (Operator.LAYER_REST, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION):
        seconds = source.operator_s(operator, x, 300.0, tp_degree=8)
        assert (np.diff(seconds) >= 0).all(), operator
    rest = source.operator_s(Operator.LAYER_REST, x, tp_degree=8)
    assert (np.diff(rest / x) <= 1e-15).all()


def test_decoding_over_latents_reads_less_and_computes_more_than_over_heads():
    """DeepSeek-V3 at 4,000 tokens: 57 times fewer bytes than keys and values of 128 heads; its
    heads multiply the latent vectors, which takes 3.4 times the operations."""
    spec, device = shape("deepseek-v3"), catalog.device("H200")
    plain = replace(spec, decoder=replace(spec.decoder, latent=None))
    assert plain.kv_elements_per_token_layer == pytest.approx(57 * 576, rel=0.01)
    latent_s, heads_s = (float(Roofline(own, device, "bfloat16", engine="vllm").operator_s(
        Operator.DECODE_ATTENTION, 64.0, 4000.0)) for own in (spec, plain))
    assert 5 < heads_s / latent_s < 57


def test_profiles_of_models_without_these_parts_keep_their_shapes_fingerprint():
    """What came later counts only where it says something."""
    assert model_shape(catalog.model("llama-3.1-8b")) == LLAMA_SHAPE
    assert model_shape(shape("deepseek-v3")) != model_shape(
        replace(shape("deepseek-v3"), decoder=replace(shape("deepseek-v3").decoder, latent=None)))


LLAMA_SHAPE = "15bfc5df617a2978"
