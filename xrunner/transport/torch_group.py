"""The ranks of a tensor-parallel group over torch.distributed: NCCL between GPUs, where tensors
never leave the devices. gloo, on CPUs, serves tests alone.

Sums are taken in the tensor's own dtype and in the backend's order: every rank has the same ones,
but they are not those of MPI, which sums in float32 in the order of the ranks.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]


class TorchGroup:
    """A torch.distributed process group with an MPI communicator's ranks; collective to build.
    It is the process's default one: a rank is in one such group at a time."""

    def __init__(self, comm: Any, backend: Literal["nccl", "gloo"]) -> None:
        """`comm` (mpi4py): its ranks form the group. With NCCL each rank has made its GPU the
        current one. Raises RuntimeError where the backend cannot be set up, for example NCCL with
        two ranks on one GPU."""
        self._comm = comm
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._store = _common_store(comm)
        # naming the device connects the GPUs now: what is wrong shows here, and no step pays for it
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        distributed.init_process_group(backend, store=self._store, rank=self.rank,
                                       world_size=self.size, device_id=device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, in its place where it is contiguous."""
        total = tensor.contiguous()
        distributed.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[ranks, *shape] on the group's first rank, None on the others."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(tensor.contiguous(), parts, dst=0)
        return None if parts is None else torch.stack(parts)

    def send(self, target: int, tensor: Tensor) -> None:
        distributed.send(tensor, target)

    def receive(self, source: int, into: Tensor) -> None:
        distributed.recv(into, source)

    def close(self) -> None:
        """Collective."""
        distributed.destroy_process_group()
        self._comm.Barrier()  # the first rank's store serves the others until they are through
        self._store = None


def _common_store(comm: Any) -> Any:
    """The store where ranks find each other: the first one's, whose address goes round by MPI."""
    hosts = comm.allgather(socket.gethostname())
    # a host's own name may not resolve; within one host nobody needs it
    host, port = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0], 0
    store = None
    if comm.Get_rank() == 0:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        port = store.port
    port = comm.bcast(port, root=0)
    return store or TCPStore(host, port, is_master=False)
