"""GPT-2 and GPT-3 layers: learned positions, pre-layer-norm, biases, GELU by tanh.

A checkpoint stores each linear weight as [in, out] (transformers' Conv1D), and query, key and value
as one such matrix; here they are turned to [out, in] once, when they are loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import Part, WeightSource


class Gpt2Layer:
    """One decoder layer, or one rank's shard of it: as in transformers' GPT2Block. `heads` (h) are
    this shard's, each of size `dim` (d)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.all_reduce
        prefix = f"h.{index}."

        def columns(name: str, out: int, parts: list[Part | None]) -> tuple[Tensor, Tensor]:
            """`parts` of a product's columns: of the weight [H, out] and of the bias [out]."""
            held = [weights.get(f"{prefix}{name}.weight", (hidden, out), p).t() for p in parts]
            biases = [weights.get(f"{prefix}{name}.bias", (out,), _of_bias(p)) for p in parts]
            return torch.cat(held).contiguous(), torch.cat(biases)

        def rows(name: str, into: int) -> tuple[Tensor, Tensor | None]:
            weight = weights.get(f"{prefix}{name}.weight", (into, hidden), shard.part(0, into))
            bias = weights.get(f"{prefix}{name}.bias", (hidden,)) if shard.is_first else None
            return weight.t().contiguous(), bias

        # a shard's heads lie in three places of the joint matrix: in query's, key's and value's
        joint = [shard.part(1, hidden, first=i * hidden) for i in range(3)]
        self.qkv_weight, self.qkv_bias = columns("attn.c_attn", 3 * hidden,
                                                 joint if shard.degree > 1 else [None])
        self.out_weight, self.out_bias = rows("attn.c_proj", hidden)
        self.up_weight, self.up_bias = columns("mlp.c_fc", inner, [shard.part(1, inner)])
        self.down_weight, self.down_bias = rows("mlp.c_proj", inner)
        self.input_norm = _norm(weights, f"{prefix}ln_1", hidden)
        self.mlp_norm = _norm(weights, f"{prefix}ln_2", hidden)

    def qkv(self, hidden: Tensor, _prepared: None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> query, key, value, each [T, h, d]."""
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *self.input_norm, self.eps)
        joint = F.linear(normed, self.qkv_weight, self.qkv_bias)
        query, key, value = joint.view(len(hidden), 3, self.heads, self.dim).unbind(1)
        return query, key, value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [T, H], attended [T, h * d] -> the layer's output [T, H]."""
        hidden = hidden + self._all_reduce(F.linear(attended, self.out_weight, self.out_bias))
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *self.mlp_norm, self.eps)
        inner = F.gelu(F.linear(normed, self.up_weight, self.up_bias), approximate="tanh")
        return hidden + self._all_reduce(F.linear(inner, self.down_weight, self.down_bias))


class Gpt2Ends:
    """Token and position embeddings (first stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        assert spec.max_positions is not None, "GPT-2 has learned positions"
        name, hidden = "wte.weight", spec.hidden_size
        self.eps = spec.norm_eps
        self.embedding = self.positions = self.norm = self.head_weight = None
        if first:
            self.embedding = weights.get(name, (spec.vocab_size, hidden))
            self.positions = weights.get("wpe.weight", (spec.max_positions, hidden))
        if last:
            self.norm = _norm(weights, "ln_f", hidden)
            self.head_weight = head_weight(spec, weights, (name, self.embedding), shard)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        assert self.embedding is not None and self.positions is not None, (
            "only the first stage embeds")
        return F.embedding(tokens, self.embedding) + F.embedding(positions, self.positions)

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> None:
        """GPT-2's layers need nothing besides the hidden state."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, V_local]: this shard's share of the vocabulary."""
        assert self.norm is not None and self.head_weight is not None, (
            "only the last stage has a head")
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *self.norm, self.eps)
        return F.linear(normed, self.head_weight)


def _norm(weights: WeightSource, name: str, hidden: int) -> tuple[Tensor, Tensor]:
    return weights.get(f"{name}.weight", (hidden,)), weights.get(f"{name}.bias", (hidden,))


def _of_bias(columns: Part | None) -> Part | None:
    return None if columns is None else Part(0, columns.start, columns.stop)
