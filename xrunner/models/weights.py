"""Where a layer's tensors come from: `WeightSource`, and random weights of any catalog shape."""

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Elements drawn at a time, from one seed: fewer need no memory, more leave less to skip.
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
        """A view of `tensor`."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class WeightSource(Protocol):
    """Tensors by their Hugging Face name, all of one dtype: that of the run."""

    dtype: torch.dtype

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """The tensor `name`, whose full shape is `shape`, or `part` of it; no more than the part
        is ever held. Raises XgptError."""
        ...

    def has(self, name: str) -> bool: ...


class OnDevice:
    """Another source's tensors, moved to `device` one by one."""

    def __init__(self, weights: WeightSource, device: torch.device | str) -> None:
        self._weights, self._device, self.dtype = weights, torch.device(device), weights.dtype

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        return self._weights.get(name, shape, part).to(self._device)

    def has(self, name: str) -> bool:
        return self._weights.has(name)


class WideVectors:
    """Another source's tensors, those of one dimension (norms and biases) as `wide`: the type of
    the activations that they meet."""

    def __init__(self, weights: WeightSource, wide: torch.dtype) -> None:
        self._weights, self._wide, self.dtype = weights, wide, weights.dtype

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = self._weights.get(name, shape, part)
        return tensor.to(self._wide) if len(shape) == 1 else tensor

    def has(self, name: str) -> bool:
        return self._weights.has(name)


class RandomWeights:
    """Weights for performance work: an element's value depends on the seed, its tensor's name and
    shape and its place alone, so that every rank agrees on it however the tensor is divided."""

    def __init__(self, dtype: torch.dtype, *, scale: float = 0.02, seed: int = 0) -> None:
        self.dtype, self.scale, self.seed = dtype, scale, seed

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        wanted = part if part is not None else TensorPart(0, 0, shape[0])
        if _is_norm(name):
            return torch.ones(wanted.shape(shape), dtype=self.dtype)
        if name.endswith("logits_bias"):  # of zeros in published checkpoints, and then never added
            return torch.zeros(wanted.shape(shape), dtype=self.dtype)
        out = torch.empty(wanted.shape(shape), dtype=self.dtype)
        rows = TensorPart(0, 0, shape[0]) if wanted.dim != 0 else wanted
        block_rows = min(max(_BLOCK_ELEMENTS // math.prod(shape[1:]), 1), shape[0])

        is_inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

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
        else:  # a generator draws on one core: 13 billion elements take it a minute
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(draw, firsts))
        return out

    def has(self, name: str) -> bool:
        return True

    def _draw(self, name: str, first_row: int, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{self.seed} {name} {first_row}".encode())
        return torch.empty(shape, dtype=torch.float32).normal_(
            0, self.scale, generator=torch.Generator().manual_seed(seed))


def _is_norm(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    return kind == "weight" and ("norm" in last or last.startswith("ln_"))
