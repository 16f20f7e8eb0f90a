"""The one decoder layer of all decoder-only families, without its attention kernel, and the ends
of a model. A family reads its checkpoint's names and layouts into `LayerWeights` and `EndWeights`;
what is done with them is xgpt.core.decoder.Decoder's to say.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.layer_parts import HeadNorms, Mlp, Norm
from xrunner.models.rotary import rotaries, rotary_of
from xrunner.models.shard import Shard
from xrunner.ops.attention import Scoring
from xrunner.ops.linear import Product
from xrunner.ops.output_head import HeadScores, OutputHead, Scores
from xrunner.ops.rows import Residual, Rotation


class LayerWeights(NamedTuple):
    """One layer's, or one rank's shard of them. Norms are of what goes into attention and MLP, or
    of what comes out; None: there is none."""

    qkv: Product  # of query, key and value, [(h + 2 k) d, H]
    out: Product
    mlp: Mlp
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attended_norm: Norm | None = None
    output_norm: Norm | None = None
    head_norms: HeadNorms | None = None


class DecoderLayer:
    """One decoder layer, or one rank's shard of it. `heads` (h) and `kv_heads` (k) are this
    shard's, each of size `dim` (d). `scoring`: how its scores are made; `rotary`: which of its
    ends' rotations it takes, None: none."""

    def __init__(self, spec: ModelSpec, shard: Shard, index: int, weights: LayerWeights) -> None:
        self.heads, self.kv_heads = shard.share(spec.num_heads), shard.share(spec.kv_heads)
        self.dim, self._all_reduce = spec.head_dim, shard.completes
        self.weights, self._scale = weights, spec.decoder.residual_scale
        self.rotary = rotary_of(spec, index)
        self.scoring = Scoring(spec.decoder.query_scale, spec.decoder.window(index),
                               spec.decoder.attention_cap)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.weights.qkv, self.weights.out, *self.weights.mlp.products

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [T, H] -> query, key and value of each token [T, (h + 2 k) d], not yet rotated."""
        joint = self.weights.qkv(_normed(hidden, self.weights.input_norm))
        norms = self.weights.head_norms
        return joint if norms is None else norms(joint, self.heads)

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [T, H], attended [T, h * d]: hidden becomes the layer's output."""
        weights = self.weights
        self._add(hidden, weights.out(attended), weights.attended_norm)
        self._add(hidden, weights.mlp(_normed(hidden, weights.mlp_norm)), weights.output_norm)

    def _add(self, hidden: Residual, product: Tensor, norm: Norm | None) -> None:
        if self._scale != 1.0:
            product = product * self._scale
        if norm is None:
            hidden.add(product, self._all_reduce)
        else:  # of the whole group's sum
            hidden.add(norm(product if self._all_reduce is None else self._all_reduce(product)))


def _normed(hidden: Residual, norm: Norm | None) -> Tensor:
    return hidden.total() if norm is None else norm.of(hidden)


class EndWeights(NamedTuple):
    """None on the stages that do not hold them. Position p is row p + `position_offset`."""

    tokens: Tensor | None
    positions: Tensor | None
    position_offset: int
    norm: Norm | None
    head: OutputHead | None


class DecoderEnds:
    """Embeddings (first stage), rotary tables (every stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: EndWeights) -> None:
        self._spec, self.weights = spec, weights
        self.embedding, self.head = weights.tokens, weights.head
        self._rotaries = rotaries(spec)
        # rounded as the embedding is, as in transformers; here, for a GPU would have to be waited
        # for to take it
        self._embedding_scale = spec.decoder.embedding_scale
        if weights.tokens is not None:
            self._embedding_scale = float(torch.tensor(self._embedding_scale,
                                                       dtype=weights.tokens.dtype))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        weights, scale = self.weights, self._embedding_scale
        assert weights.tokens is not None, "only the first stage embeds"
        hidden = F.embedding(tokens, weights.tokens)
        if scale != 1.0:
            hidden = hidden * scale
        if weights.positions is None:
            return hidden
        at = positions + weights.position_offset if weights.position_offset else positions
        return hidden + F.embedding(at, weights.positions)

    def rotation(self, positions: Tensor) -> tuple[Rotation, ...]:
        """positions [T] -> what the layers rotate queries and keys by, by their `rotary`."""
        return tuple(rotary(positions) for rotary in self._rotaries)

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> the model's last hidden states [n, H], which the head multiplies."""
        assert self.weights.norm is not None, "only the last stage has the last norm"
        return self.weights.norm(hidden)

    def scores(self, hidden: Tensor) -> Scores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        head, decoder = self.weights.head, self._spec.decoder
        assert head is not None, "only the last stage has a head"
        rows = self.normed(hidden)
        return HeadScores(head, rows if decoder.logit_scale == 1.0 else rows * decoder.logit_scale,
                          cap=decoder.logit_cap)
