"""What a copy on so many devices may be worth, before it is looked at, by what others are worth.

    worth   queries/s of one copy, by its devices: of those sizes that were looked at; 0: nothing

Nothing is proved by a guess: it says which sizes a glance is spent on."""

from __future__ import annotations

from collections.abc import Mapping

from xgpt.core.problem import Problem
from xsimulator.memory import capacity_bytes, least_weight_bytes


def like_its_neighbours(worth: Mapping[int, float], devices: int) -> float:
    """What a size would be worth by the better of its neighbours among those known, device by
    device."""
    above = min((size for size in worth if size > devices), default=0)
    return devices * max((worth[size] / size for size in (_below(worth, devices), above) if size),
                         default=0.0)


def is_scarce(problem: Problem, worth: Mapping[int, float], devices: int) -> bool:
    """Whether the memory of the largest known size below that serves is for the most part full of
    weights: one more device then brings room for more than its share of the queries."""
    below = _below(worth, devices)
    room = below * capacity_bytes(problem.cluster.device)
    return below > 0 and 2 * least_weight_bytes(problem) > room


def _below(worth: Mapping[int, float], devices: int) -> int:
    return max((size for size, own in worth.items() if size < devices and own > 0), default=0)
