"""The ranks of a tensor-parallel group over torch.distributed: NCCL between GPUs, where tensors
never leave the devices. gloo, on CPUs, serves tests alone.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import torch
from torch import Tensor, distributed


class TorchGroup:
    """A torch.distributed process group with an MPI communicator's ranks; collective to build."""

    def __init__(self, comm: Any, backend: Literal["nccl", "gloo"]) -> None:
        """`comm` (mpi4py): its ranks form the group. Raises RuntimeError where the backend cannot
        be set up, for example NCCL with two ranks on one GPU."""
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        host, port = comm.bcast(_free_address() if self.rank == 0 else None, root=0)
        distributed.init_process_group(backend, init_method=f"tcp://{host}:{port}",
                                       rank=self.rank, world_size=self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, in its place."""
        distributed.all_reduce(tensor)
        return tensor

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
        distributed.destroy_process_group()


def _free_address() -> tuple[str, int]:
    """This host's name and a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostname(), int(probe.getsockname()[1])
