"""Progress of a search, and its time limit."""

from __future__ import annotations

import math
import time

from xgpt.core.units import format_seconds


class Watch:
    """Adds up the seconds spent inside `with watch:` since `reset`. A search calls `cuts` and ends
    once the time limit is over; all that it has proved until then holds. Without a limit the clock
    has no influence on the search."""

    def __init__(self, max_seconds: float | None = None) -> None:
        """max_seconds: time limit of a search; None: no limit."""
        self._most_s = math.inf if max_seconds is None else max_seconds
        self._depth, self._before_s, self._begin_s = 0, 0.0, 0.0
        self._points = self._replays = 0
        self.has_cut = False  # a search was ended by the limit

    def __enter__(self) -> Watch:
        if self._depth == 0:
            self._begin_s = time.monotonic()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._before_s += time.monotonic() - self._begin_s

    def reset(self) -> None:
        """Starts again from zero, for another schedule."""
        self._before_s, self._begin_s, self.has_cut = 0.0, time.monotonic(), False
        self._points = self._replays = 0

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._begin_s if self._depth else 0.0)

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._most_s

    def cuts(self) -> bool:
        """Whether the search must end now, unfinished."""
        self.has_cut = self.has_cut or self.is_over
        return self.is_over

    def note(self, points: int, replays: int) -> None:
        """Records the number of configurations evaluated, and of those replayed."""
        self._points, self._replays = points, replays

    @property
    def words(self) -> str:
        """Progress of the present search in words; "" before its first report."""
        if not self._points:
            return ""
        limit = "" if math.isinf(self._most_s) else f", ends after {format_seconds(self._most_s)}"
        return f"{self._points:,} configurations, {self._replays:,} of them simulated{limit}"
