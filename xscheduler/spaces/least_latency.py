"""The least latency of a continuously batching policy, climbed down to from few queries at a time:
where nothing that promised most keeps a bound, what is quickest tells whether anything does.

Few queries at a time are quickest where step times rise with their size. Where they do not, as of
noisy profiles and of pipelines whose groups must all have a query, some more are, and other token
budgets; and where memory is short, small budgets alone leave room for a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from xscheduler.admissible import Limit
from xscheduler.spaces.continuous_points import Key, Point, is_admissible

STARTS, ROUNDS = 4, 12  # points that are climbed down from together, and how often
OF_TIMES = (Limit.NONE, Limit.TTFT, Limit.TPOT)  # what a quicker one may mend
LEAST_BUDGET, FEW = 16, (1, 2, 3, 4, 6, 8, 12, 16)  # tokens; queries that are all looked at
SHARES = (0.5, 0.7, 0.85, 0.97, 1.0, 1.03, 1.18, 1.4, 2.0)  # of a value: looked at beside it


class Points(Protocol):
    """A space of max_active from `active[0]` to `active[1]`, and of ranges of `budgets`: one of
    each, its least and its most."""

    active: tuple[int, int]
    budgets: list[tuple[int, int, int]]

    def evaluate(self, keys: Sequence[Key]) -> list[Point]: ...


def quickest(space: Points, stages: Mapping[int, int], latency_bound_s: float) -> list[Key]:
    """Admissible points within the bound, as soon as there are some; else the quickest that were
    found, whatever forbids them. stages: of each tensor plan that is looked into."""
    tops = _first(space, [key for plan in stages for key in _starts(space, plan, stages[plan])])
    for _ in range(ROUNDS):
        kept = [key for key, point in zip(tops, space.evaluate(tops), strict=True)
                if is_admissible(point, latency_bound_s)]
        if kept:
            return kept
        lower = _first(space, [*tops, *(beside for key in tops for beside in _beside(space, key))])
        if lower == tops:
            break
        tops = lower
    return tops


def _first(space: Points, keys: Sequence[Key]) -> list[Key]:
    """The quickest of these, those first that nothing but times forbids, each of another number of
    queries: budgets that no step fills are all as quick."""
    points = dict(zip(keys, space.evaluate(keys), strict=True))
    bests = dict[tuple[int, int], Key]()
    for key in sorted(points, key=lambda key: (
            points[key].limit not in OF_TIMES, points[key].latency_s, key)):
        bests.setdefault(key[:2], key)
        if len(bests) == STARTS:
            break
    return list(bests.values())


def _starts(space: Points, plan: int, stages: int) -> list[Key]:
    """One query, and one in each group, in steps of budgets a factor of 2 apart."""
    first, last = space.active
    budgets = {budget for budget, _, _ in space.budgets}
    smallest, least, _ = space.budgets[0]
    while smallest // 2 >= max(least, LEAST_BUDGET):
        budgets.add(smallest := smallest // 2)
    return [(plan, active, budget) for active in sorted({first, min(max(stages, first), last)})
            for budget in sorted(budgets)]


def _beside(space: Points, key: Key) -> list[Key]:
    """Points around one, those next to it among them."""
    plan, active, budget = key
    actives = {*FEW, *_near(active)}
    (first, last), least, most = space.active, space.budgets[0][1], space.budgets[-1][2]
    return [(plan, one, other) for one in sorted({min(max(one, first), last) for one in actives})
            for other in sorted({min(max(other, least), most) for other in _near(budget)})]


def _near(value: int) -> list[int]:
    return [value - 1, value + 1, *(round(value * share) for share in SHARES)]
