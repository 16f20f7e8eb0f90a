"""What a machine does to a job that is no fault of the job's, in the words of what to do about it:
a full disk, a folder that is gone, memory or descriptors that ran out."""

import errno
import os
import re
from pathlib import Path

from xgpt.core.errors import shorten

_GOES_ON = "the same command goes on from there"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)
_LOST = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN,
         errno.ETIMEDOUT, errno.EREMOTEIO)
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
_GONE = (errno.ENOENT, errno.ENOTDIR)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
# as Python, C++, torch, the threads' library and the dynamic linker say it
_MEMORY = re.compile(
    r"MemoryError|bad_alloc|annot allocate memory|can't allocate memory|not enough memory"
    r"|can't start new thread|Thread creation failed|failed to map segment|OutOfMemoryError",
    re.I)


def is_of_memory(text: str) -> bool:
    """Whether this, printed by a process that failed, says that memory ran out."""
    return _MEMORY.search(text) is not None


def of_a_file(error: BaseException) -> str | None:
    """What to say of a file or folder that cannot be used, or finds no room, wherever it lies; None
    where it may be a fault of ours."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _NO_NAME:
        return f"{shorten(error.filename)}: {error.strerror}"
    if error.errno in _GONE and not _is_somewhere():
        return "the folder that this was called in is gone: go to one that is there"
    if error.errno in _GONE and error.filename is None and "temporary" in str(error.strerror):
        return f"{error.strerror}: set TMPDIR to a folder that can be written to"
    if error.errno not in (*_NO_ROOM, *_READ_ONLY, *_LOST):
        return None
    if error.filename is None and error.errno not in _NO_ROOM:
        return None
    words = (f"{error.filename or 'what is printed, or a file'}: {error.strerror}; once that is "
             "mended, call it again")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    if Path(str(error.filename)).is_relative_to(cache):
        words += ", or set XDG_CACHE_HOME to another folder"
    return words


def in_words(error: BaseException, folder: Path) -> str | None:
    """What to say of an error at work in the output folder; None where it may be a fault of
    ours."""
    if isinstance(error, MemoryError) or (
            isinstance(error, (RuntimeError, ImportError, OSError)) and is_of_memory(str(error))):
        return (f"memory ran out ({_short(error)}); what is done is kept. With more of it (look at "
                f"`ulimit -v`, `ulimit -u` and the container's limits), or fewer ranks or queries "
                f"at a time, {_GOES_ON}")
    if not isinstance(error, OSError):
        return None
    where = error.filename or folder
    if error.errno == errno.EFBIG:
        return (f"{where}: {error.strerror} for a limit on the size of files (`ulimit -f`); what "
                f"is done is kept, and with a higher one {_GOES_ON}")
    if error.errno in _NO_ROOM:
        return (f"{folder}: {error.strerror}; what is done is kept, and with room made {_GOES_ON}")
    if error.errno in _READ_ONLY:
        return (f"{where}: {error.strerror}; what is done is kept, and once the folder can be "
                f"written to {_GOES_ON}")
    if error.errno in _TOO_MANY:
        return (f"{error.strerror} ({where}); what is done is kept. With a higher `ulimit -n` "
                f"{_GOES_ON}")
    if error.errno in _LOST:
        return (f"{where}: {error.strerror}: the file system does not answer as it should; what "
                f"reached it is kept, and once it is well {_GOES_ON}")
    if error.errno in _GONE and not folder.is_dir():
        return (f"{folder} was removed or renamed while a run wrote in it. A renamed folder has "
                f"all that was done: give it its name back, and {_GOES_ON}")
    if error.errno in _GONE and str(where).startswith(str(folder)):
        return (f"{where}: removed while a run needed it; what is left is kept, and {_GOES_ON}")
    return None


def _is_somewhere() -> bool:
    """Whether the folder that this process is in is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
