"""Sizes that walks (continuous.paged_walk) remember, the latest on top."""

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.policies.continuous.size_stream import SizeStream

DEPTH = 32  # sizes that are remembered; a power of two


class SizeStack:
    """Each configuration has a stack of sizes; the oldest of a full one are forgotten."""

    def __init__(self, configs: int) -> None:
        self.count = np.zeros(configs, np.int64)
        self._sizes, self._end = np.zeros((configs, DEPTH)), np.zeros(configs, np.int64)

    def push(self, rows: IntArray, values: FloatArray) -> None:
        """One value goes on each of these rows."""
        self._sizes[rows, self._end[rows] % DEPTH] = values
        self._end[rows] += 1
        self.count[rows] = np.minimum(self.count[rows] + 1, DEPTH)

    def push_many(self, numbers: IntArray, first: IntArray, values: SizeStream, age: int) -> None:
        """So many [configs] of `values` from `first` on, less `age`, go on the stacks."""
        kept = np.minimum(numbers, DEPTH)
        rows = kept.nonzero()[0]
        if not rows.size:
            return
        if kept.max() > 1:
            rows = np.repeat(rows, kept[rows])
            ends = kept.cumsum()
            place = np.arange(rows.size) - (ends - kept)[rows]
            self._sizes[rows, (self._end[rows] + place) % DEPTH] = values.at(
                (first + numbers - kept)[rows] + place) - age
        else:
            self._sizes[rows, self._end[rows] % DEPTH] = values.at(
                (first + numbers - 1)[rows]) - age
        self._end += kept
        self.count = np.minimum(self.count + kept, DEPTH)

    def top(self, rows: IntArray) -> FloatArray:
        return np.asarray(self._sizes[rows, (self._end[rows] - 1) % DEPTH])

    def pop(self, rows: IntArray) -> None:
        self._end[rows] -= 1
        self.count[rows] = np.maximum(self.count[rows] - 1, 0)
