# owner ta
"""Screens and pages as committed text: what is shown is compared with a file of screens, each below
a line `== NAME`. With XGPT_SCREENS=write in the environment the file is written anew."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path


def check_screen(place: Path, name: str, text: str) -> None:
    """`place`: the file of screens. A line wider than 100 columns is wrapped for it."""
    shown = "\n".join(wrapped(line) for line in text.rstrip("\n").split("\n"))
    known = screens(place)
    if os.environ.get("XGPT_SCREENS") == "write":
        known[name] = shown
        place.write_text("".join(f"== {one}\n{own}\n" for one, own in known.items()), "utf-8")
    assert shown == known.get(name), f"screen {name!r} of {place.name}: set XGPT_SCREENS=write?"


def screens(place: Path) -> dict[str, str]:
    """Name -> text."""
    parts = re.split(r"^== (.*)\n", place.read_text("utf-8"), flags=re.M) if place.is_file() else []
    return dict(zip(parts[1::2], (text[:-1] for text in parts[2::2]), strict=True))


def wrapped(line: str) -> str:
    return line if len(line) <= 100 else textwrap.fill(
        line, 100, break_long_words=False, break_on_hyphens=False)


def without_figures(text: str) -> str:
    """The text with `#` for each number, and one space where there are several: what a screen says
    whatever a plan's figures are."""
    return re.sub(r"  +", " ", re.sub(r"\d[\d.,]*", "#", text))
