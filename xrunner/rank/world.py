"""The ranks of a run, as its launcher started them, and the replicas that they form."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch

from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Estimate
from xrunner.comm.collective import Group, MpiGroup, TorchGroup
from xrunner.comm.exchange import all_gather, gather
from xrunner.comm.handover import LOOK_S
from xrunner.comm.point_to_point import Comm, MpiComm, local_comms, wait_politely
from xrunner.devices import CPU, Kind, has_own_gpu_each, local_rank, select_device
from xrunner.engine.pipeline import RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica of the deployment. `estimate`: its own configuration, with its ranks' numbers in
    the run. `first_stage`: number of its first stage over all replicas. `shape`: number of its
    shape in the schedule."""

    number: int
    estimate: Estimate
    first_stage: int
    shape: int = 0

    @property
    def own(self) -> Deployment:
        return self.estimate.deployment

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.own.pools

    @property
    def head(self) -> int:
        """First rank of its first pool, which decides."""
        return self.pools[0].stages[0].ranks[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for pool in self.pools for stage in pool.stages for rank in stage.ranks)


def replicas_of(estimate: Estimate, *, rank_each: bool = False) -> tuple[Replica, ...]:
    """All replicas, in the order of their ranks. `rank_each`: a rank executes all of a replica, by
    another engine, on all its devices."""
    found, first_rank, first_stage = list[Replica](), 0, 0
    for place, shape in enumerate(estimate.shapes):
        one, deployment = shape.one_copy, shape.deployment
        for copy in range(deployment.replicas):
            pools = deployment.pools_of(copy, first_rank=first_rank)
            if rank_each:
                pools = tuple(replace(pool, stages=(replace(
                    pool.stages[0], ranks=(len(found),)),)) for pool in pools)
            found.append(Replica(
                number=len(found), first_stage=first_stage, shape=place, estimate=replace(
                    one, deployment=replace(one.deployment, pools=pools))))
            first_stage += len(pools) if rank_each else len(deployment.stages)
        first_rank += deployment.num_devices
    return tuple(found)


class World(NamedTuple):
    """The ranks of this run, and their collective operations."""

    comm: Comm
    barrier: Callable[[], None]
    gather: Callable[[RankReport], list[RankReport] | None]  # to rank 0
    abort: Callable[[int], None]
    split: Callable[[int, int], Group]  # (group, place in it): the ranks of one group; collective
    duplicate: Callable[[], Comm]  # the same ranks with messages of their own; collective
    device: torch.device = CPU  # this rank's
    has_own_gpus: bool = True  # no two ranks share one
    close: Callable[[], None] = lambda: None  # at an orderly end; collective
    # words of every rank, on every rank; collective
    share: Callable[[str], list[str]] = lambda words: [words]


def connect(kind: Kind = "cpu") -> World:
    """Connects all ranks of the launcher, each on its device. A single rank without launcher needs
    no MPI. Raises XgptError if there is no such device."""
    if "mpi4py" not in sys.modules:
        return World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                     abort=lambda code: None, split=_alone, duplicate=_alone,
                     device=select_device(kind, 0))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    device = select_device(kind, local_rank(world))
    is_direct, groups = has_own_gpu_each(world, device), list[Group]()

    def barrier() -> None:
        # rank 0 may tokenise for minutes; a blocking call would spin on the others
        request = world.Ibarrier()
        wait_politely(lambda: bool(request.Test()))

    def duplicate() -> Comm:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise XgptError("this MPI library was built without support for threads "
                            "(MPI_THREAD_MULTIPLE), which WAA's handover needs: use another, or "
                            "`schedule: {policy: rra}`")
        return MpiComm(world.Dup(), LOOK_S)

    def split(group: int, place: int) -> Group:
        groups.append(group_of(world.Split(group, place), is_direct=is_direct))
        return groups[-1]

    def close() -> None:
        for group in groups:
            if isinstance(group, TorchGroup):
                group.close()

    return World(MpiComm(world), barrier=barrier, abort=world.Abort,
                 gather=lambda report: gather(world, report, RankReport),
                 split=split, duplicate=duplicate, device=device,
                 share=lambda words: all_gather(world, words, str), has_own_gpus=is_direct,
                 close=close)


def group_of(comm: Any, *, is_direct: bool) -> Group:
    """A group of the ranks of `comm`. Collective. Over NCCL if every rank of the run has a GPU of
    its own (`is_direct`), else over MPI and host memory."""
    if is_direct and comm.Get_size() > 1:
        return TorchGroup(comm, "nccl")
    return MpiGroup(comm)


def _alone(*of: object) -> NoReturn:
    raise AssertionError(f"{of = }: a rank alone is in no group, and both pools' only one")
