"""Sizes that walks (continuous.paged_walk) draw one after the other."""

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray

LAID_OUT = 1 << 20


class SizeStream:
    """Sizes [number] are drawn one after the other, over and over. As many as are `ensured` lie in
    one array, up to LAID_OUT of them: a step asks for a few of each configuration. What `reach`
    says is no more than is ensured."""

    def __init__(self, values: FloatArray) -> None:
        self._once = np.ascontiguousarray(values, float)
        self._once_sums = np.concatenate([[0.0], np.cumsum(values)])
        self._is_whole = True  # all that is asked for is laid out
        self._lay_out(1)

    @property
    def once(self) -> tuple[FloatArray, FloatArray]:
        """All sizes once, and the sums of those before each, in the end of all."""
        return self._once, self._once_sums

    def ensure(self, index: int) -> None:
        """Sizes up to this one may be asked for."""
        self._is_whole = index < LAID_OUT
        if self._is_whole and index >= self._sums.size:
            self._lay_out(index // self._once.size + 1)

    def at(self, index: IntArray) -> FloatArray:
        if not self._is_whole:
            return np.asarray(self._once[index % self._once.size])
        return np.asarray(self._values.take(index))

    def until(self, index: IntArray) -> FloatArray:
        """All sizes before `index` come to this sum."""
        if not self._is_whole:
            rounds, rest = np.divmod(index, self._once.size)
            return np.asarray(rounds * self._once_sums[-1] + self._once_sums[rest])
        return np.asarray(self._sums.take(index))

    def reach(self, amount: FloatArray) -> IntArray:
        """So many of the first sizes come to no more than `amount`."""
        if not self._is_whole:
            whole, left = np.divmod(amount + 1e-6, self._once_sums[-1])
            within = np.searchsorted(self._once_sums, left, side="right") - 1
            return np.asarray(whole.astype(np.int64) * self._once.size + within)
        return np.asarray(self._sums.searchsorted(amount + 1e-6, side="right") - 1)

    def _lay_out(self, rounds: int) -> None:
        """Twice as many rounds as are asked for."""
        begins = np.arange(2 * rounds)[:, None] * self._once_sums[-1]
        self._values = np.tile(self._once, 2 * rounds)
        self._sums = (begins + self._once_sums[:-1]).ravel()
