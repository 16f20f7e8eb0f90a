"""Ranks on this machine: `mpiexec -n N python -m mpi4py -m MODULE`, in a network namespace of its
own where the system permits one (xgpt.launch.isolated)."""

import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from xgpt.core.errors import MissingExtraError, wrong
from xgpt.launch.launcher import RankProgram
from xgpt.launch.leftovers import remove_leftovers
from xgpt.launch.process import start, watch_to_end

_HERE, _PROXY = ("-launcher", "fork", "-rmk", "user"), "hydra_pmi_proxy"
_MOST_NAME = 63  # characters of a host's name, of which the system takes one more


class LocalLauncher:
    """Starts ranks on this machine; a single one needs no MPI."""

    is_here = True

    def command(self, ranks: RankProgram) -> list[str]:
        if ranks.command:
            assert ranks.count == 1, f"{ranks = }"
            return [*ranks.command]
        if ranks.count == 1:
            return [sys.executable, "-m", ranks.module, str(ranks.argument)]
        return local_mpi_command(ranks)

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        if ranks.count > 1:
            remove_leftovers()
        started = None if ranks.standby is None else ranks.standby.serves(ranks)
        watch_to_end(started or start(self.command(ranks), inherited=ranks.inherited,
                                      count=ranks.count if ranks.count > 1 else 0),
                     watch=watch, ask_to_stop=ask_to_stop)


def mpi_command(ranks: RankProgram, options: Sequence[str] = ()) -> list[str]:
    """The command that starts the ranks through mpiexec, which gets these options too."""
    # `-m mpi4py` aborts every rank when one fails; without it the others would wait for ever
    return [find_mpiexec(), *options, "-n", str(ranks.count), sys.executable, "-m", "mpi4py", "-m",
            ranks.module, str(ranks.argument)]


def local_mpi_command(ranks: RankProgram) -> list[str]:
    """The same for ranks that nobody beyond this machine is to reach."""
    refuse_long_name()
    # whatever resource manager it finds traces of; another MPI's mpiexec has no such options
    is_hydra = Path(find_mpiexec()).resolve().with_name(_PROXY).exists()
    # by the standard library alone: site-packages would take longer than the command
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("isolated.py")),
            *mpi_command(ranks, _HERE if is_hydra else ())]


def refuse_long_name() -> None:
    """Raises InputError on a machine whose name MPICH cannot hold: its ranks end as they begin."""
    if len(name := socket.gethostname()) > _MOST_NAME:
        raise wrong("this machine", "host name", name, f"at most {_MOST_NAME} characters, which is "
                    "what MPI's ranks can have (`run: {ranks: 1}` needs none)")


def find_mpiexec() -> str:
    """mpiexec of this environment before any other on the PATH: it belongs to mpi4py's library."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if path is None:
        raise MissingExtraError("mpich", "run", "running more than one rank")
    return path
