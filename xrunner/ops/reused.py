"""Memory of large tensors that do not live long, kept for the next: where a system gives pages of
zeros, getting new ones takes longer than copying into them."""

import mmap
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 4 * 2**20  # what is smaller comes quickly from the allocator, which keeps it


class ReusedMemory:
    """Keeps one stretch of memory, the largest that came back."""

    def __init__(self) -> None:
        self._free: mmap.mmap | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU with any contents. Its memory comes back here when no tensor is left
        that has part of it."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory, self._free = self._free, None
        if memory is None or len(memory) < num_bytes:
            try:
                memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, ValueError, OverflowError):  # torch says in words what was asked for
                return torch.empty(tuple(shape), dtype=dtype)
        holder = np.frombuffer(memory, np.uint8, num_bytes)  # every tensor of it holds this
        weakref.finalize(holder, self._take_back, memory).atexit = False
        return torch.from_numpy(holder).view(dtype).view(tuple(shape))

    def _take_back(self, memory: mmap.mmap) -> None:
        if self._free is None or len(self._free) < len(memory):
            self._free = memory
