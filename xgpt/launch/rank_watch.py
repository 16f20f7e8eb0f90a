"""Watches the ranks on this machine, for two things that mpiexec does not report. One is the rank
that ended first: mpiexec names any of those that it ended itself. The other is a rank that ended
before it was connected (it lacks a library, or was killed at its start): MPICH's mpiexec and the
other ranks wait for it for ever."""

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xgpt.core.system.machine import children_of

_LOOKS_TO_FIND = 10  # chosen: looks after the first rank is found, if their number is unknown
_GONE_S = 5.0  # chosen: a launcher ends sooner after its rank
_NONE_S = 30.0  # chosen: a launcher on a busy machine starts ranks sooner
# variables with a rank's number: of MPICH and Intel MPI, Open MPI
_NAMES = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_PROXY, _LAUNCHERS = "hydra_pmi_proxy", ("hydra", "mpiexec", "mpirun")
_LIBRARY = "/libmpi"  # a rank that has loaded it is connected


class _Rank(NamedTuple):
    number: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid} on {socket.gethostname()})"


class RankWatch:
    """Watches the ranks among the processes below `pid`, which starts them. It finds none where the
    system does not list processes. `count`: expected number of ranks, 0 if unknown."""

    def __init__(self, pid: int, count: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._count, self._looks = pid, count, 0
        self._found: dict[int, _Rank] = {}  # by descriptors that become readable at their end
        self._ended: list[_Rank] = []
        self._unconnected = set[_Rank]()
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
        """The rank that ended first, in words; None if none has."""
        self._collect_ends()
        return str(self._ended[0]) if self._ended else None

    def look(self) -> str | None:
        """The rank, in words, that ended unconnected and that others wait for; None if there is
        none. To be called ten times a second."""
        if self._ends is None:
            return None
        self._looks += 1
        if (self._looks_found is None or self._looks < self._looks_found + _LOOKS_TO_FIND
                or len(self._found) < self._count):
            self._find()
        self._unconnected -= {rank for rank in self._unconnected if _is_connected(rank.pid)}
        self._collect_ends()
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
        """Whether others wait for the ranks that are gone: other ranks, or MPICH's launcher, if the
        system let it start only some of them, or none."""
        if self._found:
            return self._count > 0 or len(self._ended) < len(self._found)
        return self._count > 0 and _is_idle(self._pid)

    def _gone(self) -> list[str]:
        """Ranks that ended unconnected, in words; some ended before they were found."""
        never = set(range(self._count)) - {rank.number for rank in self._found.values()}
        return [f"rank {number} on {socket.gethostname()}" for number in sorted(never)] + [
            str(rank) for rank in self._ended if rank in self._unconnected]

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
            self._unconnected.add(self._found[file])
            if self._looks_found is None:
                self._looks_found = self._looks

    def _collect_ends(self) -> None:
        if self._ends is None:
            return
        for file, _ in self._ends.poll(0):
            self._ends.unregister(file)
            self._ended.append(self._found[file])


def _ranks_below(pid: int) -> Iterator[tuple[int, int]]:
    """Yields (rank, process) of the ranks below a process, without their own children."""
    for child in children_of(pid):
        number = _rank_of(child)
        if number is None:
            yield from _ranks_below(child)
        else:
            yield number, child


def _is_idle(pid: int) -> bool:
    """Whether the process, or one below it, is MPICH's launcher without children."""
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


def _is_connected(pid: int) -> bool:
    """Whether the process has loaded its MPI library, and so is known to mpiexec."""
    try:
        return _LIBRARY in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
