"""Best-first branch and bound over boxes of integers (paper section 5.1, Algorithm 1), maximising.

Nothing here knows what is searched. The caller's `examine` looks at boxes in batches and says of
each: an upper bound on the objective of every admissible point in it, the best admissible point it
happened to see, a smaller box that holds the same admissible points if it found one, whether the
box is settled, and if it holds no admissible point, why. What is proved is as true as those upper
bounds are; this file only keeps the books: a box is split until its bound is within `gap` of the
incumbent, and the bound of the whole is the highest of those given up.

Order is explicit: boxes by (bound, age), incumbents by (objective, then the smaller point), so the
same input gives the same answer whatever the clock."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xgpt.core.schedule import Status

# Boxes beside the roots after which a gap that nobody asked for widens, as the square of all looked
# at: where thousands of points are as good as each other, closing them one by one proves little
# more. And after which a search is left that has found nothing, where nothing is had elsewhere.
MANY_NODES, FRUITLESS_NODES = 1600, 3000
MANY_ROOTS = 500  # of more roots it is as many times fewer boxes: each takes longer there
BATCH = 128  # best boxes split at a time: to `examine` some is quicker in arrays of many
AGAIN = 4  # times as many are examined again at a time
WORSE = "no better than the incumbent"  # why a box is given up
WORTH_IT = 4  # times as many boxes as roots and a batch: of more it is quicker to begin anew


# A search makes tens of thousands of boxes, candidates and results: tuples, which take a third of
# the time that frozen data classes do.
class Box(NamedTuple):
    """All integer points between `lower` and `upper`, both included. `root` tells which of the
    caller's spaces it is part of."""

    root: int
    lower: tuple[int, ...]
    upper: tuple[int, ...]

    @property
    def num_points(self) -> int:
        number = 1
        for low, up in zip(self.lower, self.upper, strict=True):
            number *= up - low + 1
        return number

    def split(self) -> tuple[Box, Box]:
        """Halves along the side of largest ratio, at the geometric middle: sizes act in ratios."""
        ratios = [math.log((up + 1) / (low + 1)) if up > low else -1.0
                  for low, up in zip(self.lower, self.upper, strict=True)]
        axis = ratios.index(max(ratios))
        low, up = self.lower[axis], self.upper[axis]
        assert low < up, f"a single point cannot be split: {self = }"
        middle = min(max(math.isqrt(max(low, 1) * up), low), up - 1)
        below, above = _replaced(self.upper, axis, middle), _replaced(self.lower, axis, middle + 1)
        return (Box(root=self.root, lower=self.lower, upper=below),
                Box(root=self.root, lower=above, upper=self.upper))


class Candidate(NamedTuple):
    """An admissible point and its objective."""

    objective: float
    root: int
    point: tuple[int, ...]

    @property
    def rank(self) -> tuple[float, int, tuple[int, ...]]:
        """Sorts better candidates first; of equals the earlier root, the smaller point."""
        return (-self.objective, self.root, self.point)


class NodeResult(NamedTuple):
    """What `examine` found out about one box."""

    box: Box  # as examined, or contracted
    reason: str  # why it is settled; counted
    upper_bound: float = -math.inf  # of the objective over its admissible points; -inf: it has none
    best: Candidate | None = None  # best admissible point seen in it
    is_settled: bool = True  # nothing would be gained by splitting it
    is_glance: bool = False  # it is to be examined again, not split, when it is its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The incumbent and what was proved. `closed` counts discarded boxes by reason; `per_root` has
    each root's best candidate and upper bound (-inf: no admissible point)."""

    status: Status
    best: Candidate | None
    upper_bound: float
    nodes: int
    closed: tuple[tuple[str, int], ...]
    per_root: tuple[tuple[Candidate | None, float], ...]


def maximise(roots: Sequence[Box], examine: Callable[[Sequence[Box]], Sequence[NodeResult]], *,
             gap: float, max_nodes: int | None = None,
             split: Callable[[Box], Sequence[Box]] = Box.split, floor: float = 0.0,
             ends: Callable[[int, float, float], bool] | None = None) -> Outcome:
    """The best admissible point of the roots, within the relative `gap` of the optimum (more, after
    MANY_NODES boxes: the outcome's upper bound says how much).

    roots: numbered 0, 1, ... by their `root`. They are always examined; `max_nodes` is looked at
    after each batch of boxes. floor: an objective that is had elsewhere: boxes that are no better
    are given up too, so that a best point worse than it is the best only of those looked at. ends:
    told after each batch of (boxes looked at, best objective, upper bound); True: stop here, as at
    `max_nodes`."""
    return Maximisation(roots, examine, gap=gap, split=split).go_on(
        max_nodes=max_nodes, floor=floor, ends=ends)


