"""Configurations in words."""

from __future__ import annotations

from xgpt.core.policies import policy
from xgpt.core.schedule import NOT_SURE, Estimate
from xscheduler.space import Cell, Point

# how the rows of alternatives are labelled
POLICY_ROW, DEGREE_ROW = "policy ", "tp_degree "
NOT_LOOKED_INTO = "not looked into"  # how the reason of a policy begins that is known to lose
LEFT_OUT = "left out"  # and of one that is not among those compared
FREE_ROW, BARE_ROW = "without a latency bound", "without a margin"
PAPERS_ROW = "RRA and WAA alone"  # where another policy is better


def point_words(cell: Cell, point: Point) -> str:
    """Copies, control variables and tensor plan; what is 0 is left out."""
    values = zip(policy(cell.policy).variable_names, point, strict=True)
    copies = [] if cell.copies == 1 else [f"{cell.copies} copies"]
    degree, gpus = cell.plan
    return ", ".join([*copies, *(f"{name} {value}" for name, value in values if value),
                      f"tp_degree {degree}", f"tp_gpus {gpus}"])


def configuration(estimate: Estimate) -> str:
    """Policy, the control variables that tell most, and the tensor plan; what is 0 is left out."""
    names = (*policy(estimate.policy).variable_names[:2], "encode_chunk", "tp_degree", "tp_gpus")
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    return ", ".join([estimate.policy, *values])


def why_not(qps: float, chosen_qps: float, most_qps: float | None = None) -> str:
    """What speaks against an alternative, of which nothing exceeds `most_qps`. One that is quicker
    than what was chosen has a margin of its own that is too large."""
    lost = 1 - qps / chosen_qps
    if lost > 0:
        return f"lower throughput by {lost:.1%}" + (
            "" if most_qps is None else f": no more than {most_qps:.4g} queries/s")
    return "no better" if lost == 0 else f"quicker by {-lost:.1%}, but {NOT_SURE}"
