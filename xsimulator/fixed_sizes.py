"""What is asked of sizes that nobody can change, kept: many plans' tables ask for the same ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray


def is_fixed(sizes: ArrayLike) -> bool:
    """Whether nobody can change them."""
    return isinstance(sizes, np.ndarray) and not sizes.flags.writeable and sizes.base is None


class KeptOfFixed:
    """Answers by what was asked for, and by the array of sizes that it was asked of: the same array
    each time, which nobody can change either."""

    def __init__(self) -> None:
        # with the sizes: while they are held, no other array has their id
        self._kept: dict[Hashable, tuple[ArrayLike, FloatArray]] = {}

    def of(self, what: Hashable, sizes: ArrayLike, ask: Callable[[], FloatArray]) -> FloatArray:
        """What `ask` says; of sizes that can be changed it is asked each time."""
        if not is_fixed(sizes):
            return ask()
        key = what, id(sizes)
        if key not in self._kept:
            answer = ask()
            answer.flags.writeable = False
            self._kept[key] = sizes, answer
        return self._kept[key][1]
