"""What the ranks of a tensor-parallel group do together: sums of a tensor, over MPI, and gathers.
(Between GPUs that no two ranks share: xrunner.transport.torch_group.)

Sums are taken in float32 in the order of the ranks, so every rank holds the same bits, whatever
the dtype (MPI has no bfloat16). Small messages are gathered whole, in one exchange; large ones are
scattered, summed and gathered, which moves 2 (t - 1) / t of the bytes instead of t - 1. Waiting
ranks poll and sleep (xrunner.transport.comm).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from xrunner.devices import to_host
from xrunner.transport.comm import as_bytes, wait_politely

_GATHER_UP_TO_BYTES = 32 * 1024  # below this the second exchange costs more than its bytes save


class Group(Protocol):
    """The ranks of a tensor-parallel group. All take part in each call, in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor` (same shape and dtype on each)."""
        ...

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[ranks, *shape] on the group's first rank, None on the others."""
        ...


class MpiGroup:
    """The ranks of `comm` (an mpi4py communicator) as one group."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor` (same shape and dtype on each), in a new tensor on its
        device."""
        if self.size == 1:
            return tensor
        flat = to_host(tensor.reshape(-1))
        total = (_sum(self._all_gather(flat), flat.dtype) if flat.nbytes <= _GATHER_UP_TO_BYTES
                 else self._scattered(flat))
        return total.view(tensor.shape).to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[ranks, *shape] on the group's first rank, in the host's memory; None on the others."""
        mine = to_host(tensor).contiguous()
        parts = torch.empty((self.size, *mine.shape), dtype=mine.dtype) if self.rank == 0 else None
        self._wait(self._comm.Igather(
            as_bytes(mine), None if parts is None else as_bytes(parts), root=0))
        return parts

    def _scattered(self, flat: Tensor) -> Tensor:
        count = -(-len(flat) // self.size)
        padded = torch.zeros(count * self.size, dtype=flat.dtype)
        padded[:len(flat)] = flat
        received = torch.empty_like(padded)
        self._wait(self._comm.Ialltoall(as_bytes(padded), as_bytes(received)))
        own = _sum(received.view(self.size, count), flat.dtype)
        return self._all_gather(own).view(-1)[:len(flat)]

    def _all_gather(self, flat: Tensor) -> Tensor:
        """[ranks, elements]"""
        parts = torch.empty((self.size, len(flat)), dtype=flat.dtype)
        self._wait(self._comm.Iallgather(as_bytes(flat.contiguous()), as_bytes(parts)))
        return parts

    def _wait(self, request: Any) -> None:
        wait_politely(lambda: bool(request.Test()))


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Over the first axis, in its order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)
