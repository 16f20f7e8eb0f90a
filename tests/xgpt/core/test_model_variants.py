"""Variants that would run with wrong tokens are refused, by the key that makes them one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.core.job_file import load_job
from xgpt.core.model import from_hf_config
from xgpt.core.problem import resolve

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "vocab_size": 11, "intermediate_size": 16}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "vocab_size": 11, "ffn_dim": 16, "max_position_embeddings": 32}


@pytest.mark.parametrize(("config", "key", "value"), [
    (LLAMA, "attention_bias", True), (LLAMA, "mlp_bias", True), (LLAMA, "hidden_act", "gelu"),
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
    ({"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}, "norms of"),
    ({"model_type": "mistral", "sliding_window": 16}, "the last 16 tokens"),
    ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "as one"),
    ({"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8},
     "window")])
def test_shapes_that_are_only_planned_are_read_and_say_what_is_not_executed(
        config: dict[str, Any], why: str) -> None:
    """The shape is Llama's; of Gemma the head is the embedding though its config leaves it out."""
    spec, llama = (from_hf_config({**SHAPE, **own}, "x") for own in (config, {}))
    assert why in spec.planned_only and not llama.planned_only
    assert spec.head_dim == 6 and spec.kv_elements_per_token_layer == 12
    assert spec.decoder_layer_params == llama.decoder_layer_params
    assert spec.tied_embeddings == (config["model_type"] == "gemma2")


def test_a_mistral_whose_window_holds_all_positions_is_executed() -> None:
    for window in (None, 64, 128):
        spec = from_hf_config({**SHAPE, "model_type": "mistral", "sliding_window": window}, "x")
        assert spec == from_hf_config(SHAPE, "x")


def test_a_model_that_is_only_planned_is_planned_elsewhere_and_refused_here(
        tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        **SHAPE, "model_type": "qwen3", "max_position_embeddings": 1024}))
    words = "model: {model}\ncluster: {cluster}\nworkload: {{task: S, requests: {{count: 5}}}}\n"
    for cluster in ("h100-8", "local"):
        job = tmp_path / f"{cluster}.yaml"
        job.write_text(words.format(model=tmp_path, cluster=cluster), encoding="utf-8")
        if cluster == "local":
            with pytest.raises(InputError, match="norms of queries and keys is planned for"):
                resolve(load_job(job))
        else:
            assert resolve(load_job(job)).model.planned_only
