"""What ranks of test_exact_runs.py and of GPUs run: checks by arithmetic, on all ranks alike, for
every size of group up to all of them. Pickles are refused.
Usage: ranks_script.py mpi|gloo|nccl ..."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import pickle
import sys

import torch
from mpi4py import MPI

from xgpt.core.system.lifeline import finish_imports
from xrunner.comm.collective import MpiGroup, TorchGroup
from xrunner.comm.exchange import ForeignMessage, all_gather, broadcast, gather
from xrunner.comm.messages import TokensMessage
from xrunner.comm.point_to_point import MpiComm
from xrunner.devices import CPU, has_own_gpu_each, local_rank, select_device


def check_messages(world: MPI.Comm) -> None:
    """What the ranks say to each other, and what a program that is none of ours might."""
    rank, size = world.Get_rank(), world.Get_size()
    assert all_gather(world, (rank, "x" * rank), tuple[int, str]) == [
        (other, "x" * other) for other in range(size)]
    assert gather(world, float(rank), float) == (
        [float(other) for other in range(size)] if rank == 0 else None)
    assert broadcast(world, "of the first" if rank == 0 else None, str) == "of the first"
    comm, tag_header, tag_tensor = MpiComm(world), 1, 2
    if rank == 1:
        comm.send(0, TokensMessage(group=3), torch.arange(6).view(2, 3))
        for header in (pickle.dumps(TokensMessage(group=3)),
                       b'TokensMessage [[{"group":"3"},null]]',
                       b'Other [[{"group":3},null]]',
                       b'TokensMessage [[{"group":3},[[-1],"int64"]]]'):
            world.Send(bytearray(header), dest=0, tag=tag_header)
        # announces a terabyte, and sends one number
        world.Send(bytearray(b'TokensMessage [[{"group":3},[[137438953472],"int64"]]]'), dest=0,
                   tag=tag_header)
        world.Send(bytearray(8), dest=0, tag=tag_tensor)
    if rank == 0:
        message, tensor = comm.receive(1)
        assert message == TokensMessage(group=3)
        assert tensor is not None and tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
        for _ in range(5):
            try:
                raise AssertionError(f"taken: {comm.receive(1)}")
            except ForeignMessage as cause:
                print(f"refused: {cause}", flush=True)
    comm.flush()
    world.Barrier()


def refuse(*anything: object) -> bytes:
    raise AssertionError(f"a pickle between ranks: {anything}")


MPI.pickle.__init__(refuse, refuse)


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
            bits = all_gather(world, total.float().numpy().tobytes().hex(), str)
            assert len(set(bits)) == 1, f"ranks disagree: {dtype = } {shape = }"


def check(world: MPI.Comm, over: str) -> None:
    if over == "mpi":
        check_messages(world)
        check_sums(world, MpiGroup(world), (torch.float32, torch.bfloat16, torch.float16))
        # a group of one, beside others that have work
        own = world.Split(world.Get_rank(), 0)
        tensor = torch.ones(3)
        assert MpiGroup(own).all_reduce(tensor) is tensor
    elif over == "nccl":
        device = select_device("gpu", local_rank(world))
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


def check_sizes(world: MPI.Comm, over: str, most: int) -> None:
    """Groups of up to so many of the ranks."""
    for size in range(min(2, most), most + 1):
        takes_part = world.Get_rank() < size
        comm = world.Split(int(takes_part), world.Get_rank())
        if takes_part:
            check(comm, over)
        world.Barrier()


if __name__ == "__main__":
    finish_imports()
    for way in sys.argv[1:]:
        check_sizes(MPI.COMM_WORLD, way, MPI.COMM_WORLD.Get_size())
