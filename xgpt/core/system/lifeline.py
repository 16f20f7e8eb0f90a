"""A pipe between the launcher and its ranks that nobody writes to. It closes when the launcher
ends, however it ends, and then the ranks end themselves: nobody would use their results, and they
would keep the output folder's lock.

It works on one machine. On others MPI's and Slurm's own launchers end a rank with the process there
that started it."""

import ctypes
import gc
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from xgpt.core.errors import visible

NAME = "XGPT_LIFELINE"  # descriptor:inode, in a rank's environment
_PR_SET_PDEATHSIG = 1
_MPI = "mpi4py.MPI"  # ranks connect when they import it
# variables with a rank's number: of MPICH and Intel MPI, Open MPI, Slurm
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
READY, DONE = b"r", b"."  # messages of ranks that wait for their parts (xrunner/rank/standby.py)
EXIT_ORPHANED = 86  # of a rank whose launcher is gone


class Lifeline:
    """The launcher's end of the pipe. `end`: descriptor that the ranks inherit. `name`: environment
    variable that names it to them."""

    def __init__(self) -> None:
        self.end, self._held = os.pipe()  # no child inherits it unless told to
        self.name = {NAME: f"{self.end}:{os.fstat(self.end).st_ino}"}

    def close_ranks_end(self) -> None:
        """Closes the launcher's copy of the ranks' end, once they have inherited it."""
        os.close(self.end)
        self.end = -1

    def close(self) -> None:
        """Closes the pipe, which ends the ranks that are left."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


def begin_rank() -> None:
    """Prepares a rank's process, before it imports anything else. Garbage collection is off while
    it imports: it finds nothing, in a fifth of the time of importing torch."""
    end_with_launcher()
    sys.excepthook = _end_unconnected
    gc.disable()


def _end_unconnected(kind: type[BaseException], error: BaseException,
                     trace: TracebackType | None) -> None:
    """Prints the error of a rank that fails before it is connected, and ends it by a signal:
    MPICH's mpiexec does not notice otherwise, and the other ranks would wait."""
    # after finish_imports an OSError or MemoryError may be a fault of ours
    expected = ImportError if gc.isenabled() else (ImportError, OSError, MemoryError)
    if not isinstance(error, expected):
        sys.__excepthook__(kind, error, trace)
    else:
        text = f"{name_of_rank()} cannot start: {kind.__name__}: {error}"
        print(visible(f"xgpt: {text}"), file=sys.stderr, flush=True)
    end_if_unconnected()


def name_of_rank() -> str:
    """This rank's number and host in words, from the launcher's environment variables."""
    number = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    return f"{'the rank' if number is None else f'rank {number}'} on {socket.gethostname()}"


def end_if_unconnected() -> None:
    """Ends this rank by a signal, which mpiexec notices, if it is one of several and not yet
    connected to them."""
    is_of_several = "mpi4py" in sys.modules and any(name in os.environ for name in _RANKS)
    if is_of_several and _MPI not in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def finish_imports() -> None:
    """Turns garbage collection back on, without the objects that exist so far."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def end_with_launcher() -> None:
    """Makes this process end with its launcher, even if it hangs in a library, and with the process
    that started it, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor, _, inode = os.environ.pop(NAME, "").partition(":")
    if not inode or not _is_pipe(int(descriptor), int(inode)):
        return  # on another host than the launcher, or under Slurm's
    end = int(descriptor)
    os.set_inheritable(end, False)

    def await_end() -> None:
        while os.read(end, 1):
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=await_end, name="lifeline", daemon=True).start()


def _is_pipe(descriptor: int, inode: int) -> bool:
    """Whether the descriptor is the pipe with this inode; on another host it may be another."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


# environment variables of resource managers; of hydra (without a user's own options), PMI, Open
# MPI, MVAPICH and torchrun; then whole names
_THEIRS = re.compile(
    r"(SLURM|SRUN_|PBS_|LSB_|LSF_|EGO_|JSM_|SGE_|COBALT_|LOADL|MP_|FLUX_|ALPS_|PALS_|OAR_|PJM_|"
    r"_CONDOR_|MOAB_|HYDRA_(?!(IFACE|BINDING|MAPPING|MEMBIND|TOPOLIB|DEBUG)$)|HYDI_|MPIEXEC_|PMI2?_|"
    r"I_MPI_(HYDRA_|JOB_|PMI|PERHOST|PROCESS_MANAGER)|PMIX_|MPI_LOCAL|OMPI_|OPAL_|ORTE_|PRR?TE_|"
    r"MV2_|MVP_|MPIRUN_|MPISPAWN_|TORCHELASTIC_|ACCELERATE_|GROUP_|ROLE_|CROSS_|"
    r"(PE_HOSTFILE|JOB_ID|NSLOTS|NHOSTS|NQUEUES|LS_(EXEC_T|JOBPID|SUBCWD)|((LOCAL_|NODE_)?RANK)|"
    r"(LOCAL_)?WORLD_SIZE|LOCAL_SIZE|MASTER_(ADDR|PORT))$)")


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that this machine starts alone, without variables by which MPI and
    mpiexec would take them for parts of an allocation or of another run."""
    return {name: value for name, value in environment.items() if not _THEIRS.match(name)}
