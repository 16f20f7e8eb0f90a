"""Removes what killed processes leave: MPICH's files in shared memory and /tmp, which it removes
only at an orderly end, vLLM's and DeepSpeed's, which they never remove, and temporary folders of
commands."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LEAST_AGE_S = 60.0  # chosen: younger files may belong to ranks that are starting
# Their files: folder (whatever TMPDIR says), names, and the age before which they may be in use
# unnoticed. mpiexec's proxy keeps the file open in which it describes the machine to its ranks.
_KINDS = ((Path("/dev/shm"), "mpich_shm_*", _LEAST_AGE_S),
          (Path("/dev/shm"), "vllm_dist_*", _LEAST_AGE_S),
          (Path("/dev/shm"), "deepspeed_allreduce_buffer_*", _LEAST_AGE_S),
          (Path("/tmp"), "hydra_hwloc_xmlfile_*", 0.0))


def remove_leftovers(folder: Path | None = None, processes: Path = Path("/proc")) -> list[Path]:
    """Removes such files of this user that no living process has mapped or open; returns their
    paths. `folder`: where to look (default: their own places)."""
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
def scratch_folder(prefix: str, folder: Path | None = None) -> Iterator[Path]:
    """A new folder in `folder` (default: the temporary one), removed at the end of the `with`
    block. First removes those with this prefix that killed processes of this user left; living ones
    hold a lock."""
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
    """Holds a lock on a folder. Raises OSError if another process has it, or there are no locks;
    with `or_not` it then goes on without."""
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
    """Yields names of files that processes have mapped or open."""
    for path in processes.glob("[0-9]*/maps"):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            yield from ("".join(line.rstrip("\n").partition("/")[1:]) for line in file)
        for link in path.with_name("fd").glob("*"):
            with suppress(OSError):
                yield os.readlink(link)
