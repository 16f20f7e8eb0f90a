"""A rank that is started before it is known what it is to run. Importing takes it longer than it
takes to plan for it; where several ranks are wanted they are its forks, and where it turns out not
to be wanted, it is let go of. What a first run measures beforehand on one rank, it measures too."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from xgpt.core.engines import OWN_ENGINE
from xgpt.core.job import Job
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import local_mpi_command
from xgpt.launch.process import Started, start

SERVES = "xrunner.worker"  # whose part it takes, alone in its run
PROGRAM = "xrunner.standby"
# whose part it may take before
MEASURES = frozenset({"xprofiler.measure.worker", "xprofiler.measure.calibrate"})
# word of a run may come while it reads ahead, and of several ranks at once
_READS = _FORKS = sys.platform == "linux"
_KEEPS_WORDS_APART = socket.SOCK_SEQPACKET if _READS else socket.SOCK_STREAM
AHEAD, _MOST_WORD = "xrunner.ahead", 2**15
_LEAVE_S = 10.0  # for one whose forks have ended


class Standby:
    """A process that waits for its run. It ends by itself when this one does."""

    def __init__(self, program: str = PROGRAM) -> None:
        self._line, other_end = socket.socketpair(socket.AF_UNIX, _KEEPS_WORDS_APART)
        with other_end:
            self._started = start([sys.executable, "-m", program], stdin=other_end.fileno())
        self._is_free, self._has_forks, self._has_measured = True, False, False

    @property
    def processes(self) -> tuple[int, ...]:
        """Those whose time is ours."""
        return (self.process.pid,)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._started.process

    @property
    def is_usual(self) -> bool:
        """Unless it has measured, and may have threads without which it cannot be forked."""
        return not self._has_measured

    def serves(self, ranks: RankProgram) -> Started | None:
        """The process at work as these ranks, or its forks; None where they must be started, for
        whom it makes room, unless they measure: it waits for its run beside those."""
        if ranks.module == SERVES:
            if ranks.count == 1:
                return self.serve(ranks.argument, ranks.inherited)
            if (started := self._fork(ranks)) is not None:
                return started
        if ranks.module in MEASURES:
            return self.measure(ranks.module, ranks.argument) if ranks.count == 1 else None
        self.dismiss()
        return None

    def serve(self, argument: Path, inherited: tuple[int, ...]) -> Started | None:
        """The process, which from now on works as `python -m xrunner.worker ARGUMENT` and keeps
        the descriptors `inherited` open; None where it has ended, or has served before."""
        if not self._hears(str(argument), inherited):
            return None
        self._is_free = False
        return self._started

    def _fork(self, ranks: RankProgram) -> Started | None:
        """mpiexec at work with stand-ins, which ask this process for the ranks; None where it has
        ended, or has served before."""
        if not (_FORKS and self._is_free) or self.process.poll() is not None:
            return None
        self._is_free, self._has_forks = False, True
        line = self._line.fileno()
        return start(local_mpi_command(ranks, line), inherited=(*ranks.inherited, line),
                     count=ranks.count)

    def read_ahead(self, word: str) -> None:
        """The process reads weights (xrunner.read_ahead), before whatever else it is told."""
        if _READS and len(word) < _MOST_WORD:
            self._hears(f"{AHEAD}\0{word}", ())

    def measure(self, module: str, argument: Path) -> Started | None:
        """The process, which now works as `python -m MODULE ARGUMENT`, and then waits for its run;
        None as of `serve`."""
        told = self._has_measured = self._hears(f"{module}\0{argument}", ())
        return self._started._replace(line=self._line) if told else None

    def _hears(self, word: str, inherited: tuple[int, ...]) -> bool:
        """Whether it is told so: neither has it ended, nor has it a run."""
        if not self._is_free or self.process.poll() is not None:
            return False
        try:
            socket.send_fds(self._line, [word.encode()], inherited)
        except OSError:
            return False
        return True

    def dismiss(self) -> None:
        """Ends the process, unless it serves."""
        self._line.close()
        if self._has_forks:
            self._has_forks = False
            self._await_end()
        elif self._is_free:
            self._is_free = False
            self.process.kill()
            self.process.wait()
        else:
            return  # whose messages are of the ranks
        self._started.messages.close()

    def _await_end(self) -> None:
        """It ends when its forks have, which mpiexec's end ends."""
        try:
            self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def standby_for(job: Job) -> Iterator[Standby | None]:
    """A rank for the job, as long as it may be asked for; None where the ranks will be of another
    kind, or are known to be several that it cannot fork: of GPUs."""
    run = job.run
    is_ours = job.cluster == LOCAL_CLUSTER and run.engine == OWN_ENGINE and job.slurm is None
    may_serve = not run.hosts and (run.ranks in (None, 1) or (
        _FORKS and shutil.which("nvidia-smi") is None))
    has_torch = find_spec("torch") is not None
    standby = Standby() if is_ours and may_serve and has_torch else None
    try:
        yield standby
    finally:
        if standby is not None:
            standby.dismiss()
