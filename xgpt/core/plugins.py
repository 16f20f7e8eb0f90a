"""Rows that other installed packages add to a table of ours, by entry points."""

from importlib import import_module
from typing import Any


def rows_of_others(group: str) -> dict[str, str]:
    """Name -> "module:attribute" of every entry point of the group."""
    # takes a tenth of a second: only who asks for such a row pays for it
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}


def load_row(place: str) -> Any:
    """What "module:attribute" names."""
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)
