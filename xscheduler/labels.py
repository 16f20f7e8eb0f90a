"""Configurations, and reasons against them, in words."""

from xgpt.core.policies import policy
from xgpt.core.schedule import NOT_SURE, Estimate
from xscheduler.space import Cell, Point


def point_words(cell: Cell, point: Point) -> str:
    """Replicas, control variables and tensor plan of a point, in words; zeros are left out."""
    values = zip(policy(cell.policy).variable_names, point, strict=True)
    copies = [] if cell.copies == 1 else [f"{cell.copies} replicas"]
    degree, gpus = cell.plan
    return ", ".join([*copies, *(f"{name} {value}" for name, value in values if value),
                      f"tp_degree {degree}", f"tp_gpus {gpus}"])


def configuration(estimate: Estimate) -> str:
    """Policy, main control variables and tensor plan, in words; zeros are left out."""
    names = (*policy(estimate.policy).variable_names[:2], "encode_chunk", "tp_degree", "tp_gpus")
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    return ", ".join([estimate.policy, *values])


def why_not(qps: float, chosen: tuple[float, float], most_qps: float | None = None) -> str:
    """The reason against an alternative with `qps` requests/s. chosen: throughput of the chosen
    schedule, and of the fastest one if that is less simple. most_qps: upper bound on the
    alternative's kind. One with more throughput than both exceeds the limit with its margin."""
    lost = 1 - qps / chosen[0]
    if lost > 0:
        return f"lower throughput by {lost:.1%}" if most_qps is None else (
            f"lower throughput: between {qps:.4g} and {most_qps:.4g} requests/s")
    if lost == 0:
        return "no better"
    return f"faster by {-lost:.1%}, but {'less simple' if qps <= chosen[1] else NOT_SURE}"
