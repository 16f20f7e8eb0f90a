"""Bounds of boxes under one division each, of any divisions at once: by csrc/planning_waa.cpp, or
by arrays (waa.plan_bounds), which take many calls for each division and find the same but for the
last digits of a logarithm. Where a table of step times does not answer, arrays do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.addresses import address_of
from xsimulator.native import Native, native
from xsimulator.policies.waa.chunk_bounds import TOLERANCE
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.few_each import FULL, LEAST_SHARE, MANY_GROUPS, least_shares
from xsimulator.policies.waa.plan_bounds import (
    QUICK_TOLERANCE,
    ROOT_ACCURACY,
    PairBounds,
    PlanBounds,
)
from xsimulator.policies.waa.step_columns import ROWS_RATIO


def bounds_of_pairs(waa: Waa, divisions: Sequence[PlanBounds], which: IntArray, boxes: WaaBoxes,
                    latency_bound_s: float, *, is_modest: bool) -> PairBounds:
    """Bounds of each of the boxes under its division: `which` [boxes], in rising order. See
    PlanBounds.bound."""
    begins = np.searchsorted(which, np.arange(len(divisions)))
    for division, most in zip(divisions, np.maximum.reduceat(boxes.most, begins).tolist(),
                              strict=True):
        division.reach(most)
    library = native()
    if library is None:
        found, is_sure = PairBounds(*np.empty((5, len(boxes)))), np.zeros(len(boxes), bool)
    else:
        found, is_sure = _natively(library, _facts(waa, latency_bound_s, is_modest=is_modest),
                                   divisions, which, boxes)
    for index in np.unique(which[~is_sure]).tolist():
        rows = np.flatnonzero(~is_sure & (which == index))
        for column, own in zip(found, divisions[index].bound(boxes.take(rows), latency_bound_s),
                               strict=True):
            column[rows] = own
    return found


def _facts(waa: Waa, latency_bound_s: float, *, is_modest: bool) -> FloatArray:
    """The C structure WaaFacts."""
    facts = np.array([
        waa.problem.lengths.outputs.mean, waa.times.mean_iterations, waa.times.mean_input,
        waa.iterations_waited, latency_bound_s * (1 + QUICK_TOLERANCE), TOLERANCE, ROOT_ACCURACY,
        np.log(ROWS_RATIO), MANY_GROUPS, FULL, LEAST_SHARE, 0.0, 0.0, 0.0])
    facts[-3:].view(np.int64)[:] = address_of(least_shares()), len(least_shares()), is_modest
    return facts


def _natively(library: Native, facts: FloatArray, divisions: Sequence[PlanBounds], which: IntArray,
              boxes: WaaBoxes) -> tuple[PairBounds, BoolArray]:
    """(bounds, whether these are sure)."""
    count = len(boxes)
    sides = [np.ascontiguousarray(side, np.int64) for side in (
        boxes.least, boxes.most, boxes.fewest, boxes.highest, boxes.chunk, boxes.largest_chunk)]
    words = np.array([address_of(side) for side in sides], np.int64)
    chunked = set(which[boxes.chunk > 0].tolist())
    found, is_sure = np.empty((5, count)), np.empty(count, np.int64)
    lack, size = np.zeros(1, np.int64), np.zeros(1)
    described = [address_of(one.described(has_chunks=index in chunked))
                 for index, one in enumerate(divisions)]
    pointers, stopped = np.array(described, np.int64)[which], 0
    while True:
        # from the first box of the division whose tables have grown: its bounds are of the same
        begin = int(np.searchsorted(which, which[stopped])) if stopped else 0
        stopped = library.waa_bounds(
            address_of(facts), address_of(words), address_of(pointers), begin, count,
            address_of(found), address_of(is_sure), address_of(lack), address_of(size))
        if stopped == count:
            return PairBounds(*found), is_sure > 0
        lacking = divisions[which[stopped]]
        lacking.chunked.reach(float(size[0]), is_attention=bool(lack[0]))
        lacking.described(has_chunks=True)  # in place
