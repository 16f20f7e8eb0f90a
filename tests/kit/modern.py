"""Toy checkpoints of the gated families of today, each of transformers' own class of config, with
windows shorter than the sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import EOS, VOCAB, stir_norms_and_biases

LAYERS, WINDOW, POSITIONS = 5, 7, 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
         "rope_theta": 10000.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.3, 2.0],
             "long_factor": [2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
             "partial_rotary_factor": 0.75}
# name -> (prefix of transformers' classes, what its config states beside the shape)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW,
                                "max_window_layers": 2}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "falcon3": ("Llama", {"head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000042.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3Text", {
        "head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
        "sliding_window_pattern": 3, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": ("Phi3", {"rope_parameters": _LONGROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 5.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2,
                            "sliding_window": WINDOW}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 20, "norm_topk_prob": True}),
}


def make_modern(family: str, directory: Path, **other: Any) -> Any:
    """Writes a model of `family` to `directory`; returns transformers' own instance. `other`: of
    its config."""
    import transformers

    torch.manual_seed(0)
    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **own, **other})
    # the others leave soft-capping out
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 or name.endswith("gate.weight"):  # experts, which begin as zeros
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    return model
