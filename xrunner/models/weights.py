"""Sources of a layer's tensors, and one rank's share of a tensor-parallel layer.

After Megatron-LM (arXiv:1909.08053): query, key, value and the MLP's inner columns are divided over
the group (column parallel). Where its degree exceeds the number of KV heads, these are copied. The
products after them yield partial sums (row parallel), which `all_reduce` completes: twice a layer,
three times with cross-attention. Only the group's first rank holds a row-parallel bias, so it is
added once."""

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec, kv_copies
from xrunner.checkpoint.layout import HEAD, embedding_names, is_optional

# chosen: elements drawn at a time from one seed; fewer save no memory, more skip less
_BLOCK_ELEMENTS = 1 << 20


class TensorPart(NamedTuple):
    """Rows (dim 0) or columns (dim 1) start .. stop - 1 of a tensor."""

    dim: int
    start: int
    stop: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape within a tensor of shape `whole`."""
        assert 0 <= self.start <= self.stop <= whole[self.dim], f"{self = } {whole = }"
        return (*whole[:self.dim], self.stop - self.start, *whole[self.dim + 1:])

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, all of the run's dtype."""

    dtype: torch.dtype

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """The tensor `name` of full shape `shape`, or `part` of it. Raises XgptError. Never holds
        more than the part."""
        ...

    def has(self, name: str) -> bool: ...


class PlacedWeights:
    """Another source's tensors on `device`; norms and biases as `wide`, the activations' dtype."""

    def __init__(self, weights: WeightSource, device: torch.device, wide: torch.dtype) -> None:
        self._weights, self._device, self._wide = weights, device, wide
        self.dtype = weights.dtype

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = self._weights.get(name, shape, part).to(self._device)
        return tensor.to(self._wide) if len(shape) == 1 else tensor

    def has(self, name: str) -> bool:
        return self._weights.has(name)


