"""Deadlines of requests. In columns they are seconds from the job's start, infinite for none; a
time of day, before that start is known, is a negative number."""

import math
import re
from datetime import datetime, timedelta

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray

WORDS = "a number of seconds above 0, or a time of day such as '17:30'"
_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d)?")
_DAY_S = 86_400


def is_deadline(value: object) -> bool:
    """Whether `value` is a deadline as a request may have it."""
    if isinstance(value, str):
        return _TIME_OF_DAY.fullmatch(value.strip()) is not None
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def deadline_of(value: str | float | None) -> float:
    """The deadline as in columns; a time of day counts down to its midnight, negative."""
    if not isinstance(value, str):
        return math.inf if value is None else float(value)
    hours, minutes, seconds = (*map(int, value.split(":")), 0)[:3]
    return float((hours * 60 + minutes) * 60 + seconds - _DAY_S)


def in_seconds(deadlines_s: FloatArray | None, rows: IntArray, limit_s: float,
               start: float) -> FloatArray | None:
    """Deadlines of the requests `rows`, [rows], in seconds from the clock time `start`: their own,
    a time of day the next one after the start in local time, or else `limit_s`; None without
    any."""
    if deadlines_s is None:
        return None if math.isinf(limit_s) else np.full(len(rows), limit_s)
    found = np.where(np.isinf(deadlines_s), limit_s, deadlines_s)[rows]
    began = datetime.fromtimestamp(start)
    midnight = datetime(began.year, began.month, began.day)
    for own in np.unique(found[found < 0]).tolist():
        at = midnight + timedelta(seconds=own + _DAY_S)
        at += timedelta(days=at <= began)
        found[found == own] = at.timestamp() - start
    return found
