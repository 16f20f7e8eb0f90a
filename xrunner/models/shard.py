"""One rank's share of a tensor-parallel layer, after Megatron-LM (arXiv:1909.08053).

Query, key, value and the MLP's inner columns are divided over the group (column parallel), so the
products that follow them yield partial sums (row parallel), which `all_reduce` completes: twice a
layer, three times with cross-attention. A row-parallel bias is held by the group's first rank
alone, which adds it exactly once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.checkpoint.layout import HEAD, embedding_names, is_optional
from xrunner.models.weights import TensorPart, WeightSource


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _alone(tensor: Tensor) -> Tensor | None:
    return tensor[None]


def _sum_as(all_reduce: Callable[[Tensor], Tensor], dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return all_reduce(tensor.to(dtype)).to(tensor.dtype)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `index` of a group of `degree`. `all_reduce` sums a [T, H] tensor over the group;
    `gather` stacks every rank's tensor on the first one, and gives None on the others."""

    index: int = 0
    degree: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _identity
    gather: Callable[[Tensor], Tensor | None] = _alone
    unrounded: Callable[[Tensor], Tensor] | None = None  # all_reduce, before it rounded

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.degree, f"{self.index = } {self.degree = }"

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def completes(self) -> Callable[[Tensor], Tensor] | None:
        """What makes partial sums whole; None for a rank alone, whose sums are."""
        return None if self.degree == 1 else self.all_reduce

    def rounding(self, dtype: torch.dtype) -> Self:
        """The same, whose sums are of `dtype` on their way between ranks, whatever the tensors."""
        return replace(self, all_reduce=partial(_sum_as, self.all_reduce, dtype),
                       unrounded=self.all_reduce)

    @property
    def exact_sum(self) -> Callable[[Tensor], Tensor]:
        """all_reduce of few numbers that must not be rounded on their way."""
        return self.unrounded or self.all_reduce

    def share(self, count: int) -> int:
        """This rank's part of `count` heads or columns, which the degree divides."""
        assert count % self.degree == 0, f"{count = } {self.degree = }"
        return count // self.degree

    def part(self, dim: int, size: int, *, first: int = 0) -> TensorPart | None:
        """This rank's even share of the `size` rows (dim 0) or columns (dim 1) from `first` on;
        None for a rank alone, which takes the tensor as it is."""
        if self.degree == 1:
            return None
        share = self.share(size)
        start = first + self.index * share
        return TensorPart(dim, start, start + share)

    def vocabulary_part(self, vocab_size: int) -> TensorPart | None:
        """Rows of the output head: ceil(V / degree) each, fewer (or none) on the last ranks."""
        if self.degree == 1:
            return None
        share = self.vocabulary_share(vocab_size)
        start = min(self.index * share, vocab_size)
        return TensorPart(0, start, min(start + share, vocab_size))

    def vocabulary_share(self, vocab_size: int) -> int:
        """Tokens of the vocabulary on every rank but the last ones, which may have fewer."""
        return -(-vocab_size // self.degree)


WHOLE = Shard()


def embedding_weight(spec: ModelSpec, weights: WeightSource,
                     part: TensorPart | None = None) -> Tensor:
    """The table of tokens [V, H], or part of it, by whichever of its names the file has it."""
    names = embedding_names(spec)
    return weights.get(next(filter(weights.has, names), names[0]),
                       (spec.vocab_size, spec.hidden_size), part)


def head_weight(spec: ModelSpec, weights: WeightSource, embedding: Tensor | None,
                shard: Shard) -> Tensor:
    """Output head [V_local, H]. `embedding`: where this rank holds it; a tied head is a view of
    it."""
    part = shard.vocabulary_part(spec.vocab_size)
    if not spec.tied_embeddings and (weights.has(HEAD) or not is_optional(spec, HEAD)):
        return weights.get(HEAD, (spec.vocab_size, spec.hidden_size), part)
    if embedding is None:
        return embedding_weight(spec, weights, part)
    return embedding if part is None else part.of(embedding)
