"""Reading a Hugging Face `config.json` key by key, collecting every mistake instead of the first.

A reader that fails records what is wrong and returns a stand-in; `finish` raises if there was any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_SIZE = "a whole number >= 1"


class ConfigMistake(NamedTuple):
    """One wrong value. `value` is None where the key is missing or null."""

    key: str
    value: object
    allowed: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}: {self.allowed}"


class ConfigError(ValueError):
    """A config.json of no model that xgpt can execute, with every reason."""

    def __init__(self, mistakes: list[ConfigMistake]) -> None:
        assert mistakes, "a ConfigError without a mistake"
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(map(str, mistakes)))


class ConfigValues:
    """The values of one config.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._mistakes: list[ConfigMistake] = []

    def size(self, key: str) -> int:
        """A count that has to be there."""
        if self._values.get(key) is None:
            self.reject(key, f"{'null' if key in self._values else 'missing'}: {_SIZE}")
            return 1
        return self.size_or_none(key) or 1

    def size_or_none(self, key: str) -> int | None:
        """A count, or None where the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.reject(key, _SIZE)
            return None
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0; `default` where the key is absent."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.reject(key, "null: a number above 0" if value is None else "a number above 0")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """`default` where the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.reject(key, "true or false")
            return default
        return value

    def text(self, key: str, default: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
        """One of the `known`; `default` where the key is absent."""
        value = self._values.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"{'missing' if value == '' else 'is not supported'}: known: "
                             f"{', '.join(known)}")
            return default
        return value

    def section(self, key: str) -> ConfigValues:
        """The values under `key`, with mistakes of their own; none where it is absent or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            self.reject(key, "a mapping of keys to values")
        return ConfigValues(value if isinstance(value, dict) else {})

    def items(self) -> dict[str, Any]:
        return dict(self._values)

    def only(self, key: str, supported: object, why: str = "") -> None:
        """A variant that would run with wrong tokens is refused instead."""
        if self._values.get(key, supported) != supported:
            self.reject(key, f"is not supported, only {_json(supported)} is{why}")

    def divides(self, key: str, whole_key: str) -> None:
        """Two sizes, of which the first has to divide the second."""
        part, whole = self._values.get(key), self._values.get(whole_key)
        if (isinstance(part, int) and isinstance(whole, int) and part >= 1 and whole >= 1
                and whole % part):
            self.reject(key, f"a divisor of {whole_key} = {whole}")

    def reject(self, key: str, allowed: str) -> None:
        self._mistakes.append(ConfigMistake(key, self._values.get(key), allowed))

    def include(self, section: ConfigValues, key: str) -> None:
        """Takes over the mistakes of the section `key`."""
        self._mistakes += [m._replace(key=f"{key}.{m.key}") for m in section._mistakes]

    def finish(self) -> None:
        if self._mistakes:
            raise ConfigError(self._mistakes)


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
