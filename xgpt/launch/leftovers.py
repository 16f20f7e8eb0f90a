"""What killed ranks leave in shared memory: MPICH removes its files at an orderly end alone, and on
many machines nothing else does before the next boot."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
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
