"""What OPT and GPT-2 share: layer norms before each block, biases, learned positions, a two-matrix
MLP. A family reads its checkpoint's names and layouts into these, and names its activation.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.shard import WHOLE, Shard, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.head import HeadScores, OutputHead
from xrunner.ops.linear import Product
from xrunner.ops.residual import Residual
from xrunner.ops.rows import layer_norm

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

    def __init__(self, spec: ModelSpec, shard: Shard, weights: PreNormWeights) -> None:
        self.heads = self.kv_heads = shard.share(spec.num_heads)
        self.dim, self.eps, self._all_reduce = spec.head_dim, spec.norm_eps, shard.completes
        self.weights = weights

    @property
    def products(self) -> tuple[Product, ...]:
        weights = self.weights
        return weights.qkv, weights.out, weights.up, weights.down

    def qkv(self, hidden: Residual) -> Tensor:
        """hidden [T, H] -> query, key and value of each token [T, 3 h d]."""
        return self.weights.qkv(hidden.layer_norm(*self.weights.input_norm, self.eps))

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """hidden [T, H], attended [T, h * d]: hidden becomes the layer's output."""
        weights = self.weights
        hidden.add(weights.out(attended), self._all_reduce)
        inner = weights.up(hidden.layer_norm(*weights.mlp_norm, self.eps))
        hidden.add(weights.down(inner), self._all_reduce)


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
        self.embedding = self.positions = self.norm = self.head = None
        if first:
            rows = spec.max_positions + names.position_offset
            self.embedding = weights.get(names.tokens, (spec.vocab_size, hidden))
            self.positions = weights.get(names.positions, (rows, hidden))
        if last:
            self.norm = read_norm(weights, names.norm, hidden)
            own = (names.tokens, self.embedding)
            self.head = OutputHead(head_weight(spec, weights, own, shard))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, H]."""
        assert self.embedding is not None and self.positions is not None, (
            "only the first stage embeds")
        at = positions + self._offset if self._offset else positions
        return F.embedding(tokens, self.embedding) + F.embedding(at, self.positions)

    def rotation(self, positions: Tensor) -> None:
        """Positions are in the hidden state: nothing is rotated."""

    def scores(self, hidden: Tensor) -> HeadScores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's share of the vocabulary."""
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        return HeadScores(self.head, layer_norm(hidden, *self.norm, self.eps))


def read_norm(weights: WeightSource, name: str, hidden: int) -> Norm:
    return weights.get(f"{name}.weight", (hidden,)), weights.get(f"{name}.bias", (hidden,))
