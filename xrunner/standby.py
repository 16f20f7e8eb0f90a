"""Ranks started ahead, which import what `python -m xrunner.worker` does, and then wait to be told
of their run: its run.json, and the descriptors that they are to keep open meanwhile.

`python -m xrunner.standby` is a rank alone, for one run; word comes over the socket that is its
standard input. It may be told before to take another program's part, "MODULE\\0ARGUMENT", after
which a byte goes back, and to read weights ahead (xrunner.ahead), of which it says nothing.
`... xrunner.standby N` is any rank of several or one, for run after run: word comes to rank 0 over
the socket of descriptor N, and after each run a byte goes back. World and weights stay. They end
when the socket is closed."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.lifeline import begin_rank

    begin_rank()

import os
import socket
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from xrunner import ahead, forks, worker
from xrunner.devices import release
from xrunner.loading import Shelf
from xrunner.plan import load_plan
from xrunner.rank import leave, to_the_end
from xrunner.transport.comm import wait_politely
from xrunner.transport.exchange import broadcast
from xrunner.world import World, connect

_MOST_BYTES, _MOST_FILES = 2**16, 16
DONE = b"."


def main(arguments: list[str]) -> int:
    if arguments:
        return _run_after_run(int(arguments[0]))
    shelf, num_threads = Shelf(), len(os.listdir("/proc/self/task"))
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as line:
        while True:
            word, files, *_ = socket.recv_fds(line, forks.MOST_BYTES, forks.MOST_FILES)
            module, _, argument = word.decode().rpartition("\0")
            if not argument:  # it is not wanted
                return 0
            if not module:
                return worker.main([argument], shelf)
            if module == forks.NAME:
                return forks.Forks(line, shelf, num_threads).serve(argument, files)
            if module == ahead.__name__:
                ahead.read(argument, shelf)
                continue
            if code := import_module(module).main([argument]):
                return int(code)
            sys.stdout.flush()
            line.send(DONE)


def _run_after_run(descriptor: int) -> int:
    ranks, shelf, world = _ranks(), Shelf(), None
    with socket.socket(fileno=descriptor) as line:
        while True:
            argument, files = _hear(line, ranks)
            if argument is None:
                if world is not None:
                    world.close()
                return 0
            plan = load_plan(Path(argument))
            world = world or connect(plan.device_kind)
            code = to_the_end(plan, partial(_stay, world), partial(worker.work, shelf=shelf))
            release()
            for file in files:  # the folder's lock, which is the next run's to take
                os.close(file)
            sys.stdout.flush()
            if code:
                return code
            if world.comm.rank == 0:
                line.send(DONE)


def _stay(world: World) -> World:
    """The world of a run, whose end is not its end."""
    return world._replace(close=lambda: None)


def _hear(line: socket.socket, ranks: Any) -> tuple[str | None, list[int]]:
    """(the next run's run.json, None where there is none; descriptors, on rank 0)"""
    word, files = b"", list[int]()
    if ranks is None or ranks.Get_rank() == 0:
        try:
            word, files, *_ = socket.recv_fds(line, _MOST_BYTES, _MOST_FILES)
        except ConnectionError:  # the launcher is gone
            word = b""
    if ranks is not None:
        request = ranks.Ibarrier()
        wait_politely(lambda: bool(request.Test()))
        return broadcast(ranks, word.decode(), str) or None, files
    return word.decode() or None, files


def _ranks() -> Any:
    """All ranks, by mpi4py; None where they were started without it."""
    if "mpi4py" not in sys.modules:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
