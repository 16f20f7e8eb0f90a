# owner tb
"""Stages of a toy model of random weights, and the logits that come of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from toy_runs import split_stages
from toys import logits_of

from xgpt.core.model import ModelSpec
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs

LENGTHS, CAPACITY = [9, 1, 14], 24


def shape(family: str = "llama", **changes: Any) -> ModelSpec:
    """A toy of Llama's shape, or of one with plain MLPs and biases."""
    own: dict[str, Any] = {
        "name": "toy", "family": family, "num_layers": 4, "hidden_size": 48, "num_heads": 6,
        "num_kv_heads": 3, "vocab_size": 97, "intermediate_size": 36, "is_gated_mlp": True,
        "has_bias": False, "tied_embeddings": True, "max_positions": 64}
    if family in ("opt", "gpt2"):
        own |= {"num_kv_heads": None, "is_gated_mlp": False, "has_bias": True,
                "has_learned_positions": True}
    if family == "gpt2":
        own["activation"] = "gelu_new"
    return ModelSpec(**{**own, **changes})


def logits_through(spec: ModelSpec, stages: int, dtype: torch.dtype = torch.float32, *,
                   weights: Any = None, passed: list[torch.dtype] | None = None,
                   **more: Any) -> Tensor:
    """Of a decode step after an encode step, through that many stages; `passed` takes the types of
    what a stage gives to the next. `more`: of StageModel."""
    weights = weights or RandomWeights(dtype, scale=0.3)
    models = [StageModel(spec, weights, stage, dtype, **more)
              for stage in split_stages(spec.num_layers, stages)]
    caches = [torch.zeros(len(m.layers), 2, len(LENGTHS), m.kv_heads, CAPACITY, spec.head_dim,
                          dtype=dtype) for m in models]
    out = torch.arange(sum(LENGTHS)) * 7 % spec.vocab_size
    spans, step = encode_context(whole_inputs(LENGTHS)), decode_context([n + 1 for n in LENGTHS])
    with torch.inference_mode():
        for model, cache in zip(models, caches, strict=True):
            out = model.encode(out, cache, spans)
        out = torch.tensor([3, 50, 96])
        for model, cache in zip(models, caches, strict=True):
            out = model.decode(out, cache, step)
            if passed is not None and not model.is_last:
                passed.append(out.dtype)
        return logits_of(models[-1], out)
