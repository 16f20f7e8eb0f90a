"""Llama, Qwen2 and SmolLM2 layers: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.model import ModelSpec
from xrunner.models.weights import WeightSource


class Rotation(NamedTuple):
    """cos and sin for one step's tokens, shared by all layers: each [T, 1, head_dim]."""

    cos: Tensor
    sin: Tensor


class LlamaLayer:
    """One decoder layer. `norm` and linear weights as in transformers' LlamaDecoderLayer."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int) -> None:
        hidden, dim = spec.hidden_size, spec.head_dim
        self.heads, self.kv_heads, self.dim = spec.num_heads, spec.kv_heads, dim
        self.eps = spec.norm_eps
        prefix = f"model.layers.{index}."
        widths = {"q": self.heads * dim, "k": self.kv_heads * dim, "v": self.kv_heads * dim}

        def get(name: str, *shape: int) -> Tensor:
            return weights.get(prefix + name, shape)

        # one product instead of three (and two): fewer, larger kernels at small batches
        self.qkv_weight = torch.cat([get(f"self_attn.{n}_proj.weight", w, hidden)
                                     for n, w in widths.items()])
        self.qkv_bias = (torch.cat([get(f"self_attn.{n}_proj.bias", w) for n, w in widths.items()])
                         if spec.qkv_bias else None)
        self.out_weight = get("self_attn.o_proj.weight", hidden, self.heads * dim)
        self.gate_up_weight = torch.cat([get(f"mlp.{n}_proj.weight", spec.intermediate_size, hidden)
                                         for n in ("gate", "up")])
        self.down_weight = get("mlp.down_proj.weight", hidden, spec.intermediate_size)
        self.input_norm = get("input_layernorm.weight", hidden)
        self.mlp_norm = get("post_attention_layernorm.weight", hidden)

    def qkv(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> query [T, h, d], key [T, k, d], value [T, k, d], rotated."""
        normed = rms_norm(hidden, self.input_norm, self.eps)
        joint = F.linear(normed, self.qkv_weight, self.qkv_bias)
        joint = joint.view(len(hidden), self.heads + 2 * self.kv_heads, self.dim)
        rotated = _rotate(joint[:, :self.heads + self.kv_heads], rotation)
        return (rotated[:, :self.heads], rotated[:, self.heads:],
                joint[:, self.heads + self.kv_heads:])

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [T, H], attended [T, h * d] -> the layer's output [T, H]."""
        hidden = hidden + F.linear(attended, self.out_weight)
        normed = rms_norm(hidden, self.mlp_norm, self.eps)
        gate, up = F.linear(normed, self.gate_up_weight).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down_weight)


class LlamaEnds:
    """Embedding (first stage), rotary tables (every stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool) -> None:
        table = (spec.vocab_size, spec.hidden_size)
        self.eps, self.dim = spec.norm_eps, spec.head_dim
        self.inverse_frequency = _frequencies(spec)
        self.embedding = weights.get("model.embed_tokens.weight", table) if first else None
        self.norm = self.head_weight = None
        if last:
            self.norm = weights.get("model.norm.weight", (spec.hidden_size,))
            tied = spec.tied_embeddings or not weights.has("lm_head.weight")
            shared = self.embedding if tied else None
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            self.head_weight = shared if shared is not None else weights.get(name, table)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T] -> hidden [T, H]."""
        assert self.embedding is not None, "only the first stage embeds"
        return F.embedding(tokens, self.embedding)

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions [T] -> what each layer's `qkv` needs besides the hidden state."""
        angles = positions[:, None].float() * self.inverse_frequency[None, :].to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, V]."""
        assert self.norm is not None and self.head_weight is not None, (
            "only the last stage has a head")
        return F.linear(rms_norm(hidden, self.norm, self.eps), self.head_weight)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, eps)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, d]; the halves form the rotated pairs, as in transformers."""
    low, high = x.chunk(2, dim=-1)
    return x * rotation.cos + torch.cat([-high, low], dim=-1) * rotation.sin


def _frequencies(spec: ModelSpec) -> Tensor:
    """Inverse rotary frequencies [d / 2], with `linear` or `llama3` scaling if the model has it."""
    dim = spec.head_dim
    inverse = 1.0 / spec.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = dict(spec.rope_scaling or ())
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        return inverse
    factor = float(scaling["factor"])
    if kind == "linear":
        return inverse / factor
    assert kind == "llama3", f"{kind = }"
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse
