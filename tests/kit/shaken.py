"""Times as a machine would have them that computes otherwise: other in their last digits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xprofiler.timing import MessageKind, Operator, TimingSource


class Shaken:
    """`source`, each of its times in the last digits another."""

    def __init__(self, source: TimingSource, seed: int) -> None:
        self.source, self._seed = source, np.uint64(0x9E3779B97F4A7C15 * (2 * seed + 1) % 2**64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.operator_s(operator, x, y, tp_degree=tp_degree))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Any, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree))

    def _shaken(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """By 1 +- 1e-12, by chance, but the same time always by the same."""
        flat = np.ascontiguousarray(np.asarray(seconds, float)).reshape(-1)
        mixed = (flat.view(np.uint64) ^ self._seed) * np.uint64(0xBF58476D1CE4E5B9)
        share = (mixed >> np.uint64(40)).astype(float) / 2**23 - 1
        return (flat * (1 + 1e-12 * share)).reshape(np.shape(seconds))
