"""Boxes of configurations of static batches, as bounds take them (static.bounds)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray


class StaticBoxes(NamedTuple):
    """Arrays that broadcast: queries a group (real) from `least` to `most`, groups that are not
    empty from `fewest` to `highest`, and encode steps of a group from `parts` to `most_parts`; no
    batch of a box has fewer queries than `batch`."""

    least: FloatArray
    most: FloatArray
    fewest: FloatArray
    highest: FloatArray
    parts: FloatArray
    most_parts: FloatArray
    batch: FloatArray

    @classmethod
    def of(cls, batch: tuple[FloatArray, FloatArray], groups: tuple[FloatArray, FloatArray],
           parts: tuple[FloatArray, FloatArray]) -> StaticBoxes:
        """[boxes] the least and most of each; groups beyond the queries of a batch are empty."""
        (least, most), (fewest, highest) = batch, groups
        return cls(np.maximum(least / highest, 1.0), np.maximum(most / fewest, 1.0),
                   np.minimum(fewest, least), highest, *parts, least)
