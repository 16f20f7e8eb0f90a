"""Ranks that wait for work: `python -m xrunner.rank.standby N`, on one rank or several.

Rank 0 reads from the socket with descriptor N: a module and its argument, with descriptors that are
to stay open meanwhile. Each rank writes READY before it meets the others (from then on MPI has
files that only an orderly end removes). Rank 0 writes DONE after each part. A run
(`xrunner.rank.worker`) leaves its world and weights to the next; of other modules `main` is called.
The ranks end when the socket is closed."""

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
from xrunner.rank.lifecycle import end_process, run_rank
from xrunner.rank.loading import KeptWeights, load
from xrunner.rank.world import World, connect

_MOST_BYTES, _MOST_FILES = 2**16, 16  # chosen
_LOOK_S = 5e-3  # chosen: seconds between polls of idle ranks, beside which others plan


def main(arguments: list[str]) -> int:
    """Executes parts until the socket is closed; returns the exit code of the first that fails."""
    kept_weights, worlds = KeptWeights(), list[World]()  # kept from one run to the next

    def joined(kind: Kind) -> World:
        """The world; closing it is not up to a run."""
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
                code = run_rank(plan, partial(joined, plan.device_kind),
                                  partial(worker.work, load=partial(
                                      load, kept_weights=kept_weights)))
            else:
                code = int(import_module(module).main([argument]))
            release()
            for file in files:  # the folder's lock, which the next run takes
                os.close(file)
            sys.stdout.flush()
            if code:
                return code
            if ranks is None or ranks.Get_rank() == 0:
                _tell(line, DONE)


def _tell(line: socket.socket, word: bytes) -> None:
    with suppress(OSError):  # the launcher is gone, as `_hear` will find
        line.send(word)


def _hear(line: socket.socket, ranks: Any) -> tuple[str, str, list[int]]:
    """(module, "" at the end; argument; descriptors on rank 0)."""
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
    """All ranks as an mpi4py communicator; None without mpi4py."""
    if "mpi4py" not in sys.modules:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
