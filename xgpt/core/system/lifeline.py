"""The tie between ranks and the process that started them: a pipe that nobody writes to. Its end
comes when that process ends, however it ends, and then the ranks end themselves: nobody would take
up what they do, and they would keep the output folder's lock.

It holds on one machine. On others a rank ends with the process there that started it, which MPI's
and Slurm's own launchers see to."""

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
_MPI = "mpi4py.MPI"  # whose import is the meeting
# how a rank is told which it is: by MPICH and Intel MPI, Open MPI, Slurm
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
READY, DONE = b"r", b"."  # what ranks that wait for their parts (xrunner/rank/standby.py) say
EXIT_ORPHANED = 86  # of a rank whose launcher is gone


class Lifeline:
    """The launcher's end. `end` is the ranks', which they inherit; `name` tells them of it."""

    def __init__(self) -> None:
        self.end, self._held = os.pipe()  # which no child inherits unless it is told to
        self.name = {NAME: f"{self.end}:{os.fstat(self.end).st_ino}"}

    def is_handed_on(self) -> None:
        """The ranks have theirs."""
        os.close(self.end)
        self.end = -1

    def close(self) -> None:
        """Ends the ranks that are left."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


def begin_rank() -> None:
    """For a rank, before anything else: what follows is imports. Among thousands of modules that
    stay the collector finds nothing, in a fifth of the time that importing torch takes."""
    end_with_launcher()
    sys.excepthook = _end_unmet
    gc.disable()


def _end_unmet(kind: type[BaseException], error: BaseException,
               trace: TracebackType | None) -> None:
    """What a rank says that fails before it has met the others. MPICH's mpiexec does not hear of
    its end then, and the others would wait for it."""
    # once all is imported (all_imported) the others may be a fault of ours
    told = ImportError if gc.isenabled() else (ImportError, OSError, MemoryError)
    if not isinstance(error, told):
        sys.__excepthook__(kind, error, trace)
    else:
        text = f"{name_of_rank()} cannot start: {kind.__name__}: {error}"
        print(visible(f"xgpt: {text}"), file=sys.stderr, flush=True)
    end_unmet()


def name_of_rank() -> str:
    """Before the ranks have met: as who started this one told it."""
    number = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    return f"{'the rank' if number is None else f'rank {number}'} on {socket.gethostname()}"


def end_unmet() -> None:
    """Ends this rank by a signal, of which mpiexec hears, if it is one of several that have not
    met."""
    is_of_several = "mpi4py" in sys.modules and any(name in os.environ for name in _RANKS)
    if is_of_several and _MPI not in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def all_imported() -> None:
    """The collector is back, and leaves alone what is there: neither it nor the interpreter's end
    goes through it again."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def end_with_launcher() -> None:
    """From now on this process ends with its launcher, though it hangs in a library,
    and with the process that started it, though it is stopped."""
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
    """Whether the descriptor is that pipe: on another host the number may be of something else."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


# resource managers' names; those of hydra (but for a user's own words to it), PMI, Open MPI,
# MVAPICH and torchrun; whole names
_THEIRS = re.compile(
    r"(SLURM|SRUN_|PBS_|LSB_|LSF_|EGO_|JSM_|SGE_|COBALT_|LOADL|MP_|FLUX_|ALPS_|PALS_|OAR_|PJM_|"
    r"_CONDOR_|MOAB_|HYDRA_(?!(IFACE|BINDING|MAPPING|MEMBIND|TOPOLIB|DEBUG)$)|HYDI_|MPIEXEC_|PMI2?_|"
    r"I_MPI_(HYDRA_|JOB_|PMI|PERHOST|PROCESS_MANAGER)|PMIX_|MPI_LOCAL|OMPI_|OPAL_|ORTE_|PRR?TE_|"
    r"MV2_|MVP_|MPIRUN_|MPISPAWN_|TORCHELASTIC_|ACCELERATE_|GROUP_|ROLE_|CROSS_|"
    r"(PE_HOSTFILE|JOB_ID|NSLOTS|NHOSTS|NQUEUES|LS_(EXEC_T|JOBPID|SUBCWD)|((LOCAL_|NODE_)?RANK)|"
    r"(LOCAL_)?WORLD_SIZE|LOCAL_SIZE|MASTER_(ADDR|PORT))$)")


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that this machine alone starts: without what MPI and mpiexec would
    take them for parts of an allocation by, or of another run."""
    return {name: value for name, value in environment.items() if not _THEIRS.match(name)}