class RandomWeights:
    """Random weights for performance work. An element depends on its tensor's name and shape and
    its place alone, so all ranks agree on it however tensors are divided. `bytes_read` counts the
    bytes made."""

    def __init__(self, dtype: torch.dtype, *, scale: float = 0.02) -> None:
        self.dtype, self.scale, self.bytes_read = dtype, scale, 0

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = self._made(name, shape, part)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        """Does nothing."""

    def _made(self, name: str, shape: tuple[int, ...], part: TensorPart | None) -> Tensor:
        wanted = part if part is not None else TensorPart(0, 0, shape[0])
        if _is_norm(name):
            return torch.ones(wanted.shape(shape), dtype=self.dtype)
        if name.endswith("logits_bias"):  # zero in published checkpoints, and then never added
            return torch.zeros(wanted.shape(shape), dtype=self.dtype)
        out = torch.empty(wanted.shape(shape), dtype=self.dtype)
        rows = TensorPart(0, 0, shape[0]) if wanted.dim != 0 else wanted
        block_rows = min(max(_BLOCK_ELEMENTS // math.prod(shape[1:]), 1), shape[0])

        is_inference = torch.is_inference_mode_enabled()  # each thread has a mode of its own

        def draw(first: int) -> None:
            with torch.inference_mode(is_inference):
                block = self._draw(name, first, (min(block_rows, shape[0] - first), *shape[1:]))
                low, high = max(rows.start, first), min(rows.stop, first + len(block))
                drawn = block[low - first:high - first]
                out[low - rows.start:high - rows.start] = (
                    drawn if wanted is rows else wanted.of(drawn))

        firsts = range(rows.start - rows.start % block_rows, rows.stop, block_rows)
        workers = min(torch.get_num_threads(), len(firsts))
        if workers <= 1:
            for first in firsts:
                draw(first)
        else:  # one generator draws on one core: 13 billion elements take a minute
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(draw, firsts))
        return out

    def has(self, name: str) -> bool:
        return True

    def _draw(self, name: str, first_row: int, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"0 {name} {first_row}".encode())
        return torch.empty(shape, dtype=torch.float32).normal_(
            0, self.scale, generator=torch.Generator().manual_seed(seed))


def _is_norm(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    return kind == "weight" and ("norm" in last or last.startswith("ln_"))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _alone(tensor: Tensor) -> Tensor | None:
    return tensor[None]


def _sum_as(all_reduce: Callable[[Tensor], Tensor], dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return all_reduce(tensor.to(dtype)).to(tensor.dtype)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `index` of a tensor-parallel group of `degree` ranks. `all_reduce`: sums a [T, H] tensor
    over the group. `gather`: stacks every rank's tensor on the first rank; None on the others."""

    index: int = 0
    degree: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _identity
    gather: Callable[[Tensor], Tensor | None] = _alone
    unrounded: Callable[[Tensor], Tensor] | None = None  # all_reduce without rounding

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.degree, f"{self.index = } {self.degree = }"

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def completes(self) -> Callable[[Tensor], Tensor] | None:
        """Completes partial sums; None for a rank alone, whose sums are complete."""
        return None if self.degree == 1 else self.all_reduce

    def rounding(self, dtype: torch.dtype) -> Self:
        """This shard with sums rounded to `dtype` between ranks, whatever the tensors' dtype."""
        return replace(self, all_reduce=partial(_sum_as, self.all_reduce, dtype),
                       unrounded=self.all_reduce)

    @property
    def exact_sum(self) -> Callable[[Tensor], Tensor]:
        """all_reduce for a few numbers that must not be rounded."""
        return self.unrounded or self.all_reduce

    def share(self, count: int) -> int:
        """This rank's number of `count` heads or columns; the degree must divide it."""
        assert count % self.degree == 0, f"{count = } {self.degree = }"
        return count // self.degree

    def of_kv(self, spec: ModelSpec) -> Self:
        """This rank's shard of keys and values. Ranks with copies of a head have the same one."""
        copies = kv_copies(spec, self.degree)
        return replace(self, index=self.index // copies, degree=self.degree // copies)

    def part(self, dim: int, size: int, *, first: int = 0) -> TensorPart | None:
        """This rank's even share of the `size` rows (dim 0) or columns (dim 1) from `first` on.
        None for a rank alone, which takes the whole tensor."""
        if self.degree == 1:
            return None
        share = self.share(size)
        start = first + self.index * share
        return TensorPart(dim, start, start + share)

    def vocabulary_part(self, vocab_size: int) -> TensorPart | None:
        """Rows of the output head: ceil(V / degree), fewer (or none) on the last ranks."""
        if self.degree == 1:
            return None
        share = self.vocabulary_share(vocab_size)
        start = min(self.index * share, vocab_size)
        return TensorPart(0, start, min(start + share, vocab_size))

    def vocabulary_share(self, vocab_size: int) -> int:
        """Number of tokens of the vocabulary on every rank but the last ones, which may have
        fewer."""
        return -(-vocab_size // self.degree)


WHOLE = Shard()


def embedding_weight(spec: ModelSpec, weights: WeightSource,
                     part: TensorPart | None = None) -> Tensor:
    """Token table [V, H], or part of it, by whichever of its names the file has."""
    names = embedding_names(spec)
    return weights.get(next(filter(weights.has, names), names[0]),
                       (spec.vocab_size, spec.hidden_size), part)


def head_weight(spec: ModelSpec, weights: WeightSource, embedding: Tensor | None,
                shard: Shard) -> Tensor:
    """Output head [V_local, H]; a tied head is a view of `embedding`, if this rank holds it."""
    part = shard.vocabulary_part(spec.vocab_size)
    if not spec.tied_embeddings and (weights.has(HEAD) or not is_optional(spec, HEAD)):
        return weights.get(HEAD, (spec.vocab_size, spec.hidden_size), part)
    if embedding is None:
        return embedding_weight(spec, weights, part)
    return embedding if part is None else part.of(embedding)