class Maximisation:
    """A search that can be gone on with where it was left, perhaps for a higher floor."""

    def __init__(self, roots: Sequence[Box],
                 examine: Callable[[Sequence[Box]], Sequence[NodeResult]], *, gap: float,
                 keeps_gap: bool = False, known: Candidate | None = None,
                 split: Callable[[Box], Sequence[Box]] = Box.split,
                 earlier: Earlier | None = None) -> None:
        """See `maximise`. keeps_gap: the gap is the same after any number of boxes. known: an
        admissible point that was seen before. earlier: its boxes and their bounds are what is begun
        with, and each is examined again only once it is its turn."""
        assert gap >= 0, f"{gap = }"
        assert [box.root for box in roots] == list(range(len(roots))), f"{roots = }"
        self._roots, self._examine, self._split = roots, examine, split
        self._tree = _SearchTree(gap, len(roots), keeps_gap=keeps_gap)
        if known is not None:
            self._tree.note(known)
        self._has_begun, self._earlier = False, earlier

    def go_on(self, *, max_nodes: int | None = None, floor: float = 0.0,
              ends: Callable[[int, float, float], bool] | None = None) -> Outcome:
        """What `maximise` returns; `max_nodes` is of all boxes looked at so far. Boxes that were
        given up for a floor stay so."""
        tree = self._tree
        tree.raise_floor(floor)
        if not self._has_begun:
            self._has_begun = True
            earlier, self._earlier = self._earlier, None
            if earlier is None or not earlier.search._has_begun or not tree.begin_with(
                    earlier.search._tree, is_same=earlier.is_same):
                tree.add(self._examine(self._roots) if self._roots else [], are_roots=True)
        while tree.is_open:
            if (max_nodes is not None and tree.nodes >= max_nodes) or tree.is_fruitless or (
                    ends is not None and ends(tree.nodes, tree.incumbent, tree.upper_bound)):
                return tree.outcome(Status.LIMIT)
            tree.add(self._examine([child for box, is_known in tree.pop(BATCH)
                                    for child in (self._split(box) if is_known else [box])]))
        return tree.outcome(Status.INFEASIBLE if tree.best is None else Status.OPTIMAL)


class Earlier(NamedTuple):
    """A search of the same roots, where all that is admissible in a later one is so too; where it
    `is_same`, no more is: what it has looked into need not be looked into again."""

    search: Maximisation
    is_same: bool


