"""Reading a Hugging Face `config.json` key by key, collecting every mistake instead of the first.

A reader that fails records what is wrong and returns a stand-in; `finish` raises if there was any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, Mistake

_SIZE = "a whole number >= 1"


class ConfigValues:
    """The values of the config.json at `path`, or those under one of its keys (`prefix`)."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "",
                 mistakes: list[Mistake] | None = None) -> None:
        self.values, self._path, self._prefix = values, path, prefix
        self._mistakes: list[Mistake] = [] if mistakes is None else mistakes

    def size(self, key: str) -> int:
        """A count that has to be there."""
        if self.values.get(key) is None:
            self.reject(key, f"{'null' if key in self.values else 'missing'}: {_SIZE}")
            return 1
        return self.size_or_none(key) or 1

    def size_or_none(self, key: str) -> int | None:
        """A count, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.reject(key, _SIZE)
            return None
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0; `default` where the key is absent."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.reject(key, "null: a number above 0" if value is None else "a number above 0")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """`default` where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.reject(key, "true or false")
            return default
        return value

    def text(self, key: str, default: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
        """One of the `known`; `default` where the key is absent."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"{'missing' if value == '' else 'is not supported'}: known: "
                             f"{', '.join(known)}")
            return default
        return value

    def section(self, key: str) -> ConfigValues:
        """The values under `key`; none where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.reject(key, "a mapping of keys to values")
        return ConfigValues(value if isinstance(value, dict) else {}, self._path, f"{key}.",
                            self._mistakes)

    def only(self, key: str, supported: object, why: str = "") -> None:
        """A variant that would run with wrong tokens is refused instead."""
        if self.values.get(key, supported) != supported:
            known = str(supported).lower() if isinstance(supported, bool) else repr(supported)
            self.reject(key, f"is not supported, only {known} is{why}")

    def divides(self, key: str, whole_key: str) -> None:
        """Two sizes, of which the first has to divide the second."""
        part, whole = self.values.get(key), self.values.get(whole_key)
        if (isinstance(part, int) and isinstance(whole, int) and part >= 1 and whole >= 1
                and whole % part):
            self.reject(key, f"a divisor of {whole_key} = {whole}")

    def reject(self, key: str, allowed: str) -> None:
        self._mistakes.append(Mistake(file=str(self._path), line=None, key=self._prefix + key,
                                      value=self.values.get(key), allowed=allowed))

    def finish(self) -> None:
        if self._mistakes:
            raise InputError(self._mistakes)
