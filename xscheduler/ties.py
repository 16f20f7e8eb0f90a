"""Of schedules that are as good as each other the simplest, whatever a machine's last digits."""

from bisect import bisect_left

from xscheduler.alternatives import BestPoint


def told(figure: float) -> float:
    """A figure to its tenth digit (chosen): in those beyond, equals differ by rounding."""
    return float(f"{figure:.10g}")


def simplest(points: list[BestPoint]) -> BestPoint:
    """The best of these; of equals that of the first policy, of its first tensor plan, and of the
    fewest queries at a time (its first variable) by which it is as quick."""
    own = max(points, key=lambda one: told(one.candidate.objective))
    space, best = own.space, max(filter(None, (one for one, _ in own.searched.outcome.per_root)),
                                 key=lambda one: told(one.objective))
    plan, (most, *others) = own.searched.plan_of_root[best.root], best.point
    qps, latency_s = map(told, space.figures(plan, best.point))

    def is_as_quick(queries: int) -> bool:
        own_qps, own_s = map(told, space.figures(plan, (queries, *others)))
        return own_qps >= qps and own_s <= latency_s

    if most > 1 and not space.problem.fixed.value_of(space.variables[0]) and is_as_quick(most - 1):
        most = 1 + bisect_left(range(1, most), True, key=is_as_quick)
    return own._replace(candidate=best._replace(point=(most, *others)))
