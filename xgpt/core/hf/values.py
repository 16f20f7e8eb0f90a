"""Reads the JSON files of a model's folder key by key, collecting mistakes by file and key.

A method of `ConfigValues` that finds a mistake records it and returns a stand-in; `finish` raises
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
# Limits of layers, which are planned one by one, and of other sizes. No model has as many: a
# mistyped number would be searched for hours, or allocated at once.
_MOST_LAYERS, _MOST_SIZE = 10_000, 2**31 - 1  # chosen
_LAYERS = frozenset({"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"})
_MOST_NUMBER = 1e30  # chosen: for other numbers; larger ones overflow
_T = TypeVar("_T")


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError."""
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
    """The GGUF file of a model's path: the path itself, or the only one in a folder without
    config.json; else None."""
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def wrong_file(path: Path, reason: str) -> InputError:
    """An InputError for a model's file that cannot be used."""
    return wrong(path.parent, path.name, None, reason)


class ConfigValues:
    """The values of the config.json at `path`, or of the section under its key `prefix`. `asked`:
    keys that were read, present or not. Unless a method says otherwise, null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "",
                 mistakes: list[Mistake] | None = None, asked: set[str] | None = None) -> None:
        self.values, self._path, self._prefix = dict(values), path, prefix
        self.asked: set[str] = set() if asked is None else asked
        self._mistakes: list[Mistake] = [] if mistakes is None else mistakes

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(self._prefix + key)
        return self.values.get(key, default)

    def size(self, key: str) -> int:
        """A count of at least 1, which is required."""
        if self.get(key) is None:
            self.reject(key, f"{'null' if key in self.values else 'missing'}: {_SIZE}")
            return 1
        return self.size_or_none(key) or 1

    def size_or_none(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A count of at least `least`; `default` where the key is absent."""
        most = _MOST_LAYERS if key in _LAYERS else _MOST_SIZE
        value, allowed = self.get(key), f"a whole number >= {least}"
        return self._given(
            key, default, lambda value: type(value) is int and least <= value <= most,
            f"{allowed}, at most {most:,}" if type(value) is int and value > most else allowed)

    def number(self, key: str, default: float | None) -> float:
        """A number above 0; `default` where the key is absent. null is a mistake."""
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
        """The first `count` values of a list, each one of `known`; [] where the key is absent or
        its list empty."""
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
        """A truth value; `default` where the key is absent."""
        return self._given(key, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str, default: str, known: Mapping[str, object] | tuple[str, ...],
             more: str = "") -> str:
        """One of the `known` texts; `default` where the key is absent. null is a mistake. `more`:
        text appended to the message."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"{'missing' if value == '' else 'is not supported'}: known: "
                             f"{', '.join(known)}{more}")
            return default
        return value

    def section(self, key: str) -> ConfigValues:
        """The values under `key`; empty where it is absent."""
        values: dict[str, Any] = self._given(key, {}, lambda value: isinstance(value, dict),
                                             "a mapping of keys to values")
        return ConfigValues(values, self._path, f"{self._prefix}{key}.", self._mistakes,
                            self.asked)

    def _given(self, key: str, default: _T, is_allowed: Callable[[Any], bool],
               allowed: str) -> Any | _T:
        """The value; `default` where the key is absent, or the value not allowed (a mistake)."""
        value = self.get(key)
        if value is not None and not is_allowed(value):
            self.reject(key, allowed)
            return default
        return default if value is None else value

    def only(self, key: str, supported: object) -> None:
        """Records a mistake unless the key is absent or its value is `supported`: other variants
        would yield wrong tokens."""
        if self.get(key, supported) != supported:
            known = json.dumps(supported) if not isinstance(supported, str) else repr(supported)
            self.reject(key, f"is not supported, only {known} is")

    def divides(self, key: str, whole_key: str) -> None:
        """Records a mistake if the size under `key` does not divide that under `whole_key`."""
        part, whole = self.get(key), self.get(whole_key)
        if (isinstance(part, int) and isinstance(whole, int) and part >= 1 and whole >= 1
                and whole % part):
            self.reject(key, f"a divisor of {whole_key} = {whole}")

    def reject(self, key: str, allowed: str, value: object = None) -> None:
        """Records a mistake. `value`: shown instead of the key's own value."""
        shown = self.get(key) if value is None else value
        self._mistakes.append(Mistake(file=str(self._path), line=None, key=self._prefix + key,
                                      value=shown, allowed=allowed))

    def finish(self) -> None:
        """Raises InputError with all mistakes, if there are any."""
        if self._mistakes:
            raise InputError(self._mistakes)
