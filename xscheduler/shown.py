"""Configurations in words."""

from __future__ import annotations

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xscheduler.space import Cell, Point


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
