"""What OPT and GPT-2 share: layer norms before each block, biases, learned positions, a two-matrix
MLP. A family reads its checkpoint's names and layouts into these, and names its activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import WeightSource

Product = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]
Norm = tuple[Tensor, Tensor]  # weight, bias


class PreNormWeights(NamedTuple):
    """One layer's, or one rank's shard of them."""

    input_norm: Norm
    qkv: Product
    out: Product
    mlp_norm: Norm
    up: Product
    down: Product


class PreNormLayer:
    """One decoder layer, or one rank's shard of it. `heads` (h) are this shard's, each of size
    `dim` (d)."""

    def __init__(self, spec: ModelSpec, shard: Shard, weights: PreNormWeights,
                 activate: Callable[[Tensor], Tensor]) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.all_reduce
        self.weights, self._activate = weights, activate

    def qkv(self, hidden: Tensor, _prepared: None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> query, key, value, each [T, h, d]."""
        weights = self.weights
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *weights.input_norm, self.eps)
        joint = F.linear(normed, *weights.qkv)
        query, key, value = joint.view(len(hidden), 3, self.heads, self.dim).unbind(1)
        return query, key, value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [T, H], attended [T, h * d] -> the layer's output [T, H]."""
        weights = self.weights
        hidden = hidden + self._all_reduce(F.linear(attended, *weights.out))
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *weights.mlp_norm, self.eps)
        inner = self._activate(F.linear(normed, *weights.up))
        return hidden + self._all_reduce(F.linear(inner, *weights.down))


class EndNames(NamedTuple):
    """What a checkpoint calls the ends' tensors; position p is row p + `position_offset` of its
    table."""

    tokens: str
    positions: str
    norm: str
    position_offset: int = 0


class PreNormEnds:
    """Token and position embeddings (first stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, names: EndNames, *, first: bool,
                 last: bool, shard: Shard = WHOLE) -> None:
        assert spec.max_positions is not None, "a model with learned positions"
        hidden, self.eps, self._offset = spec.hidden_size, spec.norm_eps, names.position_offset
        self.embedding = self.positions = self.norm = self.head_weight = None
        if first:
            rows = spec.max_positions + names.position_offset
            self.embedding = weights.get(names.tokens, (spec.vocab_size, hidden))
            self.positions = weights.get(names.positions, (rows, hidden))
        if last:
            self.norm = read_norm(weights, names.norm, hidden)
            self.head_weight = head_weight(spec, weights, (names.tokens, self.embedding), shard)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        assert self.embedding is not None and self.positions is not None, (
            "only the first stage embeds")
        at = positions + self._offset if self._offset else positions
        return F.embedding(tokens, self.embedding) + F.embedding(at, self.positions)

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> None:
        """These layers need nothing besides the hidden state."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, V_local]: this shard's share of the vocabulary."""
        assert self.norm is not None and self.head_weight is not None, (
            "only the last stage has a head")
        normed = F.layer_norm(hidden, (hidden.shape[-1],), *self.norm, self.eps)
        return F.linear(normed, self.head_weight)


def read_norm(weights: WeightSource, name: str, hidden: int) -> Norm:
    return weights.get(f"{name}.weight", (hidden,)), weights.get(f"{name}.bias", (hidden,))
