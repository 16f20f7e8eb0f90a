"""T5 layers (versions 1.0 and 1.1): RMS norm, relative position biases, no scaling of scores.

The attention kernels are apart from the layers, as in the other families: `packed_attention` with
the encoder's bias; `decode_attention` with the decoder's, then again, without, over the encoded
input; all with SCORING. The ends make that bias; its table is the first layer's and serves all.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.attention import Distances, Scoring
from xrunner.ops.linear import Product
from xrunner.ops.output_head import HeadScores, OutputHead
from xrunner.ops.residual import Residual
from xrunner.ops.rows import rms_norm

SCORING = Scoring(1.0)  # T5's initialisation stands in for a scale of 1 / sqrt(d)


class _Block:
    """Reads one block's weights: rank `shard` of `encoder.block.i` or `decoder.block.i`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, prefix: str, shard: Shard) -> None:
        self._spec, self._weights, self._prefix, self._shard = spec, weights, prefix, shard
        self._width = spec.num_heads * spec.head_dim

    def joint(self, name: str, parts: str) -> Product:
        """`parts` of query, key and value, as in "qkv", as one product [parts * w, H], with w =
        h * d of this shard."""
        return Product(torch.cat([
            self._columns(f"{name}.{part}", self._width, self._spec.hidden_size)
            for part in parts]))

    def output(self, name: str) -> Product:
        """Of an attention's heads, [H, w]."""
        return Product(self._rows(f"{name}.o", self._spec.hidden_size, self._width))

    def mlp(self, name: str) -> tuple[Product, Product]:
        """Up [f, H] (gate and up [2 f, H], if gated), down [H, f], with f of this shard."""
        hidden, inner = self._spec.hidden_size, self._spec.intermediate_size
        ups = ("wi_0", "wi_1") if self._spec.is_gated_mlp else ("wi",)
        up = torch.cat([self._columns(f"{name}.{n}", inner, hidden) for n in ups])
        return (Product(up, activation="none" if self._spec.is_gated_mlp else "relu"),
                Product(self._rows(f"{name}.wo", hidden, inner)))

    def norm(self, layer: int) -> Tensor:
        return self._weights.get(f"{self._prefix}layer.{layer}.layer_norm.weight",
                                 (self._spec.hidden_size,))

    def _columns(self, name: str, out: int, into: int) -> Tensor:
        return self._weights.get(f"{self._prefix}{name}.weight", (out, into),
                                 self._shard.part(0, out))

    def _rows(self, name: str, out: int, into: int) -> Tensor:
        return self._weights.get(f"{self._prefix}{name}.weight", (out, into),
                                 self._shard.part(1, into))


class T5EncoderLayer:
    """One encoder layer, or one rank's shard of it: as in transformers' T5Block. `heads` (h) are
    this shard's, each of size `dim` (d)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.completes
        self._activate = _activation(spec)
        block = _Block(spec, weights, f"encoder.block.{index}.", shard)
        attention = "layer.0.SelfAttention"
        self._qkv, self._out = block.joint(attention, "qkv"), block.output(attention)
        self._up, self._down = block.mlp("layer.1.DenseReluDense")
        self.input_norm, self.mlp_norm = block.norm(0), block.norm(1)

    @property
    def products(self) -> tuple[Product, ...]:
        return self._qkv, self._out, self._up, self._down

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [T, H] -> query, key and value of each token [T, 3 h d]."""
        return self._qkv(hidden.rms_norm(self.input_norm, self.eps))

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [T, H], attended [T, h * d]: hidden becomes the layer's output."""
        hidden.add(self._out(attended), self._all_reduce)
        inner = self._activate(self._up(hidden.rms_norm(self.mlp_norm, self.eps)))
        hidden.add(self._down(inner), self._all_reduce)


