"""The queries active in one group, and what its next decode step costs by."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class GroupRows:
    """Contexts grow in step, so (context - iterations so far), a row's base, orders rows for good
    and their sum changes only when rows come and go."""

    def __init__(self) -> None:
        self.iterations = 0  # decode steps so far
        # steps whose tokens are not taken up yet: (when they are there, whose first and whose last
        # are among them)
        self.awaited: list[tuple[float, Sequence[int], list[int]]] = []
        self.rows = 0  # active ones, and dead ones of a static batch
        self.fresh: list[int] = []  # who joined without a token, and was not decoded yet
        self._removed = 0  # since the last decode step: holes that compaction fills
        self._members: dict[int, tuple[int, int]] = {}  # query -> (base, iteration of its last)
        self._base = 0  # sum over rows
        self._ends: dict[int, list[int]] = {}  # iteration -> queries whose last it is
        self._longest: list[tuple[int, int]] = []  # heap of (-base, query), some of them gone

    def __contains__(self, query: int) -> bool:
        return query in self._members

    def join(self, query: int, context: int, iterations: int) -> None:
        """A query with that many tokens of context that needs `iterations` more steps."""
        base, end = context - self.iterations, self.iterations + iterations
        self._members[query] = (base, end)
        self._base += base
        self.rows += 1
        if iterations > 0:
            self._ends.setdefault(end, []).append(query)
            heapq.heappush(self._longest, (-base, query))

    def decode(self) -> tuple[int, float, float, float]:
        """One more iteration: (rows, mean context, longest context, rows moved before it).

        Compaction moves only rows behind the new end into holes before it: of r holes among n + r
        places r * n / (n + r) in the mean."""
        self.iterations += 1
        rows, removed, self._removed = self.rows, self._removed, 0
        longest = self._longest
        while longest and not self._is_member(*longest[0]):
            heapq.heappop(longest)  # it left, or left and came again
        context = self._base / rows + self.iterations
        top = -longest[0][0] + self.iterations if longest else context
        return rows, context, float(top), removed * rows / (rows + removed) if removed else 0.0

    def _is_member(self, minus_base: int, query: int) -> bool:
        member = self._members.get(query)
        return member is not None and member[0] == -minus_base

    def take_done(self) -> list[int]:
        """Queries whose last iteration is the latest; their rows stay until `leave`."""
        at = self.iterations
        # one that left and came again may be there twice
        return [query for query in dict.fromkeys(self._ends.pop(at, ()))
                if self._members.get(query, (0, -1))[1] == at]

    def leave(self, query: int) -> int:
        """Its row is free; how many iterations it still had to go."""
        base, end = self._members.pop(query)
        self._base -= base
        self.rows -= 1
        self._removed += 1
        return end - self.iterations

    def clear(self) -> None:
        """All rows are gone, dead ones too."""
        self._members.clear()
        self._ends.clear()
        self._longest.clear()
        self._base = self.rows = self._removed = 0
