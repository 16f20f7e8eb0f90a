"""Sums and gathers over the ranks of a tensor-parallel group.

Over MPI, sums are computed in float32 in the order of the ranks, so every rank holds the same bits
for any dtype (MPI has no bfloat16). Small messages are gathered whole in one exchange. Large ones
are scattered, summed and gathered: 2 (t - 1) / t of the bytes instead of t - 1. Waiting ranks poll
and sleep (xrunner.comm.point_to_point).

Over torch.distributed, sums are computed in the tensor's own dtype and the backend's order: equal
on all ranks, but not those of MPI. NCCL connects GPUs that no two ranks share, and tensors stay on
the devices. Gloo, on CPUs, is for tests only."""

import socket
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xrunner.comm.exchange import all_gather, broadcast
from xrunner.comm.point_to_point import as_bytes, wait_politely
from xrunner.devices import to_host

_GATHER_UP_TO_BYTES = 32 * 1024  # chosen: below this one exchange is cheaper than two


class MpiGroup:
    """The ranks of an mpi4py communicator as one group."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of every rank's `tensor`, a new tensor on its device; equal shapes and dtypes."""
        if self.size == 1:
            return tensor
        flat = to_host(tensor.reshape(-1))
        total = (_sum(self._all_gather(flat), flat.dtype) if flat.nbytes <= _GATHER_UP_TO_BYTES
                 else self._scattered(flat))
        return total.view(tensor.shape).to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor | None:
        """All tensors as [ranks, *shape] in host memory on the first rank; None on the others."""
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
        """All ranks' elements, [ranks, elements]."""
        parts = torch.empty((self.size, len(flat)), dtype=flat.dtype)
        self._wait(self._comm.Iallgather(as_bytes(flat.contiguous()), as_bytes(parts)))
        return parts

    def _wait(self, request: Any) -> None:
        wait_politely(lambda: bool(request.Test()))


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first axis, in its order, in float32; returned as `dtype`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


class TorchGroup:
    """A torch.distributed process group of an MPI communicator's ranks; collective to build. It is
    the process's default group, so a rank can be in one such group at a time."""

    def __init__(self, comm: Any, backend: Literal["nccl", "gloo"]) -> None:
        """`comm`: mpi4py's, whose ranks form the group. With NCCL each rank's GPU must be current.
        Raises RuntimeError if the backend fails, for example NCCL with two ranks on one GPU."""
        self._comm = comm
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._store = _common_store(comm)
        # naming the device connects the GPUs now: errors show here, and no step pays for it
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        distributed.init_process_group(backend, store=self._store, rank=self.rank,
                                       world_size=self.size, device_id=device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of every rank's `tensor`, in place if it is contiguous."""
        total = tensor.contiguous()
        distributed.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor | None:
        """All tensors as [ranks, *shape] on the first rank; None on the others."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(tensor.contiguous(), parts, dst=0)
        return None if parts is None else torch.stack(parts)

    def send(self, target: int, tensor: Tensor) -> None:
        distributed.send(tensor, target)

    def receive(self, source: int, into: Tensor) -> None:
        distributed.recv(into, source)

    def close(self) -> None:
        """Ends the group. Collective."""
        distributed.destroy_process_group()
        self._comm.Barrier()  # the first rank's store must outlive the others' use of it
        self._store = None


# Ranks of a tensor-parallel group. All take part in each call, in the same order.
Group = MpiGroup | TorchGroup


def _common_store(comm: Any) -> Any:
    """A store at the first rank, whose address goes to the others by MPI."""
    hosts = all_gather(comm, socket.gethostname(), str)
    # a host's own name may not resolve; on one host nobody needs it
    host, port = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0], 0
    store = None
    if comm.Get_rank() == 0:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        port = store.port
    port = broadcast(comm, port, int)
    return store or TCPStore(host, port, is_master=False)
