"""Best-first branch and bound over boxes of integers (paper section 5.1, Algorithm 1), maximising.

Nothing here knows what is searched. The caller's `examine` looks at boxes in batches and says of
each: an upper bound on the objective of every admissible point in it, the best admissible point it
happened to see, whether that settles the box, and if there is no admissible point, why. What is
proved is as true as those upper bounds are; this file only keeps the books: a box is split until
its bound is within `gap` of the incumbent, and the bound of the whole is that of the best box left.

Order is explicit: boxes by (bound, age), incumbents by (objective, then the smaller point), so the
same input gives the same answer whatever the clock, unless `max_seconds` cuts it short.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

BATCH = 16  # best boxes split at a time, so that `examine` can work on arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """All integer points between `lower` and `upper`, both included. `root` tells which of the
    caller's spaces it is part of."""

    root: int
    lower: tuple[int, ...]
    upper: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(low <= up for low, up in zip(self.lower, self.upper, strict=True)), f"{self = }"

    @property
    def num_points(self) -> int:
        return math.prod(up - low + 1 for low, up in zip(self.lower, self.upper, strict=True))

    def split(self) -> tuple[Box, Box]:
        """Halves along the side of largest ratio, at the geometric middle: sizes act in ratios."""
        ratios = [math.log((up + 1) / (low + 1)) if up > low else -1.0
                  for low, up in zip(self.lower, self.upper, strict=True)]
        axis = ratios.index(max(ratios))
        low, up = self.lower[axis], self.upper[axis]
        assert low < up, f"a single point cannot be split: {self = }"
        middle = min(max(math.isqrt(max(low, 1) * up), low), up - 1)
        return (Box(root=self.root, lower=self.lower, upper=_replaced(self.upper, axis, middle)),
                Box(root=self.root, lower=_replaced(self.lower, axis, middle + 1), upper=self.upper))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An admissible point and its objective."""

    objective: float
    root: int
    point: tuple[int, ...]

    @property
    def rank(self) -> tuple[float, int, tuple[int, ...]]:
        """Sorts better candidates first; of equals the earlier root, the smaller point."""
        return (-self.objective, self.root, self.point)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """What `examine` found out about one box."""

    upper_bound: float  # of the objective over its admissible points; -inf if there is none
    best: Candidate | None  # best admissible point seen in it
    is_settled: bool  # `best` is its optimum, or it has no admissible point
    reason: str  # why it holds none, or what the bound rests on; counted


class Status(Enum):
    """How a search ended; the value is what is shown."""

    OPTIMAL = "optimal"
    LIMIT = "stopped at its limit"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The incumbent and what was proved. `closed` counts discarded boxes by reason."""

    status: Status
    best: Candidate | None
    upper_bound: float
    nodes: int
    closed: tuple[tuple[str, int], ...]


def maximise(roots: Sequence[Box], examine: Callable[[Sequence[Box]], Sequence[NodeResult]], *,
             gap: float, max_nodes: int | None = None, max_seconds: float | None = None) -> Outcome:
    """The best admissible point of the roots, within the relative `gap` of the optimum."""
    assert gap >= 0, f"{gap = }"
    deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
    search = _Search(gap)
    search.add(roots, examine(roots) if roots else [])
    while search.queue and search.queue_bound > search.cutoff:
        if (max_nodes is not None and search.nodes >= max_nodes) or time.monotonic() > deadline:
            return search.outcome(Status.LIMIT)
        children = [child for box in search.pop(BATCH) for child in box.split()]
        search.add(children, examine(children))
    return search.outcome(Status.INFEASIBLE if search.best is None else Status.OPTIMAL)


class _Search:
    """Open boxes, the incumbent, and the count of what was closed and why."""

    def __init__(self, gap: float) -> None:
        self.queue: list[tuple[float, int, Box]] = []  # (-upper bound, age, box)
        self.best: Candidate | None = None
        self.nodes = 0
        self._gap = gap
        self._closed: Counter[str] = Counter()
        self._closed_bound = -math.inf  # of boxes given up although their bound was higher

    @property
    def queue_bound(self) -> float:
        return -self.queue[0][0]

    @property
    def cutoff(self) -> float:
        """Boxes whose bound does not exceed it cannot improve the incumbent by more than the gap."""
        return -math.inf if self.best is None else self.best.objective * (1 + self._gap)

    def add(self, boxes: Sequence[Box], results: Sequence[NodeResult]) -> None:
        for result in results:
            if result.best is not None and (self.best is None or result.best.rank < self.best.rank):
                self.best = result.best
        for box, result in zip(boxes, results, strict=True):
            self.nodes += 1
            if result.is_settled:
                self._closed[result.reason] += 1
            elif result.upper_bound <= self.cutoff:
                self._close(result.upper_bound)
            else:
                heapq.heappush(self.queue, (-result.upper_bound, self.nodes, box))

    def pop(self, count: int) -> list[Box]:
        """The `count` boxes of highest bound that can still matter."""
        boxes = []
        while self.queue and self.queue_bound > self.cutoff and len(boxes) < count:
            boxes.append(heapq.heappop(self.queue)[2])
        return boxes

    def outcome(self, status: Status) -> Outcome:
        while self.queue and status is not Status.LIMIT:
            self._close(-heapq.heappop(self.queue)[0])
        found = -math.inf if self.best is None else self.best.objective
        left = self.queue_bound if self.queue else -math.inf
        return Outcome(status=status, best=self.best, nodes=self.nodes,
                       upper_bound=max(found, left, self._closed_bound),
                       closed=tuple(sorted(self._closed.items())))

    def _close(self, bound: float) -> None:
        self._closed["no better than the incumbent"] += 1
        self._closed_bound = max(self._closed_bound, bound)


def _replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1:])
