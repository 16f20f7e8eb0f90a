"""Reading one mapping of a job file key by key, collecting every mistake instead of the first.

A reader that fails records a Mistake and returns its default. The caller discards what it built
when there are mistakes, so that a placeholder never leaves `load_job`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from xgpt.core.errors import Mistake, nearest
from xgpt.core.typed import keys_of, read
from xgpt.core.units import parse_bytes, parse_seconds, parse_share
from xgpt.core.yaml_tree import Field

T = TypeVar("T")
V = TypeVar("V")

# What no quantity of a job file exceeds: beyond lies a slip of the hand, and numbers that overflow.
LARGEST_NUMBER = 1e18  # FLOP/s of an exascale machine
LARGEST: dict[Callable[[Any], float], float] = {
    parse_bytes: 1e18, parse_seconds: 1e9, parse_share: 1.0}  # 1e9 s are 32 years


class Section:
    """A mapping of the file under the dotted key `prefix`; `finish` reports keys nobody read."""

    def __init__(self, field: Field, prefix: str, mistakes: list[Mistake],
                 places: dict[str, str] | None = None,
                 elsewhere: Callable[[], Mapping[str, str]] = dict) -> None:
        """`places`: filled with the dotted keys of those that any section of the file is asked for,
        by their last names. `elsewhere`: the same of a whole file, to say where a key belongs that
        stands in the wrong section; called only where there is such a key."""
        assert isinstance(field.value, dict), f"{field = }"
        self._field, self._mistakes, self._children = field, mistakes, field.value
        self._prefix = f"{prefix}." if prefix else ""
        self._known: list[str] = []
        self._is_asked_for_places = places is not None
        self._places: dict[str, str] = {} if places is None else places
        self._elsewhere = elsewhere

    def get(self, key: str) -> Field | None:
        """The key's value; None where it is absent or null ("not given")."""
        if key not in self._known:
            self._known.append(key)
            self._places.setdefault(key, self._prefix + key)
        child = self._children.get(key)
        return None if child is None or child.value is None else child

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def reject(self, key: str, allowed: str) -> None:
        """Record that the value of `key` (or its absence) is a mistake."""
        field = self.get(key)
        place = field if field is not None else self._children.get(key, self._field)
        is_scalar = field is not None and not isinstance(field.value, (dict, list))
        value = field.value if field is not None and is_scalar else None
        self._mistakes.append(Mistake(file=place.file, line=place.line, key=self._prefix + key,
                                      value=value, allowed=allowed))

    def reject_type(self, key: str, allowed: str) -> None:
        """Rejects the value, and says so where a mapping or a list stands in its place."""
        value = self._children[key].value
        kinds: dict[type, str] = {dict: ", not a mapping", list: ", not a list"}
        self.reject(key, allowed + kinds.get(type(value), ""))

    def finish(self) -> None:
        """Report the keys that no reader asked for, with where they belong."""
        for key, child in self._children.items():
            if key not in self._known:
                own = self._prefix + key
                meant = self._elsewhere().get(key)
                words = nearest(key, self._known, elsewhere=meant if meant != own else None)
                self._mistakes.append(Mistake(
                    file=child.file, line=child.line, key=own, value=None,
                    allowed=f"unknown key; {words}"))

    def section(self, key: str, allowed: str = "a mapping") -> Section | None:
        """The mapping under `key`; None where it is absent or (a mistake) something else."""
        field = self.get(key)
        if field is not None and not isinstance(field.value, dict):
            self.reject_type(key, allowed)
        return self.mapping(key)

    def mapping(self, key: str) -> Section | None:
        """The mapping under `key`; None where there is none, which is no mistake."""
        field = self.get(key)
        if field is None or not isinstance(field.value, dict):
            return None
        return Section(field, self._prefix + key, self._mistakes,
                       self._places if self._is_asked_for_places else None, self._elsewhere)

    def read(self, key: str, default: T, value_of: Callable[[Any], V | None],
             allowed: str) -> V | T:
        """What `value_of` makes of the key's value, None being a mistake."""
        field = self.get(key)
        if field is None:
            return default
        value = value_of(field.value)
        if value is None:
            self.reject_type(key, allowed)
            return default
        return value

    def text(self, key: str, default: T, allowed: str = "text") -> str | T:
        return self.read(key, default, lambda value: value.strip() if is_text(value) else None,
                         allowed)

    def choice(self, key: str, default: T, choices: Sequence[str]) -> str | T:
        """One of `choices`, exactly."""
        field = self.get(key)
        if field is None:
            return default
        if isinstance(field.value, str) and field.value in choices:
            return field.value
        shown = field.value if isinstance(field.value, str) else ""
        self.reject_type(key, nearest(shown, choices).replace("known:", "allowed:"))
        return default

    def flag(self, key: str, default: bool) -> bool:
        return self.read(key, default, lambda value: value if isinstance(value, bool) else None,
                         "true or false")

    def integer(self, key: str, default: T, minimum: int, maximum: int) -> int | T:
        return self.read(
            key, default,
            lambda value: value if is_one_of(value, int) and minimum <= value <= maximum else None,
            f"a whole number >= {minimum} and <= {maximum}")

    def number(self, key: str, default: T, is_allowed: Callable[[float], bool],
               allowed: str) -> float | T:
        """A finite number for which `is_allowed` holds, within what any quantity may be."""
        return self.amount(key, default, float, lambda x: math.isfinite(x) and is_allowed(x),
                           allowed, (int, float))

    def amount(self, key: str, default: T, parse: Callable[[Any], float],
               is_allowed: Callable[[float], bool], allowed: str,
               types: tuple[type, ...] = (str, int, float)) -> float | T:
        """A number, or text with a unit, as `parse` of xgpt.core.units reads it, for which
        `is_allowed` holds; no larger than LARGEST says, but for an infinite one."""
        largest = LARGEST.get(parse, LARGEST_NUMBER)

        def value_of(value: Any) -> float | None:
            try:
                number = parse(value) if is_one_of(value, *types) else math.nan
            except (ValueError, OverflowError):
                return None
            is_too_large.append(largest < number < math.inf)
            return number if is_allowed(number) and not is_too_large[-1] else None  # false for nan

        is_too_large = list[bool]()
        field = self.get(key)
        value = None if field is None else value_of(field.value)
        if field is not None and value is None:
            self.reject_type(key, f"{allowed}; at most {largest:g}" if any(is_too_large)
                             else allowed)
        return default if value is None else value


