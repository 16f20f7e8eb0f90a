"""The quickest configurations of a search, with their margins: where nothing that has more is safe,
they tell whether anything is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xgpt.core.schedule import Estimate
from xscheduler.spaces.space import Space
from xscheduler.uncertainty import Doubts

LOOKED_AT, REPLAYED = 10, 3  # of the least latency; of these, of the least with their margin


def quickest_with_margin(spaces: Sequence[Space], doubts: Doubts) -> list[Estimate]:
    """Those that may keep the bound with their margin, before a replay, the quickest first."""
    bound_s = doubts.problem.constraint.latency_s / doubts.least_factor
    tight = sorted({(one.latency_s, place, one.plan, one.point)
                    for place, space in enumerate(spaces) for one in space.easiest()
                    if not one.limit and one.latency_s <= bound_s})
    able: list[tuple[float, Estimate]] = []
    for _, place, plan, point in tight[:LOOKED_AT]:
        estimate = spaces[place].estimate(plan, point).in_copies(doubts.problem.copies)
        needed_s = estimate.figures.latency_s * doubts.margin(estimate, is_replayed=False).factor
        if needed_s <= doubts.problem.constraint.latency_s and math.isfinite(needed_s):
            able.append((needed_s, estimate))
    return [estimate for _, estimate in sorted(able, key=lambda pair: pair[0])[:REPLAYED]]
