"""Writes a shape as a `config.json` of transformers, from which another engine makes random
weights."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from xgpt.core.errors import InputError
from xgpt.core.hf.config import from_hf_config
from xgpt.core.model import ModelSpec

# Families that are written: what reads their file back tells which one it is.
_KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
          "opt": "OPTForCausalLM"}
_KEYS = {"num_hidden_layers": "num_layers", "hidden_size": "hidden_size",
         "num_attention_heads": "num_heads", "num_key_value_heads": "kv_heads",
         "head_dim": "head_dim", "vocab_size": "vocab_size", "ffn_dim": "intermediate_size",
         "intermediate_size": "intermediate_size", "max_position_embeddings": "max_positions",
         "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta", "attention_bias": "out_bias",
         "mlp_bias": "has_bias", "tie_word_embeddings": "tied_embeddings",
         "hidden_act": "activation", "word_embed_proj_dim": "hidden_size"}


def written_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a shape; None for a family that is not written."""
    own = {key: getattr(spec, name) for key, name in _KEYS.items()}
    if spec.rope_scaling is not None:
        own["rope_scaling"] = dict(spec.rope_scaling)
    for kind, architecture in _KINDS.items():
        config = {"model_type": kind, "architectures": [architecture], **own}
        with suppress(InputError):
            if _resolved(from_hf_config(config, spec.name)) == _resolved(spec):
                return config
    return None


def _resolved(spec: ModelSpec) -> ModelSpec:
    """The shape alone, with its defaults resolved."""
    return replace(spec, name="", hub_id=None, wheel=None, source="", not_used="",
                   num_kv_heads=spec.kv_heads, head_size=spec.head_dim,
                   has_qkv_bias=spec.qkv_bias, has_out_bias=spec.out_bias)
