"""A closed form that remembers what it was asked: searches of one problem under several latency
bounds, and under bounds tightened for a margin, ask for the same configurations again and again."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.policies.figures import EstimateArrays

_FIGURES = tuple(field.name for field in fields(EstimateArrays))
_FLAGS = ("fits",)  # those that are not numbers


class RememberedPolicy:
    """What `evaluate` and `limits` of a closed form answered, by configuration. What is searched
    does not depend on what was asked before: only the time it takes does."""

    def __init__(self, evaluate: Callable[[Sequence[Any]], EstimateArrays],
                 limits: Callable[[Sequence[Any]], tuple[FloatArray, FloatArray]] | None) -> None:
        """`limits` None: the closed form does not say quickly what it cannot reach."""
        self._evaluate, self._limits = evaluate, limits
        self._figures: dict[Any, tuple[float, ...]] = {}
        self._limit: dict[Any, tuple[float, float]] = {}

    @property
    def num_evaluated(self) -> int:
        return len(self._figures)

    def evaluate(self, configs: Sequence[Any]) -> EstimateArrays:
        """The figures of each, all new ones at once."""
        new = [config for config in dict.fromkeys(configs) if config not in self._figures]
        if new:
            found = self._evaluate(new)
            columns = [getattr(found, name).tolist() for name in _FIGURES]
            self._figures.update(zip(new, zip(*columns, strict=True), strict=True))
        rows = np.array([self._figures[config] for config in configs], float).reshape(
            -1, len(_FIGURES))
        named: dict[str, Any] = {name: rows[:, place] > 0 if name in _FLAGS else rows[:, place]
                                 for place, name in enumerate(_FIGURES)}
        return EstimateArrays(**named)

    def limits(self, configs: Sequence[Any]) -> tuple[FloatArray, FloatArray]:
        """(throughput_qps, latency_s) that `evaluate` does not better; nothing is ruled out where
        the closed form does not say."""
        if self._limits is None:
            return np.full(len(configs), np.inf), np.zeros(len(configs))
        new = [config for config in dict.fromkeys(configs) if config not in self._limit]
        if new:
            most, least_s = self._limits(new)
            self._limit.update(zip(new, zip(most.tolist(), least_s.tolist(), strict=True),
                                   strict=True))
        rows = np.array([self._limit[config] for config in configs], float).reshape(-1, 2)
        return rows[:, 0], rows[:, 1]
