"""Llama, Qwen2 and SmolLM2 layers: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.head import HeadScores, OutputHead
from xrunner.ops.linear import Product
from xrunner.ops.residual import Residual
from xrunner.ops.rows import Rotation, rms_norm, silu_mul


class LlamaLayer:
    """One decoder layer, or one rank's shard of it: as in transformers' LlamaDecoderLayer.
    `heads` (h) and `kv_heads` (k) are this shard's, each of size `dim` (d)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self.heads, self.kv_heads = shard.share(spec.num_heads), shard.share(spec.kv_heads)
        self.dim, self.eps, self._all_reduce = dim, spec.norm_eps, shard.completes
        prefix = f"model.layers.{index}."
        widths = {"q": spec.num_heads * dim, "k": spec.kv_heads * dim, "v": spec.kv_heads * dim}

        def columns(name: str, *shape: int) -> Tensor:  # of the product: rows of the weight
            return weights.get(prefix + name, shape, shard.part(0, shape[0]))

        def rows(name: str, *shape: int) -> Tensor:
            return weights.get(prefix + name, shape, shard.part(1, shape[1]))

        # one product instead of three (and two): fewer, larger kernels at small batches
        self._qkv = Product(
            torch.cat([columns(f"self_attn.{n}_proj.weight", w, hidden)
                       for n, w in widths.items()]),
            torch.cat([columns(f"self_attn.{n}_proj.bias", w) for n, w in widths.items()])
            if spec.qkv_bias else None)
        self._out = Product(rows("self_attn.o_proj.weight", hidden, widths["q"]))
        self._gate_up = Product(torch.cat([columns(f"mlp.{n}_proj.weight", inner, hidden)
                                           for n in ("gate", "up")]))
        self._down = Product(rows("mlp.down_proj.weight", hidden, inner))
        self.input_norm = weights.get(f"{prefix}input_layernorm.weight", (hidden,))
        self.mlp_norm = weights.get(f"{prefix}post_attention_layernorm.weight", (hidden,))

    @property
    def products(self) -> tuple[Product, ...]:
        return self._qkv, self._out, self._gate_up, self._down

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [T, H] -> query, key and value of each token [T, (h + 2 k) d], not yet rotated."""
        return self._qkv(hidden.rms_norm(self.input_norm, self.eps))

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [T, H], attended [T, h * d]: hidden becomes the layer's output."""
        hidden.add(self._out(attended), self._all_reduce)
        inner = silu_mul(self._gate_up(hidden.rms_norm(self.mlp_norm, self.eps)))
        hidden.add(self._down(inner), self._all_reduce)


class LlamaEnds:
    """Embedding (first stage), rotary tables (every stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        name, table = "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
        self.eps, self.dim = spec.norm_eps, spec.head_dim
        self.inverse_frequency = _frequencies(spec)
        self.embedding = weights.get(name, table) if first else None
        self.norm = self.head = None
        if last:
            self.norm = weights.get("model.norm.weight", (spec.hidden_size,))
            self.head = OutputHead(head_weight(spec, weights, (name, self.embedding), shard))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T] -> hidden [T, H]."""
        assert self.embedding is not None, "only the first stage embeds"
        return F.embedding(tokens, self.embedding)

    def rotation(self, positions: Tensor) -> Rotation:
        """positions [T] -> what the layers rotate queries and keys by."""
        if self.inverse_frequency.device != positions.device:  # once: it stays there
            self.inverse_frequency = self.inverse_frequency.to(positions.device)
        angles = positions[:, None].float() * self.inverse_frequency
        return Rotation(angles.cos(), angles.sin())

    def scores(self, hidden: Tensor) -> HeadScores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        return HeadScores(self.head, rms_norm(hidden, self.norm, self.eps))


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
