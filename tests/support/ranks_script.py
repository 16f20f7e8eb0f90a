"""What every rank of test_rank_messages.py runs: checks by arithmetic, on all ranks alike, for
every size of group up to all of them. Usage: ranks_script.py mpi|gloo|nccl ..."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from xrunner.devices import CPU, has_own_gpu_each, local_rank, own_device
from xrunner.transport.collective import MpiGroup, TorchGroup


def check_sums(world: MPI.Comm, group: MpiGroup | TorchGroup, dtypes: tuple[torch.dtype, ...],
               device: torch.device = CPU) -> None:
    for dtype in dtypes:
        # below and above the size from which a sum is scattered, and no multiple of the ranks
        for shape in ((1,), (3, 7), (5, 3001), (40, 1000)):
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
                     for rank in range(world.Get_size())]
            expected = sum((p.float() for p in parts[1:]), parts[0].float()).to(dtype)
            mine = parts[world.Get_rank()].clone().to(device)
            total = group.all_reduce(mine).cpu()
            assert total.shape == expected.shape and total.dtype == dtype
            if isinstance(group, MpiGroup):
                assert torch.equal(total, expected), f"{dtype = } {shape = }"
                assert torch.equal(mine, parts[world.Get_rank()]), "the input is left alone"
            else:
                assert torch.allclose(total, expected, atol=1e-5)
            gathered = group.gather(parts[world.Get_rank()].to(device))
            if world.Get_rank() == 0:
                assert gathered is not None and torch.equal(gathered.cpu(), torch.stack(parts))
            else:
                assert gathered is None
            bits = world.allgather(total.float().numpy().tobytes())
            assert len(set(bits)) == 1, f"ranks disagree: {dtype = } {shape = }"


def check(world: MPI.Comm, over: str) -> None:
    if over == "mpi":
        check_sums(world, MpiGroup(world), (torch.float32, torch.bfloat16, torch.float16))
        # a group of one, beside others that have work
        own = world.Split(world.Get_rank(), 0)
        tensor = torch.ones(3)
        assert MpiGroup(own).all_reduce(tensor) is tensor
    elif over == "nccl":
        device = own_device("gpu", local_rank(world))
        assert has_own_gpu_each(world, device)
        group = TorchGroup(world, "nccl")
        check_sums(world, group, (torch.float32,), device)
        group.close()
    else:
        group = TorchGroup(world, "gloo")
        check_sums(world, group, (torch.float32,))
        block = torch.arange(6.0)
        if group.rank == 0:
            group.send(1, block)
        elif group.rank == 1:
            into = torch.zeros(6)
            group.receive(0, into)
            assert torch.equal(into, block)
        group.close()
    print(f"{over} over {world.Get_size()} ok", flush=True)


def main() -> None:
    world = MPI.COMM_WORLD
    for over in sys.argv[1:]:
        for size in range(min(2, world.Get_size()), world.Get_size() + 1):
            takes_part = world.Get_rank() < size
            comm = world.Split(int(takes_part), world.Get_rank())
            if takes_part:
                check(comm, over)
            world.Barrier()


main()
