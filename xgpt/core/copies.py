"""On how many devices each copy of the model is: of a schedule, of a line of its table over copies,
and in words."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.schedule import CopiesTried, Estimate


def devices_of_copies(estimate: Estimate) -> tuple[int, ...]:
    """Devices of each copy of all shapes, in the order of their ranks."""
    return tuple(shape.deployment.devices_per_replica for shape in (estimate, *estimate.others)
                 for _ in range(shape.deployment.replicas))


def devices_tried(row: CopiesTried) -> tuple[int, ...]:
    """Devices of each copy of a line."""
    return row.devices or (row.devices_per_replica,) * row.replicas


def sum_of(devices: Sequence[int]) -> str:
    """Devices of copies as a sum, the largest first: "4 + 3", "5 + 3 x 1"."""
    counts = {each: devices.count(each) for each in sorted(set(devices), reverse=True)}
    return " + ".join(f"{count} x {each}" if count > 1 else str(each)
                      for each, count in counts.items())
