"""Ranks on this machine that wait to be told what they are (xrunner.rank.standby): started while it
is not known yet what they will run, since importing takes them longer than planning, and kept from
one run to the next as long as the runs take the same ranks holding the same
(`RankProgram.holds`)."""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import TimeoutExpired

from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import InputError, MissingExtraError
from xgpt.core.system.lifeline import READY
from xgpt.core.system.machine import usable_cores
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.resolve import open_layouts
from xgpt.launch.launcher import RankProgram, local_mpi_command
from xgpt.launch.leftovers import remove_leftovers
from xgpt.launch.process import Started, end, start, words_of

RUNS, MEASURES = "xrunner.rank.worker", "xprofiler.measure.worker"  # the parts that they take
PROGRAM = "xrunner.rank.standby"
_LEAVE_S = 10.0  # for ranks that are told to end
_FEW_CORES = 4  # chosen: so many ranks, of 0.2 GB each, may be started in vain


class Standby:
    """At most one set of ranks; they end by themselves when this process does."""

    def __init__(self, count: int = 0, say: Callable[[str], object] = lambda said: None) -> None:
        """Starts `count` ranks, if any. `say` is told of ranks that are kept from the run before,
        or started anew."""
        self._say = say
        self._line: socket.socket | None = None
        self._started: Started | None = None
        self._count = self._num_parts = 0
        self._held: Mapping[str, str] | None = None  # by the run before
        if count:
            # the run tells, whose ranks cannot be started either
            with suppress(InputError, MissingExtraError, OSError):
                self._start(count)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes, with all that they started, whose time is ours."""
        return () if self._started is None else (self._started.process.pid,)

    def serves(self, ranks: RankProgram) -> Started | None:
        """The processes at work as these ranks; None where they must be started by another: of
        another program, for which there is room then, or of measuring on another number of ranks
        or after a run, beside which these wait."""
        misfit = self._misfit(ranks)
        if ranks.module == MEASURES:
            if misfit is not None or self._held is not None:
                return None
        elif ranks.module != RUNS:
            self.dismiss()
            return None
        else:
            if self._held is not None:
                self._say("ranks and weights: those of the job before" if misfit is None
                          else f"ranks: started anew, for {misfit}")
            if misfit is not None:
                self.dismiss()
                self._start(ranks.count)
            self._held = ranks.holds
        assert self._line is not None
        self._num_parts += 1
        with suppress(OSError):  # they have just ended, which is seen by who watches them
            socket.send_fds(self._line, [f"{ranks.module}\0{ranks.argument}".encode()],
                            ranks.inherited)
        return self._started

    def dismiss(self) -> None:
        """Ends the ranks: in good order where they listen, so that MPI leaves nothing behind."""
        if self._line is None or self._started is None:
            return
        process, listens = self._started.process, self._num_parts or READY in words_of(self._line)
        self._line.close()  # which tells them
        if listens:
            with suppress(TimeoutExpired):
                process.wait(_LEAVE_S)
        end(process)
        self._started.messages.close()
        self._started.lifeline.close()
        self._line = self._started = self._held = None

    def _misfit(self, ranks: RankProgram) -> str | None:
        """Why the ranks that are there, if any, cannot take this part; None where they can."""
        if self._started is None or self._started.process.poll() is not None or (
                self._started.messages.closed):
            return "those of the job before have ended"
        differing = [] if self._held is None else [
            name for name, value in ranks.holds.items() if self._held.get(name) != value]
        if not differing and self._count != ranks.count:
            differing = ["number of ranks"]
        return f"the job has another {' and '.join(differing)}" if differing else None

    def _start(self, count: int) -> None:
        self._line, other_end = socket.socketpair()
        with other_end:
            descriptor = other_end.fileno()
            command = [sys.executable, "-m", PROGRAM, str(descriptor)]
            if count > 1:
                remove_leftovers()
                command = local_mpi_command(RankProgram(
                    module=PROGRAM, argument=Path(str(descriptor)), count=count))
            started = start(command, inherited=(descriptor,), count=count if count > 1 else 0)
        self._started = started._replace(line=self._line)
        self._count, self._num_parts = count, 0


@contextmanager
def standby_for(job: Job) -> Iterator[Standby | None]:
    """Ranks for the job, as long as they may be asked for; None where it takes others."""
    run = job.run
    is_ours = job.cluster == LOCAL_CLUSTER and run.engine == OWN_ENGINE and job.slurm is None
    may_serve = is_ours and not run.hosts and find_spec("torch") is not None
    standby = Standby(_likely_ranks(job)) if may_serve else None
    try:
        yield standby
    finally:
        if standby is not None:
            standby.dismiss()


def _likely_ranks(job: Job) -> int:
    """As many as the job says, if there are cores on which they could start meanwhile; of the
    layouts that it leaves open the most, where these are few."""
    if (ranks := job.run.ranks) is not None:
        return ranks if ranks <= usable_cores() else 0
    most = max((layout.ranks for layout in open_layouts(job)), default=1)
    return most if most <= _FEW_CORES else 1
