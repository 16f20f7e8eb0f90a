"""What can go wrong, and the exit code each kind carries (README.md).

The user's mistakes are `XgptError`s; our own are `assert`s that print the values. What a machine
does to a job (a full disk, a folder that is gone, no memory) gets the words of what to do about
it."""

import difflib
import errno
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_BOUND_MISSED = 4
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: stopped early, run again to go on
_MOST_MISTAKES = 100  # told of one file


class XgptError(Exception):
    """Base of every error meant for the user."""

    exit_code = EXIT_FAILED
    details: Mapping[str, Any] = MappingProxyType({})  # what `--json` prints beside the message


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One wrong value in an input file: where it is, what it is, what is allowed."""

    file: str
    line: int | None
    key: str
    value: object
    allowed: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        shown = "" if self.value is None else f" = {shorten(self.value)}"
        return ": ".join(part for part in (where, f"{self.key}{shown}", self.allowed) if part)


class InputError(XgptError):
    """Wrong input; carries every mistake found, and tells so many that a terminal can show them."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        assert mistakes, "an InputError without a mistake"
        self.mistakes = tuple(mistakes)
        lines = [str(mistake) for mistake in mistakes[:_MOST_MISTAKES]]
        if more := len(mistakes) - len(lines):
            lines.append(f"and {more:,} more of this kind or another")
        super().__init__("\n".join(lines))


def wrong(file: object, key: str, value: object, allowed: str,
          line: int | None = None) -> InputError:
    """An InputError of this one mistake."""
    return InputError([Mistake(file=str(file), line=line, key=key, value=value, allowed=allowed)])


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raises InputError with all of them, if there are any."""
    if found := list(mistakes):
        raise InputError(found)


class UnknownNameError(XgptError):
    """A catalog lookup that failed; the message lists the known names, nearest first."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        meant = nearest(name, self.known, is_sized=kind in ("model", "device"))
        super().__init__(f"unknown {kind} {name!r}: {meant}")


class InfeasibleError(XgptError):
    """No schedule satisfies the bound; the message says the tightest bound that can be met, and so
    does `tightest_s` where there is one."""

    exit_code = EXIT_INFEASIBLE

    def __init__(self, text: str, tightest_s: float = math.inf) -> None:
        self.tightest_s = tightest_s
        super().__init__(text)


class BoundMissed(XgptError):
    """A run that is done, and did not keep a bound; raised where the user is strict about it."""

    exit_code = EXIT_BOUND_MISSED


class MissingExtraError(XgptError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: "
                         f"pip install -c constraints.txt -e '.[{extra}]'")


class StoppedEarly(XgptError):
    """The run was interrupted; what is written is valid, the same command goes on from there."""

    exit_code = EXIT_RESUMABLE


def nearest(name: str, known: Sequence[str], *, elsewhere: str | None = None,
            is_sized: bool = False) -> str:
    """'did you mean X? known: A, B, C' for an unknown `name`. `elsewhere`: a name that is not among
    the known and may be meant as well. `is_sized`: names that differ in a number, or in more than a
    letter or two, are other models or devices, and never proposed."""
    alike = [one for one in known
             if not is_sized or re.findall("[0-9]+", one) == re.findall("[0-9]+", name)]
    close = difflib.get_close_matches(name, alike, n=1, cutoff=0.8 if is_sized else 0.6)
    meant = [repr(one) for one in (elsewhere, *close) if one is not None]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}known: {', '.join(known)}"


def shorten(value: object, limit: int = 60) -> str:
    """`value` as messages show it: on one line, without control characters, its end left off."""
    is_long = isinstance(value, str) and len(value) > limit  # of which repr would take long
    text = repr(str(value)[:limit] if is_long else value)
    return f"{text[:limit - 3]}..." if is_long or len(text) > limit else text


# C0 controls but tab and newline, DEL and C1 controls, what turns the direction of text or hides in
# it, line separators, lone surrogates, non-characters, tags
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]")


def visible(text: str) -> str:
    """Text of unknown origin as it may be shown: what would move a terminal's cursor, colour it or
    turn the direction of what follows is an escape (\\\\x1b). Lines stay lines."""
    return _UNPRINTABLE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found.group())
    return (f"\\x{code:02x}" if code < 0x100 else
            f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)
_LOST = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN,
         errno.ETIMEDOUT, errno.EREMOTEIO)
_GONE = (errno.ENOENT, errno.ENOTDIR)
# of an error at work in the output folder; the first row that has its number counts
_AT_WORK: tuple[tuple[tuple[int, ...], str], ...] = (
    ((errno.EFBIG,), "{where}: {why} for a limit on the size of files (`ulimit -f`); what is done "
     "is kept, and with a higher one {on}"),
    (_NO_ROOM, "{folder}: {why}; what is done is kept, and with room made {on}"),
    (_READ_ONLY, "{where}: {why}; what is done is kept, and once the folder can be written to "
     "{on}"),
    ((errno.EMFILE, errno.ENFILE), "{why} ({where}); what is done is kept. With a higher "
     "`ulimit -n` {on}"),
    (_LOST, "{where}: {why}: the file system does not answer as it should; what reached it is "
     "kept, and once it is well {on}"))
_GOES_ON = "the same command goes on from there"
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
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
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
        said = "".join(f": {line[:200]}" for line in str(error).strip().splitlines()[:1])
        return (f"memory ran out ({type(error).__name__}{said}); what is done is kept. With more "
                "of it (look at `ulimit -v`, `ulimit -u` and the container's limits), or fewer "
                f"ranks or queries at a time, {_GOES_ON}")
    if not isinstance(error, OSError):
        return None
    where = error.filename or folder
    for numbers, words in _AT_WORK:
        if error.errno in numbers:
            return words.format(where=where, folder=folder, why=error.strerror, on=_GOES_ON)
    if error.errno in _GONE and not folder.is_dir():
        return (f"{folder} was removed or renamed while a run wrote in it. A renamed folder has "
                f"all that was done: give it its name back, and {_GOES_ON}")
    if error.errno in _GONE and str(where).startswith(str(folder)):
        return (f"{where}: removed while a run needed it; what is left is kept, and {_GOES_ON}")
    return None


def _is_somewhere() -> bool:
    """Whether the folder that this process is in is there."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False
