"""The JSON files of a model's folder, read key by key with every mistake by file and key.

A reader of `ConfigValues` that fails records what is wrong and returns a stand-in; `finish` raises
if there was any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.system.whole_file import read_text

_SIZE = "a whole number >= 1"
# Of layers, which are planned one by one, and of any other size: no model has as many, and what a
# slip of the pen makes of a number would be searched for hours or asked of memory at once.
_MOST_LAYERS, _MOST_SIZE = 10_000, 2**31 - 1
_LAYERS = frozenset({"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"})
_MOST_NUMBER = 1e30  # of what is no size: beyond are slips and numbers that overflow
_T = TypeVar("_T")


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        value = json.loads(read_text(path))
    except OSError as cause:
        raise wrong_file(path, f"cannot be read: {cause.strerror}") from None
    except (ValueError, RecursionError) as cause:
        raise wrong_file(path, f"cannot be read, it is no JSON: {cause}") from None
    if not isinstance(value, dict):
        raise wrong_file(path, "not a JSON object")
    return value


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path of a model names: itself, or the only one of a folder without a
    config.json."""
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def wrong_file(path: Path, reason: str) -> InputError:
    """A file of a model that cannot be used."""
    return wrong(path.parent, path.name, None, reason)


class ConfigValues:
    """The values of the config.json at `path`, or those under one of its keys (`prefix`). `asked`:
    the keys that a reader got, whether they are there or not."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "",
                 mistakes: list[Mistake] | None = None, asked: set[str] | None = None) -> None:
        self.values, self._path, self._prefix = dict(values), path, prefix
        self.asked: set[str] = set() if asked is None else asked
        self._mistakes: list[Mistake] = [] if mistakes is None else mistakes

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(self._prefix + key)
        return self.values.get(key, default)

    def size(self, key: str) -> int:
        """A count that has to be there."""
        if self.get(key) is None:
            self.reject(key, f"{'null' if key in self.values else 'missing'}: {_SIZE}")
            return 1
        return self.size_or_none(key) or 1

    def size_or_none(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A count of at least so many; `default` where the key is absent or null."""
        most = _MOST_LAYERS if key in _LAYERS else _MOST_SIZE
        value, allowed = self.get(key), f"a whole number >= {least}"
        return self._given(
            key, default, lambda value: type(value) is int and least <= value <= most,
            f"{allowed}, at most {most:,}" if type(value) is int and value > most else allowed)

    def number(self, key: str, default: float | None) -> float:
        """A number above 0; `default` where the key is absent."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
                0 < value <= _MOST_NUMBER):
            self.reject(key, "null: a number above 0" if value is None else "a number above 0")
            return 1.0 if default is None else default
        return float(value)

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A number above 0; `default` where the key is absent, None where it is null."""
        if key in self.values and self.values[key] is None:
            return None
        return self.number(key, default) if default is not None or key in self.values else None

    def each(self, key: str, count: int, known: tuple[_T, ...]) -> list[_T]:
        """At least `count` of the `known`, of which the first so many are taken; none where the key
        is absent, null or empty."""
        values: list[_T] = self._given(key, [], lambda value: isinstance(value, list), "a list")
        if not values:
            return []
        for value in values:
            if value not in known:
                self.reject(key, f"one of {', '.join(map(str, known))} for each layer", value)
                return []
        if len(values) < count:
            self.reject(key, f"one of {', '.join(map(str, known))} for each of {count} layers")
            return []
        return list(values[:count])

    def flag(self, key: str, default: bool) -> bool:
        """`default` where the key is absent or null."""
        return self._given(key, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str, default: str, known: Mapping[str, object] | tuple[str, ...],
             more: str = "") -> str:
        """One of the `known`; `default` where the key is absent. `more`: what is said behind
        them."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"{'missing' if value == '' else 'is not supported'}: known: "
                             f"{', '.join(known)}{more}")
            return default
        return value

    def section(self, key: str) -> ConfigValues:
        """The values under `key`; none where it is absent or null."""
        values: dict[str, Any] = self._given(key, {}, lambda value: isinstance(value, dict),
                                             "a mapping of keys to values")
        return ConfigValues(values, self._path, f"{self._prefix}{key}.", self._mistakes,
                            self.asked)

    def _given(self, key: str, default: _T, is_allowed: Callable[[Any], bool],
               allowed: str) -> Any | _T:
        """The value; `default` where the key is absent or null, or is not allowed (a mistake)."""
        value = self.get(key)
        if value is not None and not is_allowed(value):
            self.reject(key, allowed)
            return default
        return default if value is None else value

    def only(self, key: str, supported: object) -> None:
        """A variant that would run with wrong tokens is refused instead."""
        if self.get(key, supported) != supported:
            known = json.dumps(supported) if not isinstance(supported, str) else repr(supported)
            self.reject(key, f"is not supported, only {known} is")

    def divides(self, key: str, whole_key: str) -> None:
        """Two sizes, of which the first has to divide the second."""
        part, whole = self.get(key), self.get(whole_key)
        if (isinstance(part, int) and isinstance(whole, int) and part >= 1 and whole >= 1
                and whole % part):
            self.reject(key, f"a divisor of {whole_key} = {whole}")

    def reject(self, key: str, allowed: str, value: object = None) -> None:
        """`value`: what is shown instead of all that stands under the key."""
        shown = self.get(key) if value is None else value
        self._mistakes.append(Mistake(file=str(self._path), line=None, key=self._prefix + key,
                                      value=shown, allowed=allowed))

    def finish(self) -> None:
        if self._mistakes:
            raise InputError(self._mistakes)
