"""What a search is watched by: how long it may take, and how far it is."""

from __future__ import annotations

import math
import time

from xgpt.core.units import format_seconds


class Watch:
    """Counts the seconds between `with watch:` and its end, all of them together until `reset`. A
    search tells it how far it is, and ends once it `is_over`: what it has proved until then still
    holds. Without a limit it never is, and the search is the same whatever the clock says."""

    def __init__(self, max_seconds: float | None = None) -> None:
        """max_seconds: that a search may take; None: as many as it does."""
        self._most_s = math.inf if max_seconds is None else max_seconds
        self._depth, self._before_s, self._begin_s = 0, 0.0, 0.0
        self._best, self._upper, self._nodes = 0.0, math.inf, 0
        self.has_cut = False  # a search was ended that had not proved what it was to

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
        """Begins anew, for another schedule."""
        self._before_s, self._begin_s, self.has_cut = 0.0, time.monotonic(), False
        self._best, self._upper, self._nodes = 0.0, math.inf, 0

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._begin_s if self._depth else 0.0)

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._most_s

    def cuts(self) -> bool:
        """Whether what is under way must end here, unfinished."""
        self.has_cut = self.has_cut or self.is_over
        return self.is_over

    def ends(self, nodes: int, best: float, upper: float) -> bool:
        """Takes note of a search under way: the boxes it has looked at, the best objective it has
        found (-inf: none), and what none exceeds. True once it must end."""
        self._nodes, self._best, self._upper = nodes, best, upper
        return self.cuts()

    @property
    def words(self) -> str:
        """How far the present search is; "" before it has told."""
        if not self._nodes:
            return ""
        found = ("none found yet" if self._best <= 0 else
                 f"best {self._best:.4g} queries/s, at most {self._upper:.4g} possible")
        limit = "" if math.isinf(self._most_s) else f", ends after {format_seconds(self._most_s)}"
        groups = "1 group" if self._nodes == 1 else f"{self._nodes:,} groups"
        return f"{groups} of configurations, {found}{limit}"
