"""What killed processes leave. Ranks, in shared memory: MPICH removes its files at an orderly end
alone, and on many machines nothing else does before the next boot. Commands, folders for what lasts
no longer than they do."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER, _NAMES = Path("/dev/shm"), "mpich_shm_*"
_LEAST_AGE_S = 60.0  # what is younger may be of ranks that are being started


def remove_leftovers(folder: Path = _FOLDER, processes: Path = Path("/proc")) -> list[Path]:
    """Removes the files of this user's that no living process has mapped; which."""
    files = {str(path): path for path in folder.glob(_NAMES) if _is_old_and_own(path)}
    if not files:
        return []
    for line in _mappings(processes):
        name = line.rstrip("\n").partition("/")
        files.pop(name[1] + name[2], None)
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


def _is_old_and_own(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LEAST_AGE_S


def _mappings(processes: Path) -> Iterator[str]:
    for path in processes.glob("[0-9]*/maps"):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            yield from file
