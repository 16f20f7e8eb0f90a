"""Layers and ends of encoder-decoder families, without their attention kernels.

An encoder's layer is followed by `packed_attention` over an input. A decoder's is followed by
`decode_attention` over the tokens so far, then over the encoded input. A family reads its
checkpoint's names and layouts into them: T5 (1.0 and 1.1: RMS norms, relative position biases in
self-attention, unscaled scores), and BART and mBART (learned positions, biases, layer norms)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import GatedMlp, Mlp, Norm, PlainMlp, read_norm
from xrunner.models.weights import (
    WHOLE,
    Shard,
    TensorPart,
    WeightSource,
    embedding_weight,
    head_weight,
)
from xrunner.ops.attention import Scoring
from xrunner.ops.contexts import DistanceBias
from xrunner.ops.linear import Product
from xrunner.ops.output_head import HeadScores, OutputHead, Scores
from xrunner.ops.rows import AllReduce, Residual

PRODUCT_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_erf", "gelu_new": "gelu"}


class Block(NamedTuple):
    """An attention or MLP in the residual stream, with a norm of its input or, `is_of_sum`, of the
    stream after it."""

    norm: Norm
    is_of_sum: bool
    all_reduce: AllReduce | None

    def reads(self, hidden: Residual) -> Tensor:
        """Input of the block, [T, H]."""
        return hidden.total() if self.is_of_sum else self.norm.of(hidden)

    def adds(self, hidden: Residual, product: Tensor) -> None:
        """Adds the block's output to the stream, and norms the sum if `is_of_sum`."""
        hidden.add(product, self.all_reduce)
        if self.is_of_sum:
            hidden.become(self.norm.of(hidden))


class LayerReader:
    """Reads one layer's weights: rank `shard` of layer `index` of a `side`, "encoder" or "decoder".
    Subclasses name a family's attentions ("self", "cross"), norms and MLP."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, side: str, index: int,
                 shard: Shard) -> None:
        self.spec, self.weights, self.side, self.index, self.shard = (
            spec, weights, side, index, shard)

    def joint(self, attention: str, parts: str) -> Product:
        """The `parts` of query, key and value, as in "qkv", as one product [parts * w, H]. w = h *
        d of this shard."""
        width = self.spec.num_heads * self.spec.head_dim
        read = [self.columns(self.attention(attention, part), width, self.spec.hidden_size)
                for part in parts]
        biases = [bias for _, bias in read if bias is not None]
        return Product(torch.cat([weight for weight, _ in read]),
                       torch.cat(biases) if biases else None)

    def output(self, attention: str) -> Product:
        """Output product of an attention, [H, w]."""
        return self.rows(self.attention(attention, "o"), self.spec.num_heads * self.spec.head_dim)

    def block(self, name: str) -> Block:
        """The block `name`: "self", "cross" or "mlp"."""
        return Block(self.norm(name), self.spec.decoder.norm_place == "sum", self.shard.completes)

    def columns(self, name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
        """This shard's rows of a weight [out, into] and of its bias (None if there is none)."""
        part = self.shard.part(0, out)
        return (self.weights.get(f"{name}.weight", (out, into), part),
                self.weights.get(f"{name}.bias", (out,), part) if self.spec.has_bias else None)

    def rows(self, name: str, into: int) -> Product:
        """Product of this shard's columns of a weight [H, into]; the first rank adds the bias."""
        hidden, has_bias = self.spec.hidden_size, self.spec.has_bias and self.shard.is_first
        return Product(
            self.weights.get(f"{name}.weight", (hidden, into), self.shard.part(1, into)),
            self.weights.get(f"{name}.bias", (hidden,)) if has_bias else None)

    def attention(self, name: str, part: str) -> str:
        """Module name of an attention's query ("q"), key, value or output ("o")."""
        raise NotImplementedError

    def norm(self, name: str) -> Norm:
        raise NotImplementedError

    def mlp(self) -> Mlp:
        raise NotImplementedError


