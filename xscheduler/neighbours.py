"""Neighbours of a point, for the local search."""

import numpy as np

from xscheduler.space import Cell, Point

LIKELY = 0.01  # chosen: loss of throughput by the formula up to which a neighbour is tried
STEPS = (1.3, 1.1, 1.03)  # chosen: ratios of a variable's values


def neighbours(cell: Cell, point: Point, likely: float = LIKELY) -> list[Point]:
    """Points that differ from `point` in one variable or two by one of STEPS, or by one step of the
    grid. Only variables with several values change. Left out are points that do not fit, and those
    whose throughput by the formula is lower by more than a share `likely`. They are compared with
    the point's replayed throughput if the formula is above it."""
    values = [np.unique(column) for column in cell.points.T]
    places = [place for place, own in enumerate(values) if len(own) > 1]
    ways = [(one, 0) for one in places] + [(one, other) for one in places for other in places
                                           if one < other]
    found: list[Point] = []
    for one in places:  # grid steps reach the ends of phases, and switch chunks on and off
        at = int(np.searchsorted(values[one], point[one]))
        for value in values[one][max(at - 1, 0):at + 2].tolist():
            found.append((*point[:one], value, *point[one + 1:]))
    for step in STEPS:
        for sign in (1, -1):
            for one, other in ways:
                for along in (1, -1) if other else (1,):
                    moved = list(point)
                    if point[one]:
                        moved[one] = _moved(point[one], step, sign)
                    if other and point[other]:
                        moved[other] = _moved(point[other], step, sign * along)
                    found.append(tuple(moved))
    found = [one for one in dict.fromkeys(found) if one != point]
    if not found:
        return []
    points, rough = cell.with_room(np.array(found, np.int64))
    own_qps = cell.formula.rough(cell.plan, np.array([point], np.int64)).throughput_qps[0]
    if point in cell.replayed:  # the formula may be too high at the point itself
        own_qps = min(own_qps, cell.replayed[point].throughput_qps)
    are_likely = rough.throughput_qps > (1 - likely) * own_qps
    return [tuple(one) for one in points[are_likely].tolist()]


def _moved(value: int, step: float, sign: int) -> int:
    """`value` times (sign 1) or divided by (-1) `step`; changed by at least one, at least 1."""
    return max(value + 1, round(value * step)) if sign > 0 else max(
        min(value - 1, round(value / step)), 1)
