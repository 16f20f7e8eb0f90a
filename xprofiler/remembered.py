"""A timing source that remembers what it was asked: many plans have layers of the same degree."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Link
from xprofiler.timing import Operator, Reach, TimingSource

FloatArray = NDArray[np.float64]
MOST_SIZES = 4096  # of an array that is remembered
MOST_ANSWERS = 4096  # after that it begins anew


class Remembered:
    """`source`, asked once for each array of sizes. Answers must not be written to."""

    def __init__(self, source: TimingSource) -> None:
        self._source = source
        self._answers: dict[Hashable, FloatArray] = {}
        self._reaches: dict[tuple[Operator, int], Reach] = {}

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource; so all others."""
        return self._once((operator, tp_degree), lambda: self._source.operator_s(
            operator, x, y, tp_degree=tp_degree), x, y)

    def all_reduce_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> FloatArray:
        return self._once(("all_reduce", tp_degree, link.name), lambda: self._source.all_reduce_s(
            num_bytes, tp_degree, link), num_bytes)

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        return self._once(("transfer", link.name),
                          lambda: self._source.transfer_s(num_bytes, link), num_bytes)

    def handover_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        return self._once(("handover", link.name),
                          lambda: self._source.handover_s(num_bytes, link), num_bytes)

    def step_overhead_s(self) -> float:
        return self._source.step_overhead_s()

    def can_time(self, tp_degree: int) -> bool:
        return self._source.can_time(tp_degree)

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        key = (operator, tp_degree)
        if key not in self._reaches:
            self._reaches[key] = self._source.reach(operator, tp_degree)
        return self._reaches[key]

    @property
    def is_padded(self) -> bool:
        return self._source.is_padded

    @property
    def sharing(self) -> float:
        return self._source.sharing

    def provenance(self) -> str:
        return self._source.provenance()

    def _once(self, what: Hashable, ask: Callable[[], FloatArray],
              *sizes: ArrayLike) -> FloatArray:
        arrays = [np.asarray(size, float) for size in sizes]
        if sum(array.size for array in arrays) > MOST_SIZES:
            return ask()
        key = (what, *((array.shape, array.tobytes()) for array in arrays))
        found = self._answers.get(key)
        if found is None:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            found = np.asarray(ask(), float)
            found.setflags(write=False)
            self._answers[key] = found
        return found
