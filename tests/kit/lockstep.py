"""A tensor-parallel group without MPI: its ranks are threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from xrunner.models.shard import Shard

T = TypeVar("T")


class Lockstep:
    """All ranks of a tensor-parallel group as threads that meet at every sum and gather."""

    def __init__(self, degree: int) -> None:
        self._partials: list[torch.Tensor] = [torch.empty(0)] * degree
        self._barrier = threading.Barrier(degree, timeout=30)
        self.shards = [Shard(i, degree, partial(self._sum, i), partial(self._gather, i))
                       for i in range(degree)]

    def run(self, work: Callable[[Shard], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(work, self.shards))

    def _sum(self, index: int, partial: torch.Tensor) -> torch.Tensor:
        return self._all(index, partial).sum(0)

    def _gather(self, index: int, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._all(index, tensor)
        return parts if index == 0 else None

    def _all(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self._partials[index] = tensor
        self._barrier.wait()
        parts = torch.stack(self._partials)
        self._barrier.wait()  # nobody overwrites its own before all have taken them
        return parts
