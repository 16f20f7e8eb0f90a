"""Which rank on this machine ended first. Whoever reads that the ranks failed wants to know it, and
mpiexec's own message names any of those that it ended itself. And of a rank that is gone before it
has met the others (it lacks a library, or was ended as it began) MPICH's mpiexec says nothing at
all: the others wait for it for ever, and so does mpiexec where it could not start all of them."""

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xgpt.core.system.machine import children_of

_LOOKS_TO_FIND = 10  # after the first ranks are there, where their number is not known
_GONE_S = 5.0  # chosen: from a rank's end to its launcher's takes less
_NONE_S = 30.0  # chosen: until there are ranks, a launcher takes its time on a busy machine
# how mpiexec tells a process which rank it is: MPICH and Intel MPI, Open MPI
_NAMES = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_PROXY, _LAUNCHERS = "hydra_pmi_proxy", ("hydra", "mpiexec", "mpirun")
_LIBRARY = "/libmpi"  # whose initialisation is the meeting


class _Rank(NamedTuple):
    number: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid} on {socket.gethostname()})"


class FirstEnd:
    """Looks at the processes below the one that starts ranks. Where the system cannot tell it finds
    none, and says nothing. `count`: of ranks that there should be, 0 where that is not known;
    `first`: who ended first, in words."""

    def __init__(self, pid: int, count: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._count, self._looks = pid, count, 0
        self._found: dict[int, _Rank] = {}  # by the descriptors that tell of their end
        self._ended: list[_Rank] = []
        self._unmet = set[_Rank]()
        self._looks_found: int | None = None
        self._now = now
        self._gone_since: float | None = None
        # NOTE: its events come in the order in which they happened; those of poll and select do not
        self._ends = select.epoll() if hasattr(select, "epoll") else None

    def close(self) -> None:
        for file in self._found:
            os.close(file)
        self._found.clear()
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    @property
    def first(self) -> str | None:
        self._hear()
        return str(self._ended[0]) if self._ended else None

    def look(self) -> str | None:
        """Called ten times a second. The rank that the others wait for in vain, in words."""
        if self._ends is None:
            return None
        self._looks += 1
        if (self._looks_found is None or self._looks < self._looks_found + _LOOKS_TO_FIND
                or len(self._found) < self._count):
            self._find()
        self._unmet -= {rank for rank in self._unmet if _has_met(rank.pid)}
        self._hear()
        gone = self._gone()
        if not gone or not self._is_waited_for():
            self._gone_since = None
            return None
        now = self._now()
        if self._gone_since is None:
            self._gone_since = now
        most_s = _GONE_S if self._found else _NONE_S
        return gone[0] if now - self._gone_since > most_s else None

    def _is_waited_for(self) -> bool:
        """Whether others wait for those that are gone; where all are on this machine, the launcher
        too: MPICH's where the system lets it start but some of them, or none."""
        if self._found:
            return self._count > 0 or len(self._ended) < len(self._found)
        return self._count > 0 and _is_idle(self._pid)

    def _gone(self) -> list[str]:
        """Those that have not met the others; some were gone before they were found."""
        never = set(range(self._count)) - {rank.number for rank in self._found.values()}
        return [f"rank {number} on {socket.gethostname()}" for number in sorted(never)] + [
            str(rank) for rank in self._ended if rank in self._unmet]

    def _find(self) -> None:
        assert self._ends is not None
        known = {rank.pid for rank in self._found.values()}
        for number, pid in _ranks_below(self._pid):
            if pid in known:
                continue
            try:
                file = os.pidfd_open(pid)
            except (AttributeError, OSError):
                continue
            self._ends.register(file, select.EPOLLIN)
            self._found[file] = _Rank(number, pid)
            self._unmet.add(self._found[file])
            if self._looks_found is None:
                self._looks_found = self._looks

    def _hear(self) -> None:
        if self._ends is None:
            return
        for file, _ in self._ends.poll(0):
            self._ends.unregister(file)
            self._ended.append(self._found[file])


def _ranks_below(pid: int) -> Iterator[tuple[int, int]]:
    """(rank, process) of each; what a rank started itself is none."""
    for child in children_of(pid):
        number = _rank_of(child)
        if number is None:
            yield from _ranks_below(child)
        else:
            yield number, child


def _is_idle(pid: int) -> bool:
    """Whether the process, or one below it, is of MPICH's launcher and has not started anything."""
    children = children_of(pid)
    with suppress(OSError):
        program = Path(os.readlink(f"/proc/{pid}/exe"))
        if not children and program.name.startswith(_LAUNCHERS):
            return program.with_name(_PROXY).exists()
    return any(map(_is_idle, children))


def _rank_of(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(_NAMES):
                return int(entry.partition(b"=")[2])
    return None


def _has_met(pid: int) -> bool:
    """Whether the process has its MPI library, and so is known to mpiexec."""
    try:
        return _LIBRARY in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
