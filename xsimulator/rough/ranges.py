"""Grids of values for control variables."""

import itertools
from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import IntArray

MOST_QUERIES = 1 << 20  # chosen: limit of grids if the job has no number of requests


def grid_of(most: int, given: int | None, ratio: float, *, least: int = 1) -> list[int]:
    """Whole numbers from `least` to `most` in ratios of about `ratio`; [given] if it is fixed."""
    if given is not None:
        return [given]
    sizes = [min(least, most)]
    while sizes[-1] < most:
        sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * ratio)), most))
    return sizes


def cross_product(*values: Sequence[int]) -> IntArray:
    """[points, variables] every combination of one value of each variable."""
    return np.array(list(itertools.product(*values)), np.int64)
