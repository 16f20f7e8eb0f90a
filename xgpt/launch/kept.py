"""Ranks that stay from one run to the next, with their world and their weights, as long as the runs
take the same ranks holding the same (`RankProgram.holds`)."""

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import local_mpi_command
from xgpt.launch.process import Started, start
from xgpt.launch.standby import MEASURES, PROGRAM, SERVES

_LEAVE_S = 10.0  # for ranks that are told to end


class KeptRanks:
    """At most one set of ranks on this machine; they end by themselves when this process does."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """`say` is told of ranks that are kept or started anew."""
        self._say = say
        self._line: socket.socket | None = None
        self._started: Started | None = None
        self._held: Mapping[str, str] = {}

    @property
    def processes(self) -> tuple[int, ...]:
        """Those whose time is ours."""
        return () if self._started is None else (self._started.process.pid,)

    @property
    def is_usual(self) -> bool:
        """The ranks may be there."""
        return False

    def serves(self, ranks: RankProgram) -> Started | None:
        """The ranks of the run before where they hold what these are to hold, else new ones that
        will stay; None for another program than the runner's own, for which they make room unless
        it measures."""
        if ranks.module in MEASURES:
            return None
        if ranks.module != SERVES:
            self.dismiss()
            return None
        if self._started is not None:
            if (why := self._why_not(self._started, ranks)) is None:
                self._say("ranks and weights: those of the job before")
            else:
                self._say(f"ranks: started anew, {why}")
                self.dismiss()
        if self._started is None:
            self._start(ranks)
        assert self._line is not None
        socket.send_fds(self._line, [str(ranks.argument).encode()], ranks.inherited)
        return self._started

    def read_ahead(self, word: str) -> None:
        """They hold what the run before had them read."""

    def dismiss(self) -> None:
        """Ends the ranks; those at work are asked for nothing, they are ended."""
        if self._line is None or self._started is None:
            return
        self._line.close()  # which tells them
        process = self._started.process
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._started.messages.close()
        if self._started.lifeline is not None:
            self._started.lifeline.close()
        self._line = self._started = None

    def _why_not(self, started: Started, ranks: RankProgram) -> str | None:
        """Why the ranks that are there cannot take the run; None where they can."""
        if started.process.poll() is not None or started.messages.closed:
            return "for those of the job before have ended"
        differing = [name for name, value in ranks.holds.items() if self._held.get(name) != value]
        return f"for the job has another {' and '.join(differing)}" if differing else None

    def _start(self, ranks: RankProgram) -> None:
        self._line, other_end = socket.socketpair()
        with other_end:
            descriptor = other_end.fileno()
            program = RankProgram(module=PROGRAM, argument=Path(str(descriptor)), count=ranks.count)
            alone = [sys.executable, "-m", PROGRAM, str(descriptor)]
            started = start(alone if ranks.count == 1 else local_mpi_command(program),
                            inherited=(descriptor,), count=0 if ranks.count == 1 else ranks.count)
        self._started, self._held = started._replace(line=self._line), ranks.holds
