"""OPT layers: learned positions (offset 2), pre-layer-norm, biases, ReLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import Part, WeightSource

POSITION_OFFSET = 2  # the first two rows of OPT's position table belong to padding


class OptLayer:
    """One decoder layer, or one rank's shard of it: as in transformers' OPTDecoderLayer with
    do_layer_norm_before. `heads` (h) are this shard's, each of size `dim` (d)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.all_reduce
        prefix = f"model.decoder.layers.{index}."

        def bias(name: str, out: int, part: Part | None) -> Tensor | None:
            return weights.get(f"{prefix}{name}.bias", (out,), part) if spec.has_bias else None

        def columns(name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
            part = shard.part(0, out)
            return (weights.get(f"{prefix}{name}.weight", (out, into), part),
                    bias(name, out, part))

        def rows(name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
            return (weights.get(f"{prefix}{name}.weight", (out, into), shard.part(1, into)),
                    bias(name, out, None) if shard.is_first else None)

        def norm(name: str) -> tuple[Tensor, Tensor]:
            return (weights.get(f"{prefix}{name}.weight", (hidden,)),
                    weights.get(f"{prefix}{name}.bias", (hidden,)))

        parts = [columns(f"self_attn.{n}_proj", hidden, hidden) for n in "qkv"]
        self.qkv_weight = torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        self.qkv_bias = torch.cat(biases) if biases else None
        self.out_weight, self.out_bias = rows("self_attn.out_proj", hidden, hidden)
        self.up_weight, self.up_bias = columns("fc1", ffn, hidden)
        self.down_weight, self.down_bias = rows("fc2", hidden, ffn)
        self.input_norm, self.mlp_norm = norm("self_attn_layer_norm"), norm("final_layer_norm")

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
        inner = F.relu(F.linear(normed, self.up_weight, self.up_bias))
        return hidden + self._all_reduce(F.linear(inner, self.down_weight, self.down_bias))


class OptEnds:
    """Token and position embeddings (first stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        name = "model.decoder.embed_tokens.weight"
        assert spec.max_positions is not None, "OPT has learned positions"
        self.eps = spec.norm_eps
        self.embedding = self.positions = self.norm = self.head_weight = None
        if first:
            rows = spec.max_positions + POSITION_OFFSET
            self.embedding = weights.get(name, (spec.vocab_size, spec.hidden_size))
            self.positions = weights.get("model.decoder.embed_positions.weight",
                                         (rows, spec.hidden_size))
        if last:
            norm = "model.decoder.final_layer_norm"
            self.norm = (weights.get(f"{norm}.weight", (spec.hidden_size,)),
                         weights.get(f"{norm}.bias", (spec.hidden_size,)))
            self.head_weight = head_weight(spec, weights, (name, self.embedding), shard)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        assert self.embedding is not None and self.positions is not None, (
            "only the first stage embeds")
        return (F.embedding(tokens, self.embedding)
                + F.embedding(positions + POSITION_OFFSET, self.positions))

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> None:
        """OPT's layers need nothing besides the hidden state."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, V_local]: this shard's share of the vocabulary."""
        assert self.norm is not None and self.head_weight is not None, (
            "only the last stage has a head")
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *self.norm, self.eps)
        return F.linear(normed, self.head_weight)
