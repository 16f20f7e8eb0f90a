"""Errors meant for the user, with their exit codes (README.md).

The user's mistakes are `XgptError`s; our own are `assert`s that print the values. Failures of the
machine (a full disk, a lost folder, no memory) get words that say what to do."""

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
_MOST_MISTAKES = 100  # chosen: shown at once


class XgptError(Exception):
    """Base of every error meant for the user."""

    exit_code = EXIT_FAILED
    details: Mapping[str, Any] = MappingProxyType({})  # what `--json` prints beside the message


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A wrong value in an input file: its place, the value, and what is allowed."""

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
    """Wrong input; carries every mistake found, and shows the first hundred."""

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
    """An InputError with one Mistake."""
    return InputError([Mistake(file=str(file), line=line, key=key, value=value, allowed=allowed)])


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raises InputError with all `mistakes`, if there are any."""
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
    """No schedule keeps the limits. `tightest_s`: the smallest limit that one could keep, in
    seconds, if known; the message says it, too."""

    exit_code = EXIT_INFEASIBLE

    def __init__(self, text: str, tightest_s: float = math.inf) -> None:
        self.tightest_s = tightest_s
        super().__init__(text)


class LacksMemoryError(InfeasibleError):
    """No schedule fits the memory of the devices."""


class BoundMissed(XgptError):
    """A finished run exceeded a limit; raised with `--strict`."""

    exit_code = EXIT_BOUND_MISSED  # a limit was not kept, and work may be left


class MissingExtraError(XgptError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: "
                         f"pip install -c constraints.txt -e '.[{extra}]'")


class StoppedEarly(XgptError):
    """The run was interrupted; its files are valid, and the same command continues it."""

    exit_code = EXIT_RESUMABLE


class DeadlinePassed(StoppedEarly):
    """Requests expired at their deadlines; the same command runs them."""

    exit_code = EXIT_BOUND_MISSED


def nearest(name: str, known: Sequence[str], *, elsewhere: str | None = None,
            is_sized: bool = False) -> str:
    """A hint 'did you mean X? known: A, B, C' for an unknown `name`. `elsewhere`: another name to
    suggest, which is not among `known`. `is_sized`: names that differ in a number, or in more than
    a letter or two, are other models or devices and never suggested."""
    alike = [one for one in known
             if not is_sized or re.findall("[0-9]+", one) == re.findall("[0-9]+", name)]
    close = difflib.get_close_matches(name, alike, n=1, cutoff=0.8 if is_sized else 0.6)
    meant = [repr(one) for one in (elsewhere, *close) if one is not None]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}known: {', '.join(known)}"


def shorten(value: object, limit: int = 60) -> str:
    """`value` as messages show it: one line of at most `limit` characters, without control
    characters."""
    is_long = isinstance(value, str) and len(value) > limit  # repr of the whole would take long
    text = repr(str(value)[:limit] if is_long else value)
    return f"{text[:limit - 3]}..." if is_long or len(text) > limit else text


# C0 controls but tab and newline, DEL and C1 controls, marks that turn the direction of text or
# hide in it, line separators, lone surrogates, non-characters, tags
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]")


def visible(text: str) -> str:
    """Text of unknown origin, safe to print: characters that would move a terminal's cursor, colour
    it or turn the direction of text become escapes (\\\\x1b). Newlines stay."""
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
# (error numbers, message) of errors in the output folder; the first matching row counts
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
# in the words of Python, C++, torch, the threads' library and the dynamic linker
_MEMORY = re.compile(
    r"MemoryError|bad_alloc|annot allocate memory|can't allocate memory|not enough memory"
    r"|can't start new thread|Thread creation failed|failed to map segment|OutOfMemoryError",
    re.I)


def is_out_of_memory(text: str) -> bool:
    """Whether `text`, printed by a failed process, says that memory ran out."""
    return _MEMORY.search(text) is not None


def file_error_words(error: BaseException) -> str | None:
    """A message for an error of a file or folder anywhere, such as a full disk; None where it may
    be a fault of ours."""
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
             "repaired, call it again")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    if Path(str(error.filename)).is_relative_to(cache):
        words += ", or set XDG_CACHE_HOME to another folder"
    return words


def run_error_words(error: BaseException, folder: Path) -> str | None:
    """A message for an error while working in the output `folder`; None where it may be a fault of
    ours."""
    if isinstance(error, MemoryError) or (isinstance(
            error, (RuntimeError, ImportError, OSError)) and is_out_of_memory(str(error))):
        said = "".join(f": {line[:200]}" for line in str(error).strip().splitlines()[:1])
        return (f"memory ran out ({type(error).__name__}{said}); what is done is kept. With more "
                "of it (look at `ulimit -v`, `ulimit -u` and the container's limits), or fewer "
                f"ranks or requests at a time, {_GOES_ON}")
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
    """Whether this process's current folder still exists."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False
