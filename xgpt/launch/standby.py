"""Ranks on this machine that are started before it is known what they will run, as their imports
take longer than planning (xrunner.rank.standby). They are kept from one run to the next while runs
need the same ranks with the same contents (`RankProgram.holds`)."""

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

RUNS, MEASURES = "xrunner.rank.worker", "xprofiler.measure.worker"  # parts that they can take
PROGRAM = "xrunner.rank.standby"
_LEAVE_S = 10.0  # chosen: for ranks to end by themselves
_FEW_CORES = 4  # chosen: so many ranks, of 0.2 GB each, may be started without being used


class Standby:
    """At most one set of waiting ranks; they end by themselves when this process does."""

    def __init__(self, count: int = 0, say: Callable[[str], object] = lambda said: None) -> None:
        """Starts `count` ranks, if any. `say`: gets a message when ranks are kept from the run
        before, or started anew."""
        self._say = say
        self._line: socket.socket | None = None
        self._started: Started | None = None
        self._count = self._num_parts = 0
        self._held: Mapping[str, str] | None = None  # by the run before
        if count:
            # the run reports the error when its ranks cannot be started either
            with suppress(InputError, MissingExtraError, OSError):
                self._start(count)

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids whose core time, with that of their children, counts as ours."""
        return () if self._started is None else (self._started.process.pid,)

    def serve(self, ranks: RankProgram) -> Started | None:
        """Lets the waiting processes work as `ranks`, and returns them. None if others must be
        started: for another program, before which these end, or for measuring on another number of
        ranks or after a run, while these wait."""
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
        with suppress(OSError):  # they have just ended, which the watch notices
            socket.send_fds(self._line, [f"{ranks.module}\0{ranks.argument}".encode()],
                            ranks.inherited)
        return self._started

    def dismiss(self) -> None:
        """Ends the ranks, in good order if they listen, so that MPI leaves nothing behind."""
        if self._line is None or self._started is None:
            return
        process, listens = self._started.process, self._num_parts or READY in words_of(self._line)
        self._line.close()  # asks them to end
        if listens:
            with suppress(TimeoutExpired):
                process.wait(_LEAVE_S)
        end(process)
        self._started.messages.close()
        self._started.lifeline.close()
        self._line = self._started = self._held = None

    def _misfit(self, ranks: RankProgram) -> str | None:
        """The reason why the waiting ranks, if any, cannot work as `ranks`; None if they can."""
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
    """Waiting ranks for the job inside the `with` block; None if it needs other ranks."""
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
    """Number of ranks to start early: the job's, if there are cores for them; else the most of the
    layouts that it allows, if these are few."""
    if (ranks := job.run.ranks) is not None:
        return ranks if ranks <= usable_cores() else 0
    most = max((layout.ranks for layout in open_layouts(job)), default=1)
    return most if most <= _FEW_CORES else 1
