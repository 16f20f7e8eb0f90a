"""BART and mBART layers: learned positions (offset 2), biases, layer norms: of each block's sum
(BART), or of what goes into a block, with one more behind all layers (mBART).

The attention kernels are apart from the layers, as in the other families: `packed_attention` over
an input; `decode_attention` over the tokens so far, then over the encoded input.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.layer_parts import Norm, PlainMlp
from xrunner.models.learned import read_norm
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import TensorPart, WeightSource
from xrunner.ops.attention import PLAIN
from xrunner.ops.linear import Product
from xrunner.ops.output_head import BiasedScores, HeadScores, OutputHead, Scores
from xrunner.ops.residual import AllReduce, Residual

SCORING = PLAIN
POSITION_OFFSET = 2  # the first two rows of a position table belong to padding
LOGITS_BIAS = "final_logits_bias"
_PRODUCT_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_erf", "gelu_new": "gelu"}


class _Block(NamedTuple):
    """An attention or an MLP in the residual stream."""

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


class _LayerReader:
    """Reads one layer's weights: rank `shard` of `encoder.layers.i` or `decoder.layers.i`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, prefix: str, shard: Shard) -> None:
        self._spec, self._weights, self._prefix, self._shard = spec, weights, prefix, shard

    def joint(self, attention: str, parts: str) -> Product:
        """`parts` of query, key and value, as in "qkv", as one product [parts * w, H], with w =
        h * d of this shard."""
        hidden = self._spec.hidden_size
        read = [self._columns(f"{attention}.{part}_proj", hidden, hidden) for part in parts]
        return Product(torch.cat([weight for weight, _ in read]),
                       torch.cat([bias for _, bias in read]))

    def output(self, attention: str) -> Product:
        """Of an attention's heads, [H, w]."""
        return self._rows(f"{attention}.out_proj", self._spec.hidden_size)

    def mlp(self) -> PlainMlp:
        spec = self._spec
        up = Product(*self._columns("fc1", spec.intermediate_size, spec.hidden_size),
                     activation=_PRODUCT_ACTIVATIONS[spec.activation])
        return PlainMlp(up, self._rows("fc2", spec.intermediate_size))

    def block(self, norm: str) -> _Block:
        return _Block(read_norm(self._spec, self._weights, self._prefix + norm),
                      self._spec.decoder.norm_place == "sum", self._shard.completes)

    def _columns(self, name: str, out: int, into: int) -> tuple[Tensor, Tensor]:
        part = self._shard.part(0, out)
        return (self._weights.get(f"{self._prefix}{name}.weight", (out, into), part),
                self._weights.get(f"{self._prefix}{name}.bias", (out,), part))

    def _rows(self, name: str, into: int) -> Product:
        hidden, weights = self._spec.hidden_size, self._weights
        weight = weights.get(f"{self._prefix}{name}.weight", (hidden, into),
                             self._shard.part(1, into))
        return Product(weight, weights.get(f"{self._prefix}{name}.bias", (hidden,))
                       if self._shard.is_first else None)


