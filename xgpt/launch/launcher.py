"""What a launcher is asked to start, and what it promises."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from xgpt.core.job import Job
from xgpt.core.local import usable_cores
from xgpt.core.problem import Problem
from xgpt.launch.standby import Standby


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """`count` ranks of `python -m MODULE ARGUMENT`. They keep the descriptors `inherited` open (the
    output folder's lock). `standby`: a process that may serve as the only rank."""

    module: str
    argument: Path
    count: int
    inherited: tuple[int, ...] = ()
    standby: Standby | None = None


class Launcher(Protocol):
    """Starts ranks somewhere."""

    @property
    def is_here(self) -> bool:
        """Whether all ranks see this machine's own folders, such as /tmp."""

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        """Starts the ranks, and returns when all have ended; calls `watch` ten times a second
        meanwhile.

        SIGINT, SIGTERM and SIGUSR1 call `ask_to_stop` (None: end the ranks at once) and let the
        ranks finish in their own time; a second signal, or a grace period that runs out, ends them.
        Raises XgptError with the end of the ranks' messages if they fail, StoppedEarly if they were
        ended at once, InputError where they cannot be started.
        """


def threads_per_rank(job: Job, problem: Problem) -> int:
    """Threads of each rank: what the job says, else an even share of the cores."""
    given = job.run.threads_per_rank
    return given or max(usable_cores() // problem.cluster.devices_per_node, 1)
