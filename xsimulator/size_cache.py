"""Cache of times by read-only arrays of sizes, since many plans' tables ask for the same sizes."""

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray


def is_read_only(sizes: ArrayLike) -> bool:
    """Whether `sizes` is a read-only array that owns its data."""
    return isinstance(sizes, np.ndarray) and not sizes.flags.writeable and sizes.base is None


class SizeCache:
    """Results, read-only, by a key and the identity of a read-only array of sizes."""

    def __init__(self) -> None:
        # the sizes are kept too, so that no other array gets their id
        self._kept: dict[Hashable, tuple[ArrayLike, FloatArray]] = {}

    def of(self, what: Hashable, sizes: ArrayLike, ask: Callable[[], FloatArray]) -> FloatArray:
        """The cached result of `ask` for `what` and these sizes; uncached for writable sizes."""
        if not is_read_only(sizes):
            return ask()
        key = what, id(sizes)
        if key not in self._kept:
            answer = ask()
            answer.flags.writeable = False
            self._kept[key] = sizes, answer
        return self._kept[key][1]
