"""Variants that would run with wrong tokens are refused, by the key that makes them one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.core.hf_config import from_hf_config
from xgpt.core.job_file import load_job
from xgpt.core.problem import resolve

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 11, "intermediate_size": 16}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "vocab_size": 11, "ffn_dim": 16, "max_position_embeddings": 32}


@pytest.mark.parametrize(("config", "key", "value"), [
    (LLAMA, "mlp_bias", True),
    ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 4}, "mlp_only_layers", [1]),
    ({**LLAMA, "model_type": "qwen3"}, "layer_types", ["full_attention", "chunked_attention"]),
    ({**LLAMA, "model_type": "gemma2"}, "use_bidirectional_attention", True),
    (OPT, "activation_function", "gelu"), (OPT, "do_layer_norm_before", False)])
def test_a_variant_nobody_implements_is_refused(config, key, value):
    assert from_hf_config(config, "plain").num_layers == 2
    with pytest.raises(InputError, match=key):
        from_hf_config({**config, key: value}, "variant")


@pytest.mark.parametrize(("key", "stored", "named"), [
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ("quantization_config", {"quant_method": "hqq"}, "hqq"),
    ("compression_config", {"format": "sparse-24"}, "sparse-24"),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
    ("quantization_config", {"bits": 8}, "not named")])
def test_weights_of_an_unknown_method_are_refused_by_its_name(key, stored, named):
    with pytest.raises(InputError, match=f"{key}.*quantised by .*{named}.*known are.*awq, gptq"):
        from_hf_config({**LLAMA, key: stored}, "variant")
    assert not from_hf_config({**LLAMA, key: None}, "plain").stored_as


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": False}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**own, **weights}}}}


def mixed() -> dict[str, Any]:
    one, other = compressed(), compressed(num_bits=8)
    return {**one, "config_groups": {**one["config_groups"],
                                     "group_1": other["config_groups"]["group_0"]}}


@pytest.mark.parametrize(("stored", "words"), [
    (FP8, "8 bits (fp8, blocks of 128 x 128; activations stay plain)"),
    (compressed(), "4 bits (compressed-tensors pack-quantized, groups of 64)"),
    (compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
     "8 bits (compressed-tensors int-quantized, a scale a row)"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="tensor", group_size=None),
     "8 bits (compressed-tensors float-quantized, a scale a tensor)"),
    (AWQ, "4 bits (AWQ, groups of 128)"), (GPTQ, "4 bits (GPTQ, a scale a row)"),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
     "4 bits (AWQ, groups of 64)"),
    ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*down.*": {}}},
     "8 bits (GPTQ, a scale a row)")])
def test_weights_of_fewer_bits_are_planned_and_said(stored, words):
    spec = from_hf_config({**LLAMA, "quantization_config": stored}, "x")
    assert spec.stored_as == words and spec.num_params == from_hf_config(LLAMA, "x").num_params


@pytest.mark.parametrize(("stored", "key", "allowed"), [
    (compressed("marlin-24"), "format", "pack-quantized"),
    (compressed("mixed-precision"), "format", "pack-quantized"),
    (compressed("nvfp4-pack-quantized"), "format", "pack-quantized"),
    (compressed(num_bits=3), r"config_groups\.group_0\.weights\.num_bits", "4 or 8 bits"),
    (compressed(type="float"), r"config_groups\.group_0\.weights\.type", "int"),
    (compressed(group_size=None), r"config_groups.*weights\.group_size", "of the strategy"),
    (mixed(), "config_groups", "store weights alike"),
    ({**compressed(), "transform_config": {"config_groups": {}}}, "transform_config", "none"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size", "two whole numbers"),
    ({**FP8, "fmt": "e5m2"}, "fmt", "e4m3"),
    ({**AWQ, "bits": 8}, "bits", "4 bits"), ({**AWQ, "version": "gemv"}, "version", "gemm"),
    ({**AWQ, "zero_point": False}, "zero_point", "only true"),
    ({**AWQ, "group_size": 0}, "group_size", "whole number"),
    ({**GPTQ, "bits": 5}, "bits", "2 or 3 or 4 or 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", "only false"),
    ({**GPTQ, "dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic", "left out")])
def test_what_a_method_is_not_read_with_is_named(stored, key, allowed):
    with pytest.raises(InputError, match=f"quantization_config.{key}.*{allowed}"):
        from_hf_config({**LLAMA, "quantization_config": stored}, "x")


def test_gpt2s_weights_of_fewer_bits_are_refused():
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11,
              "n_positions": 16}
    with pytest.raises(InputError, match="quantization_config.*gpt2 family"):
        from_hf_config({**config, "quantization_config": GPTQ}, "x")
    assert from_hf_config(config, "x").family == "gpt2"


SHAPE = LLAMA | {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 64}


@pytest.mark.parametrize(("config", "why"), [
    ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope'"),
    ({"model_type": "gemma2", "hidden_activation": "xielu"}, "hidden_activation 'xielu'")])
def test_shapes_that_are_only_planned_are_read_and_say_what_is_not_executed(config, why):
    spec = from_hf_config({**SHAPE, **config}, "x")
    assert why in spec.planned_only and spec.kv_elements_per_token_layer == 12
    plain = {key: value for key, value in config.items() if key == "model_type"}
    assert not from_hf_config({**SHAPE, **plain}, "x").planned_only


def test_a_family_nobody_knows_is_refused_by_its_name_with_who_has_it():
    with pytest.raises(InputError, match="model_type: 'mamba2'|mamba2.*vLLM"):
        from_hf_config({**SHAPE, "model_type": "mamba2"}, "x")


@pytest.mark.parametrize(("config", "windows"), [
    ({"model_type": "gemma2", "sliding_window": 8}, (8, None)),
    ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
    ({"model_type": "gemma3_text", "sliding_window": 8}, (8, 8)),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, ()),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True,
      "max_window_layers": 1}, (None, 8)),
    ({"model_type": "mistral", "sliding_window": 8, "max_position_embeddings": 8}, ())])
def test_windows_are_of_the_layers_that_the_config_says(config, windows):
    assert from_hf_config({**SHAPE, **config}, "x").decoder.windows == windows


def test_longrope_is_executed_within_the_positions_of_its_short_factors():
    rope = {"type": "longrope", "short_factor": [1.0, 1.0, 2.0], "long_factor": [1.0, 2.0, 3.0]}
    config = {**SHAPE, "model_type": "phi3", "rope_scaling": rope,
              "original_max_position_embeddings": 16}
    spec = from_hf_config(config, "x")
    assert spec.max_positions == 16 and dict(spec.rope_scaling or ())["factor"] == 4.0
    with pytest.raises(InputError, match=r"rope_scaling\.short_factor"):
        from_hf_config({**config, "rope_scaling": {"type": "longrope"}}, "x")


def test_a_mistral_whose_window_holds_all_positions_is_executed():
    for window in (None, 64, 128):
        spec = from_hf_config({**SHAPE, "model_type": "mistral", "sliding_window": window}, "x")
        assert spec == from_hf_config(SHAPE, "x")


def test_a_model_that_is_only_planned_is_planned_elsewhere_and_refused_here(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        **SHAPE, "hidden_act": "relu2", "max_position_embeddings": 1024}))
    words = "model: {model}\ncluster: {cluster}\nworkload: {{task: S, requests: {{count: 5}}}}\n"
    for cluster in ("h100-8", "local"):
        job = tmp_path / f"{cluster}.yaml"
        job.write_text(words.format(model=tmp_path, cluster=cluster), encoding="utf-8")
        if cluster == "local":
            with pytest.raises(InputError, match="relu2' is planned for.*engine: vllm"):
                resolve(load_job(job))
        else:
            assert resolve(load_job(job)).model.planned_only
