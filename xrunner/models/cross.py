"""The layers and ends of encoder-decoder families, without their attention kernels: an encoder's
are followed by `packed_attention` over an input, a decoder's by `decode_attention` over the tokens
so far, then over the encoded input. A family reads its checkpoint's names and layouts into them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.models.layer_parts import Mlp, Norm
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import WeightSource
from xrunner.ops.contexts import DistanceBias
from xrunner.ops.linear import Product
from xrunner.ops.output_head import HeadScores, OutputHead, Scores
from xrunner.ops.rows import AllReduce, Residual

PRODUCT_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_erf", "gelu_new": "gelu"}


class Block(NamedTuple):
    """An attention or an MLP in the residual stream, with its norm: of what goes into it, or of
    the stream after it (`is_of_sum`)."""

    norm: Norm
    is_of_sum: bool
    all_reduce: AllReduce | None

    def reads(self, hidden: Residual) -> Tensor:
        """What goes into it, [T, H]."""
        return hidden.total() if self.is_of_sum else self.norm.of(hidden)

    def adds(self, hidden: Residual, product: Tensor) -> None:
        hidden.add(product, self.all_reduce)
        if self.is_of_sum:
            hidden.become(self.norm.of(hidden))


class LayerReader:
    """Reads one layer's weights: rank `shard` of layer `index` of the `side`, "encoder" or
    "decoder". A family says what its attentions ("self", "cross"), norms and MLP are called."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, side: str, index: int,
                 shard: Shard) -> None:
        self.spec, self.weights, self.side, self.index, self.shard = (
            spec, weights, side, index, shard)

    def joint(self, attention: str, parts: str) -> Product:
        """`parts` of query, key and value, as in "qkv", as one product [parts * w, H], with w =
        h * d of this shard."""
        width = self.spec.num_heads * self.spec.head_dim
        read = [self.columns(self.attention(attention, part), width, self.spec.hidden_size)
                for part in parts]
        biases = [bias for _, bias in read if bias is not None]
        return Product(torch.cat([weight for weight, _ in read]),
                       torch.cat(biases) if biases else None)

    def output(self, attention: str) -> Product:
        """Of an attention's heads, [H, w]."""
        return self.rows(self.attention(attention, "o"), self.spec.num_heads * self.spec.head_dim)

    def block(self, name: str) -> Block:
        """`name`: "self", "cross" or "mlp"."""
        return Block(self.norm(name), self.spec.decoder.norm_place == "sum", self.shard.completes)

    def columns(self, name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
        """This shard's outputs of a weight [out, into], and of its bias."""
        part = self.shard.part(0, out)
        return (self.weights.get(f"{name}.weight", (out, into), part),
                self.weights.get(f"{name}.bias", (out,), part) if self.spec.has_bias else None)

    def rows(self, name: str, into: int) -> Product:
        """The product of this shard's inputs of a weight [H, into]; the first rank adds its
        bias."""
        hidden, has_bias = self.spec.hidden_size, self.spec.has_bias and self.shard.is_first
        return Product(
            self.weights.get(f"{name}.weight", (hidden, into), self.shard.part(1, into)),
            self.weights.get(f"{name}.bias", (hidden,)) if has_bias else None)

    def attention(self, name: str, part: str) -> str:
        """The module of query ("q"), key, value or output ("o") of an attention."""
        raise NotImplementedError

    def norm(self, name: str) -> Norm:
        raise NotImplementedError

    def mlp(self) -> Mlp:
        raise NotImplementedError


class EncoderLayer:
    """One encoder layer, or one rank's shard of it. `heads` (h) are this shard's, each of size
    `dim` (d)."""

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
        """hidden [T, H] -> query, key and value of each token [T, 3 h d]."""
        return self._qkv(self._attention.reads(hidden))

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [T, H], attended [T, h * d]: hidden becomes the layer's output."""
        self._attention.adds(hidden, self._out(attended))
        self._fed.adds(hidden, self._mlp(self._fed.reads(hidden)))


class CrossLayer(EncoderLayer):
    """One decoder layer, or one rank's shard of it, called in this order: `qkv`, `cross_query`,
    `finish`, with an attention kernel after each of the first two. `cross_kv` is called once an
    input, when it is encoded."""

    side = "decoder"

    def load(self, read: LayerReader) -> None:
        super().load(read)
        self._across, self._cross_out = read.block("cross"), read.output("cross")
        self._cross_query, self._cross_kv = read.joint("cross", "q"), read.joint("cross", "kv")

    @property
    def products(self) -> tuple[Product, ...]:
        return *super().products, self._cross_query, self._cross_out, self._cross_kv

    def cross_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output [T, H] -> key, value, each [T, h, d], for the cross-attention."""
        key, value = self._cross_kv(encoded).view(len(encoded), 2, self.heads, self.dim).unbind(1)
        return key, value

    def cross_query(self, hidden: Residual, attended: Tensor) -> Tensor:
        """hidden [n, H], to which self-attention's output [n, h * d] is added -> the query of the
        cross-attention [n, h, d]."""
        self._attention.adds(hidden, self._out(attended))
        query = self._cross_query(self._across.reads(hidden))
        return query.view(len(query), self.heads, self.dim)

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [n, H], cross-attention's output [n, h * d]: hidden becomes the layer's output."""
        self._across.adds(hidden, self._cross_out(attended))
        self._fed.adds(hidden, self._mlp(self._fed.reads(hidden)))


class Embed(Protocol):
    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEnds:
    """Those of an encoder or a decoder, as far as a stage holds them: `embed` and the table of
    tokens on the first stage, the last norm and a decoder's head on the last one. `bias`: of a
    score by distance, among at most so many tokens."""

    embed: Embed | None = None
    embedding: Tensor | None = None  # [V, H]
    bias: Callable[[int], DistanceBias | None] = lambda longest: None
    norm: Norm | None = None
    head: OutputHead | None = None
    head_scale: float = 1.0  # of what goes into the head
    logits_bias: Tensor | None = None  # [V_local]

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> what the decoder layers look at [T, H]."""
        return hidden if self.norm is None else self.norm(hidden)

    def scores(self, hidden: Tensor) -> Scores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        assert self.head is not None, "only the last decoder stage has a head"
        rows = self.finish(hidden)
        return HeadScores(self.head, rows if self.head_scale == 1.0 else rows * self.head_scale,
                          bias=self.logits_bias)
