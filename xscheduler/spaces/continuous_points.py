"""Points of continuous batching: what is known of one, and which are looked at around another."""

from __future__ import annotations

import math
from typing import NamedTuple

from xscheduler.admissible import Limit

# Of the bound's max_active, looked at first: no further apart than the walks' own nodes, so that
# points between these need no walk of their own.
AROUND = (0.35, 0.5, 0.6, 0.69, 0.79, 0.9, 1.0, 1.13, 1.3)
# Neighbours at first, as shares of max_active and of token_budget, which are as far apart as the
# walks' own nodes; then those next to a point, and those so many shares away.
WIDE = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35), (2**-0.5, 2**-0.25, 1.0, 2**0.25, 2**0.5)
NARROW = (0.025, 0.06, 0.15), (0.03, 0.09)

Key = tuple[int, int, int]  # plan, max_active, token_budget


class Point(NamedTuple):
    """A configuration's figures; `limit`: what forbids it apart from latency."""

    throughput_qps: float
    latency_s: float
    limit: Limit


def is_admissible(point: Point, latency_bound_s: float) -> bool:
    return not point.limit and point.throughput_qps > 0 and point.latency_s <= latency_bound_s


def around(active: float, limits: tuple[int, int]) -> list[int]:
    """Values of max_active around the one at which a bound has its best."""
    return [min(max(round(share * active), limits[0]), limits[1]) for share in AROUND]


def far(point: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Values of max_active and token_budget around a point."""
    return ([round(point[0] * share) for share in WIDE[0]],
            [round(point[1] * share) for share in WIDE[1]])


def near(point: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Values of max_active and token_budget beside a point's."""
    steps = ({0, 1, *(math.ceil(value * share) for share in shares)}
             for value, shares in zip(point, NARROW, strict=True))
    active, budget = ([value + sign * step for step in own for sign in (-1, 1)]
                      for value, own in zip(point, steps, strict=True))
    return active, budget
