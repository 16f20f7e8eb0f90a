"""Ranks that wait to be told what they are: `python -m xrunner.rank.standby N`, any rank of several
or one.

Word comes to rank 0 over the socket of descriptor N: a module and its argument, with descriptors
that are to stay open meanwhile. READY goes back from each rank before it meets the others, from
when on MPI has files that its orderly end alone removes; DONE from rank 0 after each part.
A run (`xrunner.rank.worker`) leaves its world and its weights to the next; of other modules `main`
is called. The ranks end when the socket is closed."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import os
import socket
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from xgpt.core.system.lifeline import DONE, READY
from xrunner.comm.exchange import broadcast
from xrunner.comm.point_to_point import wait_politely
from xrunner.devices import Kind, release
from xrunner.plan import load_plan
from xrunner.rank import worker
from xrunner.rank.lead import leave, to_the_end
from xrunner.rank.loading import Shelf
from xrunner.rank.world import World, connect

_MOST_BYTES, _MOST_FILES = 2**16, 16
_LOOK_S = 5e-3  # between two looks whether rank 0 has heard: others plan and measure meanwhile


def main(arguments: list[str]) -> int:
    """The ranks' exit code: that of the first part that fails."""
    shelf, worlds = Shelf(), list[World]()  # what a run leaves to the next

    def joined(kind: Kind) -> World:
        """The world, whose end is not a run's."""
        if not worlds:
            worlds.append(connect(kind))
        return worlds[0]._replace(close=lambda: None)

    with socket.socket(fileno=int(arguments[0])) as line:
        _tell(line, READY)
        ranks = _ranks()
        while True:
            module, argument, files = _hear(line, ranks)
            if not module:
                for world in worlds:
                    world.close()
                return 0
            if module == worker.__name__:
                plan = load_plan(Path(argument))
                code = to_the_end(plan, partial(joined, plan.device_kind),
                                  partial(worker.work, shelf=shelf))
            else:
                code = int(import_module(module).main([argument]))
            release()
            for file in files:  # the folder's lock, which is the next run's to take
                os.close(file)
            sys.stdout.flush()
            if code:
                return code
            if ranks is None or ranks.Get_rank() == 0:
                _tell(line, DONE)


def _tell(line: socket.socket, word: bytes) -> None:
    with suppress(OSError):  # the launcher is gone, which `_hear` finds too
        line.send(word)


def _hear(line: socket.socket, ranks: Any) -> tuple[str, str, list[int]]:
    """(module, or "" where there is no more to do; argument; descriptors, on rank 0)"""
    word, files = b"", list[int]()
    if ranks is None or ranks.Get_rank() == 0:
        with suppress(ConnectionError):  # the launcher is gone
            word, files, *_ = socket.recv_fds(line, _MOST_BYTES, _MOST_FILES)
    text = word.decode()
    if ranks is not None:
        request = ranks.Ibarrier()
        wait_politely(lambda: bool(request.Test()), _LOOK_S)
        text = broadcast(ranks, text, str)
    module, _, argument = text.partition("\0")
    return module, argument, files


def _ranks() -> Any:
    """All ranks, by mpi4py; None where they were started without it."""
    if "mpi4py" not in sys.modules:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
