"""How results of the library show themselves in a notebook, and as tables of pandas."""

import importlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from xgpt.core.errors import MissingExtraError


class Printed:
    """An object that a notebook shows as the text that `print` shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas.DataFrame of the rows. Raises MissingExtraError without pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise MissingExtraError("pandas", "pandas", "a table of pandas") from None
    return pandas.DataFrame([*rows])
