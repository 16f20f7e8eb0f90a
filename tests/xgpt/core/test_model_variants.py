"""Variants that would run with wrong tokens are refused, by the key that makes them one."""

from __future__ import annotations

from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.core.model import from_hf_config

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
