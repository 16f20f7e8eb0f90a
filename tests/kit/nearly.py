"""Texts with figures of which floating point, or a tie, decides the last digits: no two kinds of
processor need agree on those."""

from __future__ import annotations

import re

import pytest

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def nearly(text: str, other: str) -> bool:
    """Whether the texts have the same words, and numbers within 1 % of each other."""
    own, others = ([float(number) for number in _NUMBER.findall(each)] for each in (text, other))
    return _NUMBER.sub("#", text) == _NUMBER.sub("#", other) and (
        own == pytest.approx(others, rel=0.01))
