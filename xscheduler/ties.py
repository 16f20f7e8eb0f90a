"""Which of schedules that are as good as each other is taken: the simplest, so that machines whose
sums differ in the last digit agree."""

from __future__ import annotations

from collections.abc import Sequence

from xscheduler.alternatives import BestPoint

DIGITS = 10  # of a figure that are compared: chosen; rounding, which differs, is far below


def told(figure: float) -> float:
    """What of a figure is not rounding's: figures that differ in the rest are of equals."""
    return float(f"{figure:.{DIGITS}g}")


def simplest(points: Sequence[BestPoint]) -> BestPoint:
    """The best of the policies' best; of equals that of the first policy, of its first tensor plan,
    and of the fewest queries at a time (each space's first variable) that have its throughput and
    latency, and take no more memory."""
    space, searched, _ = own = max(points, key=lambda one: told(one.candidate.objective))
    best = max((one for one, _ in searched.outcome.per_root if one is not None),
               key=lambda one: told(one.objective))
    plan, (most, *others) = searched.plan_of_root[best.root], best.point
    qps, latency_s = map(told, space.figures(plan, best.point))

    def is_equal(queries: int) -> bool:
        point = queries, *others
        own_qps, own_s = map(told, space.figures(plan, point))
        return own_qps >= qps and own_s <= latency_s and (
            max(space.estimate(plan, point).figures.memory_bytes)
            <= max(space.estimate(plan, best.point).figures.memory_bytes))

    fewer = 0  # than it takes; bit by bit, so that nothing depends on where the search came to
    if most < 2 or space.problem.fixed.value_of(space.variables[0]) or not is_equal(most - 1):
        fewer = most - 1
    for bit in reversed(range((most - fewer).bit_length())):
        tried = fewer + (1 << bit)
        if tried < most and not is_equal(tried):
            fewer = tried
    return own._replace(candidate=best._replace(point=(fewer + 1, *others)))
