"""What can go wrong, and the exit code each kind carries (README.md).

The user's mistakes are `XgptError`s; our own are `assert`s that print the values."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


class UnknownNameError(XgptError):
    """A catalog lookup that failed; the message lists the known names, nearest first."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"unknown {kind} {name!r}: {nearest(name, self.known)}")


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


def nearest(name: str, known: Sequence[str], *, elsewhere: str | None = None) -> str:
    """'did you mean X? known: A, B, C' for an unknown `name`. `elsewhere`: a name that is not among
    the known and may be meant as well."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = [repr(one) for one in (elsewhere, *close) if one is not None]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}known: {', '.join(known)}"


def shorten(value: object, limit: int = 60) -> str:
    """`value` as messages show it: on one line, without control characters, its end left off."""
    text = repr(value[:limit]) if isinstance(value, str) and len(value) > limit else repr(value)
    if isinstance(value, str) and len(value) > limit:
        return text[: limit - 3] + "..."
    return text if len(text) <= limit else text[: limit - 3] + "..."
