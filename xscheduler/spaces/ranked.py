"""Evaluated points in the order of their throughput: the best of them is asked for by each search
that begins, under one latency bound after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple[object, ...])


class Ranked(Generic[Key]):
    """Points that nothing but a latency bound forbids, the best first; of equals the smaller."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, Key, float]] = []  # (-throughput, point, latency)
        self._is_sorted = True

    def add(self, points: Iterable[tuple[Key, float, float]]) -> None:
        """Points with their throughput and latency; those that answer nothing are left out."""
        self._rows += [(-qps, key, latency_s) for key, qps, latency_s in points if qps > 0]
        self._is_sorted = False

    def best(self, latency_bound_s: float) -> tuple[float, Key] | None:
        """(throughput, point) of the best within the bound; None where there is none."""
        if not self._is_sorted:
            self._rows.sort()
            self._is_sorted = True
        return next(((-negative, key) for negative, key, latency_s in self._rows
                     if latency_s <= latency_bound_s), None)
