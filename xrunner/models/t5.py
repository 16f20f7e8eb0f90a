"""T5 (versions 1.0 and 1.1): RMS norms, relative position biases in self-attention, no scaling of
scores. The ends make that bias; its table is the first layer's and serves all."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.cross import CrossEnds, LayerReader
from xrunner.models.layer_parts import GatedMlp, Mlp, Norm, PlainMlp
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.attention import Scoring
from xrunner.ops.contexts import DistanceBias
from xrunner.ops.linear import Product
from xrunner.ops.output_head import OutputHead

SCORING = Scoring(1.0)  # T5's initialisation stands in for a scale of 1 / sqrt(d)
_ATTENTIONS = {"self": "layer.0.SelfAttention", "cross": "layer.1.EncDecAttention"}


class T5Reader(LayerReader):
    """As in transformers' T5Block."""

    def attention(self, name: str, part: str) -> str:
        return f"{self._prefix}{_ATTENTIONS[name]}.{part}"

    def norm(self, name: str) -> Norm:
        place = {"self": 0, "cross": 1, "mlp": self._last}[name]
        return Norm(self.weights.get(f"{self._prefix}layer.{place}.layer_norm.weight",
                                     (self.spec.hidden_size,)), None, self.spec.norm_eps)

    def mlp(self) -> Mlp:
        spec, name = self.spec, f"{self._prefix}layer.{self._last}.DenseReluDense"
        ups = ("wi_0", "wi_1") if spec.is_gated_mlp else ("wi",)
        up = torch.cat([self.columns(f"{name}.{n}", spec.intermediate_size, spec.hidden_size)[0]
                        for n in ups])
        down = self.rows(f"{name}.wo", spec.intermediate_size)
        return (GatedMlp(up, down, spec.activation) if spec.is_gated_mlp else
                PlainMlp(Product(up, activation=spec.activation), down))

    @property
    def _prefix(self) -> str:
        return f"{self.side}.block.{self.index}."

    @property
    def _last(self) -> int:
        return 1 if self.side == "encoder" else 2


def t5_ends(side: str, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
            shard: Shard = WHOLE, embedding: Tensor | None = None) -> CrossEnds:
    """`embedding`: of tokens [V, H], where the other side's ends hold it."""
    if first and embedding is None:
        embedding = embedding_weight(spec, weights)
    norm = Norm(weights.get(f"{side}.final_layer_norm.weight", (spec.hidden_size,)), None,
                spec.norm_eps) if last else None
    table = weights.get(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                        (spec.relative_buckets, spec.num_heads), shard.part(1, spec.num_heads))
    return CrossEnds(
        embedding=embedding if first else None,
        embed=partial(_embedded, embedding) if first and embedding is not None else None,
        bias=_Biases(table, spec.relative_max_distance, side == "encoder"), norm=norm,
        head=OutputHead(head_weight(spec, weights, embedding, shard)) if (
            last and side == "decoder") else None,
        # version 1.1, whose head is not the embedding, does not scale what goes into it
        head_scale=spec.hidden_size ** -0.5 if spec.tied_embeddings else 1.0)


def _embedded(table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(tokens, table)


class _Biases(NamedTuple):
    """table [buckets, h]: a score's bias by the bucket of its distance and this shard's heads."""

    table: Tensor
    max_distance: int
    is_bidirectional: bool

    def __call__(self, longest: int) -> DistanceBias:
        """Of at most `longest` tokens, a decoder's own among them."""
        ahead = longest if self.is_bidirectional else 1
        distances = torch.arange(1 - longest, ahead, device=self.table.device)
        buckets = _buckets(distances, len(self.table), self.max_distance,
                           is_bidirectional=self.is_bidirectional)
        biases = F.embedding(buckets, self.table).t().float().contiguous()
        return DistanceBias(biases, longest - 1)


def _buckets(distances: Tensor, num_buckets: int, max_distance: int, *,
             is_bidirectional: bool) -> Tensor:
    """Bucket of each distance (key's position less query's), T5 paper section 2.1: near ones have
    their own, farther ones share logarithmically, all from `max_distance` on share the last. A
    decoder has none for what lies ahead; an encoder gives it the upper half."""
    offset = torch.zeros_like(distances)
    if is_bidirectional:
        num_buckets //= 2
        offset = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = num_buckets // 2
    shares = torch.log(distances.clamp(min=exact) / exact) / math.log(max_distance / exact)
    far = exact + (shares * (num_buckets - exact)).long()
    return offset + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))
