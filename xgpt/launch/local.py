"""Ranks on this machine: `mpiexec -n N python -m mpi4py -m MODULE`."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from xgpt.core.errors import MissingExtraError
from xgpt.launch.launcher import RankProgram
from xgpt.launch.process import Started, start, watch_to_end
from xgpt.launch.standby import SERVES


class LocalLauncher:
    """Starts ranks on this machine; a single one needs no MPI."""

    is_here = True

    def command(self, ranks: RankProgram) -> list[str]:
        if ranks.count == 1:
            return [sys.executable, "-m", ranks.module, str(ranks.argument)]
        return mpi_command(ranks)

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        started = _serving(ranks) or start(self.command(ranks), inherited=ranks.inherited)
        watch_to_end(started, watch=watch, ask_to_stop=ask_to_stop)


def _serving(ranks: RankProgram) -> Started | None:
    """The process started ahead, where it can serve; where not, it makes room."""
    if ranks.standby is None:
        return None
    if ranks.count == 1 and ranks.module == SERVES:
        return ranks.standby.serve(ranks.argument, ranks.inherited)
    ranks.standby.dismiss()
    return None


def mpi_command(ranks: RankProgram, options: Sequence[str] = ()) -> list[str]:
    """The command that starts the ranks through mpiexec, which gets these options too."""
    # `-m mpi4py` aborts every rank when one fails; without it the others would wait for ever
    return [find_mpiexec(), *options, "-n", str(ranks.count), sys.executable, "-m", "mpi4py", "-m",
            ranks.module, str(ranks.argument)]


def find_mpiexec() -> str:
    """mpiexec of this environment before any other on the PATH: it belongs to mpi4py's library."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if path is None:
        raise MissingExtraError("mpich", "run", "running more than one rank")
    return path