def typed(top: Section, key: str, kind: Any, allowed: str = "a mapping",
          context: Any = None) -> Any:
    """The mapping under `key` as a dataclass of this kind; None where it is absent or wrong."""
    if top._is_asked_for_places:
        for name in keys_of(kind):
            top._places.setdefault(name, f"{top._prefix}{key}.{name}")
    section, field = top.section(key, allowed), top.get(key)
    if section is None or field is None:
        return None
    return read(kind, field, f"{top._prefix}{key}.", top._mistakes, top._elsewhere, context)


def values_of(section: Section, key: str, allowed: str) -> dict[str, Any]:
    """The mapping under `key`, whose own keys somebody else knows, as plain values."""
    field = section.get(key)
    if field is not None and not isinstance(field.value, dict):
        section.reject_type(key, allowed)
        return {}
    return {} if field is None else _plain(field)


def _plain(field: Field) -> Any:
    """The value without where it stands."""
    if isinstance(field.value, dict):
        return {str(name): _plain(child) for name, child in field.value.items()}
    return ([_plain(child) for child in field.value] if isinstance(field.value, list)
            else field.value)


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def is_one_of(value: object, *types: type) -> bool:
    # NOTE: bool is an int in Python; `ranks: true` is a mistake all the same
    return isinstance(value, types) and not isinstance(value, bool)
