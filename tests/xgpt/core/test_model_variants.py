"""Variants that would run with wrong tokens are refused, by the key that makes them one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.core.hf_config import from_hf_config
from xgpt.core.job_file import load_job
from xgpt.core.problem import resolve

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "vocab_size": 11, "intermediate_size": 16}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "vocab_size": 11, "ffn_dim": 16, "max_position_embeddings": 32}


@pytest.mark.parametrize(("config", "key", "value"), [
    (LLAMA, "mlp_bias", True),
    ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 4}, "mlp_only_layers", [1]),
    ({**LLAMA, "model_type": "qwen3"}, "layer_types", ["full_attention", "chunked_attention"]),
    ({**LLAMA, "model_type": "gemma2"}, "use_bidirectional_attention", True),
    (OPT, "activation_function", "gelu"), (OPT, "do_layer_norm_before", False)])
def test_a_variant_nobody_implements_is_refused(config: dict[str, Any], key: str,
                                                value: object) -> None:
    assert from_hf_config(config, "plain").num_layers == 2
    with pytest.raises(InputError, match=key):
        from_hf_config({**config, key: value}, "variant")


@pytest.mark.parametrize(("key", "stored", "named"), [
    ("quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
    ("compression_config", {"format": "int-quantized"}, "int-quantized"),
    ("quantization_config", {"bits": 8}, "not named")])
def test_a_quantised_checkpoint_is_refused_by_its_methods_name(
        key: str, stored: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"{key}.*quantised by.*{named}"):
        from_hf_config({**LLAMA, key: stored}, "variant")
    assert from_hf_config({**LLAMA, key: None}, "plain").num_layers == 2


SHAPE = LLAMA | {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 64}


@pytest.mark.parametrize(("config", "why"), [
    ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope'"),
    ({"model_type": "gemma2", "hidden_activation": "xielu"}, "hidden_activation 'xielu'")])
def test_shapes_that_are_only_planned_are_read_and_say_what_is_not_executed(
        config: dict[str, Any], why: str) -> None:
    spec = from_hf_config({**SHAPE, **config}, "x")
    assert why in spec.planned_only and spec.kv_elements_per_token_layer == 12
    plain = {key: value for key, value in config.items() if key == "model_type"}
    assert not from_hf_config({**SHAPE, **plain}, "x").planned_only


def test_a_family_nobody_knows_is_refused_by_its_name_with_who_has_it() -> None:
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
def test_windows_are_of_the_layers_that_the_config_says(
        config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert from_hf_config({**SHAPE, **config}, "x").decoder.windows == windows


def test_longrope_is_executed_within_the_positions_of_its_short_factors() -> None:
    rope = {"type": "longrope", "short_factor": [1.0, 1.0, 2.0], "long_factor": [1.0, 2.0, 3.0]}
    config = {**SHAPE, "model_type": "phi3", "rope_scaling": rope,
              "original_max_position_embeddings": 16}
    spec = from_hf_config(config, "x")
    assert spec.max_positions == 16 and dict(spec.rope_scaling or ())["factor"] == 4.0
    with pytest.raises(InputError, match=r"rope_scaling\.short_factor"):
        from_hf_config({**config, "rope_scaling": {"type": "longrope"}}, "x")


def test_a_mistral_whose_window_holds_all_positions_is_executed() -> None:
    for window in (None, 64, 128):
        spec = from_hf_config({**SHAPE, "model_type": "mistral", "sliding_window": window}, "x")
        assert spec == from_hf_config(SHAPE, "x")


def test_a_model_that_is_only_planned_is_planned_elsewhere_and_refused_here(
        tmp_path: Path) -> None:
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