class EncoderLayer:
    """One encoder layer, or one rank's shard of it, with `heads` (h) of size `dim` (d)."""

    side = "encoder"

    def __init__(self, reader: type[LayerReader], spec: ModelSpec, weights: WeightSource,
                 index: int, shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim = spec.head_dim
        self.load(reader(spec, weights, self.side, index, shard))

    def load(self, read: LayerReader) -> None:
        self._attention, self._fed = read.block("self"), read.block("mlp")
        self._qkv, self._out, self._mlp = read.joint("self", "qkv"), read.output("self"), read.mlp()

    @property
    def products(self) -> tuple[Product, ...]:
        return self._qkv, self._out, *self._mlp.products

    def qkv(self, hidden: Residual) -> Tensor:
        """Query, key and value of each token, [T, 3 h d], from hidden [T, H]."""
        return self._qkv(self._attention.reads(hidden))

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """Turns hidden [T, H] into the layer's output, in place, by attended [T, h * d]."""
        self._attention.adds(hidden, self._out(attended))
        self._fed.adds(hidden, self._mlp(self._fed.reads(hidden)))


class CrossLayer(EncoderLayer):
    """One decoder layer with cross-attention, or one rank's shard of it. Call `qkv`, `cross_query`
    and `finish` in this order, with an attention kernel after each of the first two. `cross_kv` is
    called once per input, when it is encoded."""

    side = "decoder"

    def load(self, read: LayerReader) -> None:
        super().load(read)
        self._across, self._cross_out = read.block("cross"), read.output("cross")
        self._cross_query, self._cross_kv = read.joint("cross", "q"), read.joint("cross", "kv")

    @property
    def products(self) -> tuple[Product, ...]:
        return *super().products, self._cross_query, self._cross_out, self._cross_kv

    def cross_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value of the cross-attention, each [T, h, d], from the encoder output [T, H]."""
        key, value = self._cross_kv(encoded).view(len(encoded), 2, self.heads, self.dim).unbind(1)
        return key, value

    def cross_query(self, hidden: Residual, attended: Tensor) -> Tensor:
        """Query of the cross-attention, [n, h, d]. Adds self-attention's output [n, h * d] to
        hidden [n, H] first."""
        self._attention.adds(hidden, self._out(attended))
        query = self._cross_query(self._across.reads(hidden))
        return query.view(len(query), self.heads, self.dim)

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """Turns hidden [n, H] into the layer's output by cross-attention's output [n, h * d]."""
        self._across.adds(hidden, self._cross_out(attended))
        self._fed.adds(hidden, self._mlp(self._fed.reads(hidden)))


class Embed(Protocol):
    """Embeds the tokens of one side."""

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] of tokens [T] at positions [T]."""


@dataclass(kw_only=True)
class CrossEnds:
    """Ends of an encoder or a decoder, as far as a stage holds them. The first stage has `embed`
    and the token table, the last one the final norm and a decoder's head. `bias`: bias of scores by
    distance, for at most so many tokens."""

    embed: Embed | None = None
    embedding: Tensor | None = None  # [V, H]
    bias: Callable[[int], DistanceBias | None] = lambda longest: None
    norm: Norm | None = None
    head: OutputHead | None = None
    head_scale: float = 1.0  # factor of the head's input
    logits_bias: Tensor | None = None  # [V_local]

    def finish(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] after the final norm, if there is one; the decoder's layers read an
        encoder's."""
        return hidden if self.norm is None else self.norm(hidden)

    def scores(self, hidden: Tensor) -> Scores:
        """Logits [n, V_local] of this shard's share of the vocabulary, from hidden [n, H]."""
        assert self.head is not None, "only the last decoder stage has a head"
        rows = self.finish(hidden)
        return HeadScores(self.head, rows if self.head_scale == 1.0 else rows * self.head_scale,
                          bias=self.logits_bias)


T5_SCORING = Scoring(1.0)  # T5's initialisation replaces the scale 1 / sqrt(d)
_ATTENTIONS = {"self": "layer.0.SelfAttention", "cross": "layer.1.EncDecAttention"}


class T5Reader(LayerReader):
    """Reads layers as in transformers' T5Block."""

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
    """Ends of one side of T5. The first layer's table of position biases serves all layers.
    `embedding`: token table [V, H] if the other side's ends hold it."""
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
        # version 1.1, whose head is not the embedding, does not scale the head's input
        head_scale=spec.hidden_size ** -0.5 if spec.tied_embeddings else 1.0)


