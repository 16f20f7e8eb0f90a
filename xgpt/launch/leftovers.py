"""What killed processes leave. Ranks and their mpiexec, in shared memory and in /tmp: MPICH removes
its files at an orderly end alone, and on many machines nothing else does before the next boot.
Commands, folders for what lasts no longer than they do."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LEAST_AGE_S = 60.0  # what is younger may be of ranks that are being started
# MPICH's: folder (whatever TMPDIR says), names, and the age before which one may be in use unseen.
# mpiexec's proxy describes the machine to its ranks in a file that it has open while it lives.
_KINDS = ((Path("/dev/shm"), "mpich_shm_*", _LEAST_AGE_S),
          (Path("/tmp"), "hydra_hwloc_xmlfile_*", 0.0))


def remove_leftovers(folder: Path | None = None, processes: Path = Path("/proc")) -> list[Path]:
    """Removes the files of this user's that no living process has mapped or open; returns them.
    `folder`: where all of them are looked for."""
    files = {str(path): path for place, names, age_s in _KINDS
             for path in (folder or place).glob(names) if _is_old_and_own(path, age_s)}
    if not files:
        return []
    for name in _in_use(processes):
        files.pop(name, None)
    removed = []
    for path in files.values():
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


@contextmanager
def passing_folder(prefix: str, folder: Path | None = None) -> Iterator[Path]:
    """A new folder, in the temporary one or in `folder`, which is gone afterwards. So are those of
    its prefix that a killed process of this user's has left there: a living one holds a lock."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder
    for path in parent.glob(f"{prefix}*"):
        if _is_old_and_own(path):
            with suppress(OSError), _locked(path):
                shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with _locked(scratch, or_not=True):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, or_not: bool = False) -> Iterator[None]:
    """Raises OSError where another process has it locked, or its file system has no such locks,
    unless it may be without."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(*(OSError,) * or_not):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _is_old_and_own(path: Path, age_s: float = _LEAST_AGE_S) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and time.time() - found.st_mtime >= age_s


def _in_use(processes: Path) -> Iterator[str]:
    """Yields the names of files that processes have mapped or open."""
    for path in processes.glob("[0-9]*/maps"):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            yield from ("".join(line.rstrip("\n").partition("/")[1:]) for line in file)
        for link in path.with_name("fd").glob("*"):
            with suppress(OSError):
                yield os.readlink(link)