class T5DecoderLayer:
    """One decoder layer, or one rank's shard of it, called in this order: `qkv`, `cross_query`,
    `finish`, with an attention kernel after each of the first two. `cross_kv` is called once an
    input, when it is encoded."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.completes
        self._activate = _activation(spec)
        block = _Block(spec, weights, f"decoder.block.{index}.", shard)
        attention = "layer.0.SelfAttention"
        self._qkv, self._out = block.joint(attention, "qkv"), block.output(attention)
        across = "layer.1.EncDecAttention"
        self._cross_query, self._cross_out = block.joint(across, "q"), block.output(across)
        self._cross_kv = block.joint(across, "kv")
        self._up, self._down = block.mlp("layer.2.DenseReluDense")
        self.input_norm, self.cross_norm, self.mlp_norm = (block.norm(i) for i in range(3))

    @property
    def products(self) -> tuple[Product, ...]:
        return (self._qkv, self._out, self._cross_query, self._cross_out, self._cross_kv, self._up,
                self._down)

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [n, H] -> query, key and value of each token [n, 3 h d]."""
        return self._qkv(hidden.rms_norm(self.input_norm, self.eps))

    def cross_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output [T, H] -> key, value, each [T, h, d], for the cross-attention."""
        key, value = self._cross_kv(encoded).view(len(encoded), 2, self.heads, self.dim).unbind(1)
        return key, value

    def cross_query(self, hidden: Residual, attended: Tensor) -> Tensor:
        """hidden [n, H], to which self-attention's output [n, h * d] is added -> the query of the
        cross-attention [n, h, d]."""
        hidden.add(self._out(attended), self._all_reduce)
        query = self._cross_query(hidden.rms_norm(self.cross_norm, self.eps))
        return query.view(len(query), self.heads, self.dim)

    def finish(self, hidden: Residual, cross_attended: Tensor) -> None:
        """hidden [n, H], cross-attention's output [n, h * d]: hidden becomes the layer's output."""
        hidden.add(self._cross_out(cross_attended), self._all_reduce)
        inner = self._activate(self._up(hidden.rms_norm(self.mlp_norm, self.eps)))
        hidden.add(self._down(inner), self._all_reduce)


class T5EncoderEnds:
    """Embedding (first encoder stage), position biases (every one), final norm (last one)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE, embedding: Tensor | None = None) -> None:
        """`embedding`: of tokens [V, H], where the decoder's ends hold it."""
        self.eps, self._max_distance = spec.norm_eps, spec.relative_max_distance
        self.embedding = embedding if embedding is not None or not first else (
            embedding_weight(spec, weights))
        self.bias_table = _bias_table(spec, weights, "encoder", shard)
        self.norm = (weights.get("encoder.final_layer_norm.weight", (spec.hidden_size,))
                     if last else None)

    def embed(self, tokens: Tensor, _positions: Tensor) -> Tensor:
        """tokens [T] -> hidden [T, H]."""
        assert self.embedding is not None, "only the first encoder stage embeds"
        return F.embedding(tokens, self.embedding)

    def bias(self, longest: int) -> Distances:
        """For inputs of at most `longest` tokens."""
        distances = torch.arange(1 - longest, longest, device=self.bias_table.device)
        buckets = _buckets(distances, len(self.bias_table), self._max_distance,
                           is_bidirectional=True)
        return _distances(self.bias_table, buckets, longest - 1)

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> what the decoder layers look at [T, H]."""
        assert self.norm is not None, "only the last encoder stage has the final norm"
        return rms_norm(hidden, self.norm, self.eps)


class T5DecoderEnds:
    """Embedding (first decoder stage), position biases (every one), final norm and head (last)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        self.eps, self._max_distance = spec.norm_eps, spec.relative_max_distance
        # version 1.1, whose head is not the embedding, does not scale what goes into it
        self._head_scale = spec.hidden_size ** -0.5 if spec.tied_embeddings else 1.0
        self.embedding = embedding_weight(spec, weights) if first else None
        self.bias_table = _bias_table(spec, weights, "decoder", shard)
        self.norm = self.head = None
        if last:
            self.norm = weights.get("decoder.final_layer_norm.weight", (spec.hidden_size,))
            self.head = OutputHead(head_weight(spec, weights, self.embedding, shard))

    def embed(self, tokens: Tensor, _positions: Tensor) -> Tensor:
        """tokens [n] -> hidden [n, H]."""
        assert self.embedding is not None, "only the first decoder stage embeds"
        return F.embedding(tokens, self.embedding)

    def bias(self, longest: int) -> Distances:
        """For queries of at most `longest` tokens, those being decoded among them."""
        distances = torch.arange(1 - longest, 1, device=self.bias_table.device)
        buckets = _buckets(distances, len(self.bias_table), self._max_distance,
                           is_bidirectional=False)
        return _distances(self.bias_table, buckets, longest - 1)

    def scores(self, hidden: Tensor) -> HeadScores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        assert self.norm is not None and self.head is not None, (
            "only the last decoder stage has a head")
        return HeadScores(
            self.head, rms_norm(hidden, self.norm, self.eps) * self._head_scale)


def _activation(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    assert spec.activation == ("gelu_new" if spec.is_gated_mlp else "relu"), f"{spec.activation = }"
    return _gated_gelu if spec.is_gated_mlp else lambda inner: inner  # its product has the ReLU


def _gated_gelu(joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _bias_table(spec: ModelSpec, weights: WeightSource, side: str, shard: Shard) -> Tensor:
    """[buckets, h]: a score's bias by distance and this shard's heads."""
    name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return weights.get(name, (spec.relative_buckets, spec.num_heads), shard.part(1, spec.num_heads))


def _distances(table: Tensor, buckets: Tensor, center: int) -> Distances:
    """table [buckets, h], the bucket of each distance [width] -> the biases by distance."""
    return Distances(F.embedding(buckets, table).t().float().contiguous(), center)


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