class BartEncoderLayer:
    """One encoder layer, or one rank's shard of it: as in transformers' BartEncoderLayer and
    MBartEncoderLayer. `heads` (h) are this shard's, each of size `dim` (d)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim = spec.head_dim
        read = _LayerReader(spec, weights, f"encoder.layers.{index}.", shard)
        self._attention, self._fed = (read.block("self_attn_layer_norm"),
                                      read.block("final_layer_norm"))
        self._qkv, self._out = read.joint("self_attn", "qkv"), read.output("self_attn")
        self._mlp = read.mlp()

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


class BartDecoderLayer:
    """One decoder layer, or one rank's shard of it, called in this order: `qkv`, `cross_query`,
    `finish`, with an attention kernel after each of the first two. `cross_kv` is called once an
    input, when it is encoded."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim = spec.head_dim
        read = _LayerReader(spec, weights, f"decoder.layers.{index}.", shard)
        self._attention, self._across, self._fed = (
            read.block(f"{name}_layer_norm") for name in ("self_attn", "encoder_attn", "final"))
        self._qkv, self._out = read.joint("self_attn", "qkv"), read.output("self_attn")
        self._cross_query = read.joint("encoder_attn", "q")
        self._cross_kv = read.joint("encoder_attn", "kv")
        self._cross_out, self._mlp = read.output("encoder_attn"), read.mlp()

    @property
    def products(self) -> tuple[Product, ...]:
        return (self._qkv, self._out, self._cross_query, self._cross_out, self._cross_kv,
                *self._mlp.products)

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [n, H] -> query, key and value of each token [n, 3 h d]."""
        return self._qkv(self._attention.reads(hidden))

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

    def finish(self, hidden: Residual, cross_attended: Tensor) -> None:
        """hidden [n, H], cross-attention's output [n, h * d]: hidden becomes the layer's output."""
        self._across.adds(hidden, self._cross_out(cross_attended))
        self._fed.adds(hidden, self._mlp(self._fed.reads(hidden)))


class _Embedding:
    """Tokens and positions of one side, normed."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, side: str, tokens: Tensor) -> None:
        assert spec.max_positions is not None, "a model with learned positions"
        self._tokens, self._scale = tokens, spec.decoder.embedding_scale
        self._last = spec.max_positions - 1
        self._positions = weights.get(f"{side}.embed_positions.weight", (
            spec.max_positions + POSITION_OFFSET, spec.hidden_size))
        self._norm = read_norm(spec, weights, f"{side}.layernorm_embedding")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]. A static batch decodes the rows of queries
        that are done, beyond the last position if others need as long; nobody reads those."""
        at = positions.clamp(max=self._last) + POSITION_OFFSET
        hidden = F.embedding(tokens, self._tokens) * self._scale + F.embedding(at, self._positions)
        # in the type of the norm's weights, which are wider than the embedding's where products are
        return self._norm(hidden.to(self._norm.weight.dtype))


class BartEncoderEnds:
    """Embedding (first encoder stage) and, of mBART, the final norm (last one)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE, embedding: Tensor | None = None) -> None:
        """`embedding`: of tokens [V, H], where the decoder's ends hold it."""
        self._embedding = _Embedding(spec, weights, "encoder", embedding_weight(
            spec, weights) if embedding is None else embedding) if first else None
        self.norm = _final_norm(spec, weights, "encoder") if last else None

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        assert self._embedding is not None, "only the first encoder stage embeds"
        return self._embedding(tokens, positions)

    def bias(self, longest: int) -> None:
        """Scores have none: positions are in what is embedded."""

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> what the decoder layers look at [T, H]."""
        return hidden if self.norm is None else self.norm(hidden)


class BartDecoderEnds:
    """Embedding (first decoder stage), of mBART the final norm, and head (last one)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        self.embedding = embedding_weight(spec, weights) if first else None
        self._embedding = None if self.embedding is None else _Embedding(
            spec, weights, "decoder", self.embedding)
        self.norm: Norm | None = None
        self.head: OutputHead | None = None
        self._logits_bias: Tensor | None = None
        if last:
            self.norm = _final_norm(spec, weights, "decoder")
            self.head = OutputHead(head_weight(spec, weights, self.embedding, shard))
            self._logits_bias = _logits_bias(spec, weights, shard)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [n], positions [n] -> hidden [n, H]."""
        assert self._embedding is not None, "only the first decoder stage embeds"
        return self._embedding(tokens, positions)

    def bias(self, longest: int) -> None:
        """Scores have none: positions are in what is embedded."""

    def scores(self, hidden: Tensor) -> Scores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        assert self.head is not None, "only the last decoder stage has a head"
        scores = HeadScores(self.head, hidden if self.norm is None else self.norm(hidden))
        return scores if self._logits_bias is None else BiasedScores(scores, self._logits_bias)


def _final_norm(spec: ModelSpec, weights: WeightSource, side: str) -> Norm | None:
    """Where norms are of sums, the last layer's is the final one."""
    return None if spec.decoder.norm_place == "sum" else read_norm(
        spec, weights, f"{side}.layer_norm")


def _logits_bias(spec: ModelSpec, weights: WeightSource, shard: Shard) -> Tensor | None:
    """[V_local]; None where it is left out, or of zeros, as in published checkpoints."""
    if not weights.has(LOGITS_BIAS):
        return None
    part = shard.vocabulary_part(spec.vocab_size)
    bias = weights.get(LOGITS_BIAS, (1, spec.vocab_size),
                       None if part is None else TensorPart(1, part.start, part.stop))[0]
    return bias if bool(bias.any()) else None