def _embedded(table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(tokens, table)


@dataclass(frozen=True, slots=True)
class _Biases:
    """Position biases of scores by table [buckets, h]: bucket of the distance, head of this
    shard."""

    table: Tensor
    max_distance: int
    is_bidirectional: bool

    def __call__(self, longest: int) -> DistanceBias:
        """Biases among at most `longest` tokens, the decoder's own included."""
        ahead = longest if self.is_bidirectional else 1
        distances = torch.arange(1 - longest, ahead, device=self.table.device)
        buckets = _buckets(distances, len(self.table), self.max_distance,
                           is_bidirectional=self.is_bidirectional)
        biases = F.embedding(buckets, self.table).t().float().contiguous()
        return DistanceBias(biases, longest - 1)


def _buckets(distances: Tensor, num_buckets: int, max_distance: int, *,
             is_bidirectional: bool) -> Tensor:
    """Bucket of each distance (key position - query position), T5 paper section 2.1. Near distances
    have buckets of their own, farther ones share logarithmically, and all from `max_distance` on
    share the last. A decoder has no bucket for keys ahead; an encoder gives them the upper half."""
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


POSITION_OFFSET = 2  # the first two rows of a position table are for padding
LOGITS_BIAS = "final_logits_bias"
_MODULES = {"self": "self_attn", "cross": "encoder_attn", "mlp": "final"}


class BartReader(LayerReader):
    """Reads layers as in transformers' BartEncoderLayer, MBartDecoderLayer and so on. BART norms
    each block's sum. mBART norms each block's input, with one more norm after all layers."""

    def attention(self, name: str, part: str) -> str:
        return f"{self._prefix}{_MODULES[name]}.{'out' if part == 'o' else part}_proj"

    def norm(self, name: str) -> Norm:
        return read_norm(self.spec, self.weights, f"{self._prefix}{_MODULES[name]}_layer_norm")

    def mlp(self) -> PlainMlp:
        spec = self.spec
        up = Product(*self.columns(f"{self._prefix}fc1", spec.intermediate_size, spec.hidden_size),
                     activation=PRODUCT_ACTIVATIONS[spec.activation])
        return PlainMlp(up, self.rows(f"{self._prefix}fc2", spec.intermediate_size))

    @property
    def _prefix(self) -> str:
        return f"{self.side}.layers.{self.index}."


class _Embedding:
    """Normed sum of a side's token and position embeddings."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, side: str, tokens: Tensor) -> None:
        assert spec.max_positions is not None, "a model with learned positions"
        self._tokens, self._scale = tokens, spec.decoder.embedding_scale
        self._last = spec.max_positions - 1
        self._positions = weights.get(f"{side}.embed_positions.weight", (
            spec.max_positions + POSITION_OFFSET, spec.hidden_size))
        self._norm = read_norm(spec, weights, f"{side}.layernorm_embedding")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] of tokens [T] at positions [T]. Positions beyond the last are
        clamped: a static batch decodes finished rows on, which nobody reads."""
        at = positions.clamp(max=self._last) + POSITION_OFFSET
        hidden = F.embedding(tokens, self._tokens) * self._scale + F.embedding(at, self._positions)
        # in the dtype of the norm's weights, which may be wider than the embedding's
        return self._norm(hidden.to(self._norm.weight.dtype))


def bart_ends(side: str, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
              shard: Shard = WHOLE, embedding: Tensor | None = None) -> CrossEnds:
    """Ends of one side of BART or mBART. `embedding`: token table [V, H] if the other side's ends
    hold it."""
    if first and embedding is None:
        embedding = embedding_weight(spec, weights)
    # if norms are of sums, the last layer's norm is the final one
    has_norm, has_head = last and spec.decoder.norm_place != "sum", last and side == "decoder"
    return CrossEnds(
        embedding=embedding if first else None,
        embed=_Embedding(spec, weights, side, embedding) if first and embedding is not None
        else None,
        norm=read_norm(spec, weights, f"{side}.layer_norm") if has_norm else None,
        head=OutputHead(head_weight(spec, weights, embedding, shard)) if has_head else None,
        logits_bias=_logits_bias(spec, weights, shard) if has_head else None)


def _logits_bias(spec: ModelSpec, weights: WeightSource, shard: Shard) -> Tensor | None:
    """Bias of the logits, [V_local]; None if it is missing, or zero as in published checkpoints."""
    if not weights.has(LOGITS_BIAS):
        return None
    part = shard.vocabulary_part(spec.vocab_size)
    bias = weights.get(LOGITS_BIAS, (1, spec.vocab_size),
                       None if part is None else TensorPart(1, part.start, part.stop))[0]
    return bias if bool(bias.any()) else None
