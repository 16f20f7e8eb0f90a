"""What a launcher is asked to start, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, devices_of_copies
from xgpt.core.system.machine import usable_cores
from xgpt.job.job import Job
from xgpt.launch.process import Started


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """`count` ranks of `python -m MODULE ARGUMENT`. They keep the descriptors `inherited` open (the
    output folder's lock). `per_node`: ranks on a node, where they are fewer than the launcher's
    own. `standby`: who may serve as these ranks. `holds`: what they will have in memory, by what
    may differ, in words. `command`: what starts the only rank, in an interpreter of its own."""

    module: str
    argument: Path
    count: int
    per_node: int | None = None
    inherited: tuple[int, ...] = ()
    standby: Waiting | None = None
    holds: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


class Waiting(Protocol):
    """Ranks that are there already (xgpt.launch.standby)."""

    def serves(self, ranks: RankProgram) -> Started | None:
        """The processes at work as these ranks; None where they must be started."""


class Launcher(Protocol):
    """Starts ranks somewhere."""

    @property
    def is_here(self) -> bool:
        """Whether all ranks see this machine's own folders, such as /tmp."""

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        """Starts the ranks, and returns when all have ended; calls `watch` ten times a second
        meanwhile.

        SIGINT, SIGTERM, SIGUSR1, SIGHUP and SIGQUIT call `ask_to_stop` (None: end the ranks at
        once) and let the ranks finish in their own time; a second signal, or a grace period that
        runs out, ends them. What `watch` raises ends them, too.
        Raises XgptError with the end of the ranks' messages if they fail, StoppedEarly if they were
        ended at once, InputError where they cannot be started.
        """


def threads_per_rank(job: Job, problem: Problem) -> int:
    """Threads of each rank: what the job says, else an even share of the cores."""
    given = job.run.threads_per_rank
    return given or max(usable_cores() // problem.cluster.devices_per_node, 1)


def ranks_per_node(estimate: Estimate, devices_per_node: int) -> int | None:
    """Ranks that a node gets of a schedule: as many as leave every copy within a node, or on whole
    ones. None where copies of several shapes do not lie so, however many it gets."""
    if estimate.others:
        return next((count for count in range(devices_per_node, 0, -1)
                     if _is_placed(devices_of_copies(estimate), count, devices_per_node)), None)
    each = estimate.deployment.devices_per_replica
    return max(devices_per_node // each * each, min(each, devices_per_node))


def _is_placed(copies: Sequence[int], count: int, devices_per_node: int) -> bool:
    """Whether copies on so many devices each, one after the other, lie well with `count` ranks on a
    node."""
    first = 0
    for each in copies:
        is_whole = count == devices_per_node and first % count == 0 and each % count == 0
        if not is_whole and first // count != (first + each - 1) // count:
            return False
        first += each
    return True
