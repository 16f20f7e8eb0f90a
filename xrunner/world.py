"""The ranks of a run, as its launcher started them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from xgpt.errors import XgptError
from xrunner.collective import Group, MpiGroup
from xrunner.comm import Comm, MpiComm, local_comms, wait_politely
from xrunner.courier import LOOK_S
from xrunner.pipeline import RankReport


class World(NamedTuple):
    """The ranks of this run, and what they do together."""

    comm: Comm
    barrier: Callable[[], None]
    gather: Callable[[RankReport], list[RankReport] | None]  # to rank 0
    abort: Callable[[int], None]
    split: Callable[[int, int], Group]  # (group, place in it): the ranks of one group; collective
    duplicate: Callable[[], Comm]  # the same ranks, messages of their own; collective


def connect() -> World:
    """All ranks of the launcher; a single rank started without one needs no MPI."""
    if "mpi4py" not in sys.modules:
        return World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                     abort=lambda code: None, split=_no_group, duplicate=_no_duplicate)
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def barrier() -> None:
        # rank 0 may tokenise for minutes: the others must not spin in a blocking call meanwhile
        request = world.Ibarrier()
        wait_politely(lambda: bool(request.Test()))

    def duplicate() -> Comm:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise XgptError("this MPI library was built without support for threads "
                            "(MPI_THREAD_MULTIPLE), which WAA's handover needs: use another, or "
                            "`schedule: {policy: rra}`")
        return MpiComm(world.Dup(), LOOK_S)

    return World(MpiComm(world), barrier=barrier, abort=world.Abort,
                 gather=lambda report: world.gather(report, root=0),
                 split=lambda group, place: MpiGroup(world.Split(group, place)),
                 duplicate=duplicate)


def _no_group(group: int, place: int) -> Group:
    raise AssertionError(f"{group = } {place = }: a rank alone is in no group")


def _no_duplicate() -> Comm:
    raise AssertionError("a rank alone is both pools' only one")