class _SearchTree:
    """Open boxes, the incumbent, and what was closed and why."""

    def __init__(self, gap: float, num_roots: int, *, keeps_gap: bool) -> None:
        self.best: Candidate | None = None
        self._floor = -math.inf
        self.nodes = self._age = 0
        self._gap, self._keeps_gap, self._num_roots = gap, keeps_gap, num_roots
        self._many = MANY_NODES * min(MANY_ROOTS / max(num_roots, 1), 1.0)
        # (-upper bound, age, box, whether that was found out here, not in a wider search, nor at a
        # glance)
        self._queue: list[tuple[float, int, Box, bool]] = []
        # closed boxes that have admissible points, and whether they were looked into
        self._given_up: list[tuple[float, Box, bool]] = []
        self._closed: Counter[str] = Counter()
        self._ruled_out: Counter[str] = Counter()  # of these, boxes without an admissible point
        self._root_best: list[Candidate | None] = [None] * num_roots
        self._root_bound = [-math.inf] * num_roots  # of boxes closed

    @property
    def is_open(self) -> bool:
        """A box is left that could improve the incumbent by more than the gap."""
        return bool(self._queue) and -self._queue[0][0] > self._cutoff

    @property
    def incumbent(self) -> float:
        """The best objective found or had elsewhere; -inf where there is none."""
        return max(-math.inf if self.best is None else self.best.objective, self._floor)

    @property
    def upper_bound(self) -> float:
        """What no admissible point of an open box exceeds."""
        return -self._queue[0][0] if self._queue else -math.inf

    @property
    def _cutoff(self) -> float:
        return self._cutoff_at(self.incumbent)

    def _cutoff_at(self, most: float) -> float:
        """That of so high an incumbent."""
        widened = 1.0 if self._keeps_gap else max(self._further / self._many, 1.0)
        return most * (1 + self._gap * widened**2) if most > 0 else most

    @property
    def is_fruitless(self) -> bool:
        """Whether to leave it, since nothing was found in many boxes, and nothing is had."""
        return not self._keeps_gap and self.incumbent <= 0 and self._further >= FRUITLESS_NODES

    @property
    def _further(self) -> int:
        """Boxes looked at besides the roots."""
        return self.nodes - self._num_roots

    def begin_with(self, wider: _SearchTree, *, is_same: bool) -> bool:
        """The boxes of a wider search that has begun: those without admissible points have none
        here; of one that `is_same` the best points are so here, too. False where that would be no
        quicker than to begin anew: boxes that were divided for the best of the wider one may have
        nothing here all together."""
        queue = ((bound, box, is_known) for bound, _, box, is_known in wider._queue)
        left = [*queue, *wider._given_up]
        if is_same:
            for found in filter(None, wider._root_best):
                self.note(found)
        cutoff = self._cutoff
        again = sum(-bound > cutoff for bound, _, _ in left)
        if again > WORTH_IT * (self._num_roots + BATCH) and not is_same:
            return False
        self._num_roots = again  # nor does any of these count as divided
        self._closed += wider._ruled_out
        self._ruled_out += wider._ruled_out
        self._queue = [(bound, age - len(left), box, is_known and is_same and box.num_points > 1)
                       for age, (bound, box, is_known) in enumerate(left)]
        heapq.heapify(self._queue)
        return True

    def raise_floor(self, floor: float) -> None:
        """So much is had elsewhere."""
        if floor > 0:
            self._floor = max(self._floor, floor)

    def add(self, results: Sequence[NodeResult], *, are_roots: bool = False) -> None:
        """What was found out about boxes; those that were but glanced at do not count again."""
        for result in results:
            if result.best is not None:
                self.note(result.best)
        most = self.incumbent
        cutoff, few = self._cutoff_at(most), self._many + self._num_roots
        closed, bounds = self._closed, self._root_bound  # a search closes tens of thousands
        for age, (box, reason, upper_bound, _, is_settled, is_glance) in enumerate(
                results, start=self._age + 1):
            self.nodes += are_roots or not is_glance
            if self.nodes > few:  # it is the same for all, until it widens
                cutoff = self._cutoff_at(most)
            if not is_settled and upper_bound > cutoff:
                heapq.heappush(self._queue, (-upper_bound, age, box, not is_glance))
                continue
            reason = reason if is_settled else WORSE
            closed[reason] += 1
            if upper_bound > -math.inf:
                bounds[box.root] = max(bounds[box.root], upper_bound)
                self._given_up.append((-upper_bound, box, not is_glance))
            else:
                self._ruled_out[reason] += 1
        self._age += len(results)

    def note(self, found: Candidate) -> None:
        """An admissible point."""
        self.best = _better(self.best, found)
        self._root_best[found.root] = _better(self._root_best[found.root], found)

    def pop(self, count: int) -> list[tuple[Box, bool]]:
        """The `count` boxes of highest bound that can still matter, and whether their bounds were
        found out here; AGAIN times as many of those whose bounds were not."""
        boxes: list[tuple[Box, bool]] = []
        room = AGAIN * count
        while self.is_open and room > 0:
            _, _, box, is_known = heapq.heappop(self._queue)
            boxes.append((box, is_known))
            room -= AGAIN if is_known else 1
        return boxes

    def outcome(self, status: Status) -> Outcome:
        """The books as they would be with what is open closed."""
        reason = "left open" if status is Status.LIMIT else WORSE
        closed, bounds = self._closed.copy(), self._root_bound.copy()
        for bound, _, box, _ in self._queue:
            closed[reason] += 1
            bounds[box.root] = max(bounds[box.root], -bound)
        incumbent = -math.inf if self.best is None else self.best.objective
        return Outcome(status=status, best=self.best, nodes=self.nodes,
                       upper_bound=max(incumbent, *bounds), closed=tuple(sorted(closed.items())),
                       per_root=tuple(zip(self._root_best, bounds, strict=True)))


def _better(one: Candidate | None, other: Candidate) -> Candidate:
    return other if one is None or other.rank < one.rank else one


def _replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1:])
