"""Commands in a memory cgroup: a limit that counts the page cache too, with files dropped from the
cache before.

The limit is the kernel's own (cgroup v1, or v2 with the memory controller), so it holds for every
contender alike, whatever it counts itself. Making a group needs root. Where none can be made,
`MemoryGroup.why_none` says why, and commands run without a limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LOOK_S = 0.1  # between two looks at how much is used


class GroupRun(NamedTuple):
    """A command that ran in a group. `peak_bytes`: most that the group had, cache included;
    `anonymous_bytes`: most without the cache, looked at every tenth of a second."""

    code: int
    printed: str
    complaints: str
    seconds: float
    peak_bytes: int
    anonymous_bytes: int

    @property
    def is_killed(self) -> bool:
        """Whether the kernel ended it, which it does where the limit is not enough."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)


class MemoryGroup:
    """A group of `limit_bytes`, made when entered and removed when left."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.why_none = limit_bytes, ""
        self._is_v1 = (_V1 / "memory.limit_in_bytes").is_file()
        self._folder = (_V1 if self._is_v1 else _V2) / f"xgpt-offload-{os.getpid()}"

    def __enter__(self) -> Self:
        limit = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        self._limit = self._folder / limit
        try:
            self._folder.mkdir()
            self._limit.write_text(str(self.limit_bytes), encoding="ascii")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            self.why_none = f"no memory cgroup can be made here ({error}): nothing is limited"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for _ in range(50):  # its processes have ended, but the kernel may not know it yet
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._folder.rmdir()
                except OSError:
                    time.sleep(_LOOK_S)
                    continue
            return

    def run(self, command: Sequence[str], limit_s: float, *,
            is_limited_later: bool = False) -> GroupRun:
        """Runs the command and all that it starts within the group. `is_limited_later`: the command
        sets the limit itself, once it has loaded, by $GROUP_LIMIT (FILE=BYTES). Raises
        subprocess.TimeoutExpired after `limit_s`, once its processes are ended."""
        peak, most = self._file("peak"), [0]
        environment = dict(os.environ)
        if not self.why_none:
            unlimited = "-1" if self._is_v1 else "max"
            self._limit.write_text(unlimited if is_limited_later else str(self.limit_bytes),
                                   encoding="ascii")
            if is_limited_later:
                environment["GROUP_LIMIT"] = f"{self._limit}={self.limit_bytes}"
        if self._is_v1 and not self.why_none:
            peak.write_text("0", encoding="ascii")
            (self._folder / "memory.force_empty").write_text("0", encoding="ascii")
        start = time.perf_counter()
        with (tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err,
              subprocess.Popen(command, stdout=out, stderr=err, env=environment,
                               start_new_session=True, preexec_fn=self._enter) as process):
            watch = threading.Thread(target=self._watch, args=(process, most), daemon=True)
            watch.start()
            try:
                process.wait(limit_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            seconds = time.perf_counter() - start
            watch.join()
            out.seek(0)
            err.seek(0)
            return GroupRun(process.returncode, out.read(), err.read(), seconds,
                            0 if self.why_none else int(peak.read_text("ascii")), most[0])

    def _enter(self) -> None:
        if not self.why_none:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def _file(self, what: str) -> Path:
        names = {"peak": ("memory.max_usage_in_bytes", "memory.peak")}
        return self._folder / names[what][0 if self._is_v1 else 1]

    def _watch(self, process: subprocess.Popen[bytes], most: list[int]) -> None:
        names = ("rss", "anon")  # of v1, of v2
        while process.poll() is None and not self.why_none:
            lines = (self._folder / "memory.stat").read_text("ascii").splitlines()
            used = dict(line.split() for line in lines)
            most[0] = max(most[0], int(used[names[0 if self._is_v1 else 1]]))
            time.sleep(_LOOK_S)


def files_of(place: Path) -> Iterator[Path]:
    """`place` if it is a file, else the files below it."""
    yield from [place] if place.is_file() else (p for p in place.rglob("*") if p.is_file())


def drop(*places: Path) -> None:
    """Drops these files, and those of these folders, from the page cache, written back first."""
    for place in places:
        for path in files_of(place):
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
