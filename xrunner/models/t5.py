"""T5 layers (versions 1.0 and 1.1): RMS norm, relative position biases, no scaling of scores.

The attention kernels are apart from the layers, as in the other families: `attend_bidirectional`
with the encoder's bias; `attend_decode` with the decoder's, then `attend_cross`; all with SCALE.
What `prepare` of an end returns is that bias. Its table belongs to the first layer and serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.llama import rms_norm
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import WeightSource

SCALE = 1.0  # of the attention scores: T5's initialisation stands in for 1 / sqrt(d)
_EMBEDDING = "shared.weight"


class _Block:
    """Reads one block's weights: rank `shard` of `encoder.block.i` or `decoder.block.i`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, prefix: str, shard: Shard) -> None:
        self._spec, self._weights, self._prefix, self._shard = spec, weights, prefix, shard
        self._width = spec.num_heads * spec.head_dim

    def attention(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Query [w, H], key and value [2 w, H], output [H, w], with w = h * d of this shard."""
        hidden, width = self._spec.hidden_size, self._width
        q, k, v = (self._columns(f"{name}.{n}", width, hidden) for n in "qkv")
        return q, torch.cat([k, v]), self._rows(f"{name}.o", hidden, width)

    def mlp(self, name: str) -> tuple[Tensor, Tensor]:
        """Up [f, H] (gate and up [2 f, H], if gated), down [H, f], with f of this shard."""
        hidden, inner = self._spec.hidden_size, self._spec.intermediate_size
        ups = ("wi_0", "wi_1") if self._spec.is_gated_mlp else ("wi",)
        up = [self._columns(f"{name}.{n}", inner, hidden) for n in ups]
        return torch.cat(up) if len(up) > 1 else up[0], self._rows(f"{name}.wo", hidden, inner)

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
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.all_reduce
        self._activate = _activation(spec)
        block = _Block(spec, weights, f"encoder.block.{index}.", shard)
        query, key_value, self.out_weight = block.attention("layer.0.SelfAttention")
        self.qkv_weight = torch.cat([query, key_value])
        self.up_weight, self.down_weight = block.mlp("layer.1.DenseReluDense")
        self.input_norm, self.mlp_norm = block.norm(0), block.norm(1)

    def qkv(self, hidden: Tensor, _prepared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> query, key, value, each [T, h, d]."""
        joint = F.linear(rms_norm(hidden, self.input_norm, self.eps), self.qkv_weight)
        query, key, value = joint.view(len(hidden), 3, self.heads, self.dim).unbind(1)
        return query, key, value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [T, H], attended [T, h * d] -> the layer's output [T, H]."""
        hidden = hidden + self._all_reduce(F.linear(attended, self.out_weight))
        inner = F.linear(rms_norm(hidden, self.mlp_norm, self.eps), self.up_weight)
        return hidden + self._all_reduce(F.linear(self._activate(inner), self.down_weight))


class T5DecoderLayer:
    """One decoder layer, or one rank's shard of it, called in this order: `qkv`, `cross_query`,
    `finish`, with an attention kernel after each of the first two. `cross_kv` is called once an
    input, when it is encoded."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.all_reduce
        self._activate = _activation(spec)
        block = _Block(spec, weights, f"decoder.block.{index}.", shard)
        query, key_value, self.out_weight = block.attention("layer.0.SelfAttention")
        self.qkv_weight = torch.cat([query, key_value])
        self.cross_query_weight, self.cross_kv_weight, self.cross_out_weight = block.attention(
            "layer.1.EncDecAttention")
        self.up_weight, self.down_weight = block.mlp("layer.2.DenseReluDense")
        self.input_norm, self.cross_norm, self.mlp_norm = (block.norm(i) for i in range(3))

    def qkv(self, hidden: Tensor, _prepared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [n, H] -> query, key, value, each [n, h, d]."""
        joint = F.linear(rms_norm(hidden, self.input_norm, self.eps), self.qkv_weight)
        query, key, value = joint.view(len(hidden), 3, self.heads, self.dim).unbind(1)
        return query, key, value

    def cross_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output [T, H] -> key, value, each [T, h, d], for the cross-attention."""
        joint = F.linear(encoded, self.cross_kv_weight)
        key, value = joint.view(len(encoded), 2, self.heads, self.dim).unbind(1)
        return key, value

    def cross_query(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H], self-attention's output [n, h * d] -> hidden [n, H] with it added, and
        the query of the cross-attention [n, h, d]."""
        hidden = hidden + self._all_reduce(F.linear(attended, self.out_weight))
        query = F.linear(rms_norm(hidden, self.cross_norm, self.eps), self.cross_query_weight)
        return hidden, query.view(len(hidden), self.heads, self.dim)

    def finish(self, hidden: Tensor, cross_attended: Tensor) -> Tensor:
        """hidden [n, H], cross-attention's output [n, h * d] -> the layer's output [n, H]."""
        hidden = hidden + self._all_reduce(F.linear(cross_attended, self.cross_out_weight))
        inner = F.linear(rms_norm(hidden, self.mlp_norm, self.eps), self.up_weight)
        return hidden + self._all_reduce(F.linear(self._activate(inner), self.down_weight))


class T5EncoderEnds:
    """Embedding (first encoder stage), position biases (every one), final norm (last one)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        self.eps, self._max_distance = spec.norm_eps, spec.relative_max_distance
        self.embedding = (weights.get(_EMBEDDING, (spec.vocab_size, spec.hidden_size))
                          if first else None)
        self.bias_table = _bias_table(spec, weights, "encoder", shard)
        self.norm = (weights.get("encoder.final_layer_norm.weight", (spec.hidden_size,))
                     if last else None)

    def embed(self, tokens: Tensor, _positions: Tensor) -> Tensor:
        """tokens [T] -> hidden [T, H]."""
        assert self.embedding is not None, "only the first encoder stage embeds"
        return F.embedding(tokens, self.embedding)

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions [T] of packed inputs -> bias [h, L, L] for `attend_bidirectional`."""
        longest = int(positions.max()) + 1
        at = torch.arange(longest, device=positions.device)
        distances = torch.arange(1 - longest, longest, device=positions.device)
        buckets = _buckets(distances, len(self.bias_table), self._max_distance,
                           is_bidirectional=True)
        by_distance = F.embedding(buckets, self.bias_table).t().to(dtype)  # [h, 2 L - 1]
        return by_distance[:, at[None, :] - at[:, None] + longest - 1]

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
        self.embedding = (weights.get(_EMBEDDING, (spec.vocab_size, spec.hidden_size))
                          if first else None)
        self.bias_table = _bias_table(spec, weights, "decoder", shard)
        self.norm = self.head_weight = None
        if last:
            self.norm = weights.get("decoder.final_layer_norm.weight", (spec.hidden_size,))
            self.head_weight = head_weight(spec, weights, (_EMBEDDING, self.embedding), shard)

    def embed(self, tokens: Tensor, _positions: Tensor) -> Tensor:
        """tokens [n] -> hidden [n, H]."""
        assert self.embedding is not None, "only the first decoder stage embeds"
        return F.embedding(tokens, self.embedding)

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions [n] of the tokens being decoded -> bias [n, h, 1, max_context] for
        `attend_decode`, -inf beyond each query's context."""
        at = torch.arange(int(positions.max()) + 1, device=positions.device)
        distances = at[None, :] - positions[:, None]  # [n, max_context]
        buckets = _buckets(distances, len(self.bias_table), self._max_distance,
                           is_bidirectional=False)
        bias = F.embedding(buckets, self.bias_table).to(dtype)  # [n, max_context, h]
        bias = bias.masked_fill(distances[:, :, None] > 0, float("-inf"))
        return bias.transpose(1, 2).contiguous()[:, :, None, :]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, V_local]: this shard's share of the vocabulary."""
        assert self.norm is not None and self.head_weight is not None, (
            "only the last decoder stage has a head")
        normed = rms_norm(hidden, self.norm, self.eps)
        return F.linear(normed * self._head_scale, self.head_weight)


def _activation(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    assert spec.activation == ("gelu_new" if spec.is_gated_mlp else "relu"), f"{spec.activation = }"
    return _gated_gelu if spec.is_gated_mlp else F.relu


def _gated_gelu(joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _bias_table(spec: ModelSpec, weights: WeightSource, side: str, shard: Shard) -> Tensor:
    """[buckets, h]: a score's bias by distance and this shard's heads."""
    name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return weights.get(name, (spec.relative_buckets, spec.num_heads), shard.part(1, spec.num_heads))


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
