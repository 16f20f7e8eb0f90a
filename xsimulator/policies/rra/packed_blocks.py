"""Blocks of phases one after the other, as csrc/planning_rra.h has them, and derived natively."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.addresses import address_of
from xsimulator.longest_context import MAX_DOUBLINGS
from xsimulator.native import Native
from xsimulator.occupancy import GROUP_OCTAVES, QueryFlow

OWN = ("own_before", "own_last")  # what only one query's own steps hang on
BY_GROUP = ("log_absent", *OWN)  # have a last axis of GROUP_OCTAVES
PLAIN = ("widths", "active", "context", "variance_active", "nobody", "moved")  # one of a block
SINGLES = ("mean_phases", "mean_present", "mean_reserved", "variance_reserved", "max_present")
WHOLE = ("blocks", "seen", "phases_before")  # whole numbers of a phase
_WIDTH = len(PLAIN) + len(BY_GROUP) * len(GROUP_OCTAVES) + MAX_DOUBLINGS + 1
_LEAST_BLOCKS = 1024  # that there is room for to begin with


class PackedBlocks:
    """The fields of rra.phase_blocks.PhaseBlocks, columns one after the other; grows in leaps."""

    def __init__(self, *, is_padded: bool) -> None:
        self._is_padded = is_padded
        # [1 + blocks of all columns] the first is none of any, and all zero
        self.values: FloatArray = np.zeros((1, _WIDTH))
        self.begins: IntArray = np.zeros(0, np.int64)  # by column
        self.whole: IntArray = np.zeros((len(WHOLE), 0), np.int64)
        self.singles: FloatArray = np.zeros((len(SINGLES), 0))
        self._columns, self._blocks = 0, 1
        self._scratch: FloatArray = np.empty((0, _WIDTH))
        self._described: IntArray | None = None

    def single(self, name: str) -> FloatArray:
        """[columns and more] one of SINGLES."""
        return np.asarray(self.singles[SINGLES.index(name)])

    @property
    def counts(self) -> IntArray:
        """[columns and more] blocks."""
        return np.asarray(self.whole[0])

    def add(self, row: dict[str, FloatArray]) -> None:
        """A column by its fields."""
        values, octaves = np.zeros((len(row["widths"]), _WIDTH)), len(GROUP_OCTAVES)
        for place, name in enumerate(PLAIN):
            values[:, place] = row[name]
        for place, name in enumerate(BY_GROUP):
            begin = len(PLAIN) + place * octaves
            values[:, begin:begin + octaves] = row[name]
        self._append(values, tuple(int(row[name]) for name in WHOLE),
                     np.array([float(row[name]) for name in SINGLES]))
        if "maximum_context" in row:
            self.set_longest(row["maximum_context"])

    def set_longest(self, longest: FloatArray) -> None:
        """The `maximum_context` of the last column."""
        self.values[self._blocks - len(longest):self._blocks, -MAX_DOUBLINGS - 1:] = longest

    def derive(self, native: Native, flow: QueryFlow, phase: tuple[int, int, int],
               exact_iterations: int, resolution: float) -> FloatArray:
        """Adds a column of (N_D, the last iteration of the latency's query in its phase, phases
        before): its blocks' widths."""
        function = _phase(native)
        n_d, last, before = phase
        if len(self._scratch) < max(n_d, 1):
            self._scratch = np.empty((n_d, _WIDTH))
        singles, seen = np.empty(len(SINGLES)), np.empty(1, np.int64)
        described, _held = flow.described
        count = function(address_of(described), n_d, last, before, exact_iterations, resolution,
                         address_of(self._scratch), address_of(singles), address_of(seen))
        self._append(self._scratch[:count], (count, int(seen[0]), before), singles)
        return np.asarray(self._scratch[:count, 0])

    def places(self, columns: IntArray) -> IntArray:
        """[blocks, configs] where the blocks of columns begin among all numbers."""
        counts = self.counts[columns]
        place = np.arange(int(counts.max(initial=1)))[:, None]
        return np.asarray(_WIDTH * np.where(place < counts, self.begins[columns] + place, 0))

    def plain(self, places: IntArray, name: str) -> FloatArray:
        """[blocks, configs] one of PLAIN."""
        return np.asarray(self.values.ravel().take(places + PLAIN.index(name)))

    def by_group(self, places: IntArray, name: str,
                 octave: IntArray) -> tuple[FloatArray, FloatArray]:
        """Likewise one of BY_GROUP, at such octaves [configs] and the ones after them."""
        first = places + (octave + len(PLAIN) + BY_GROUP.index(name) * len(GROUP_OCTAVES))
        numbers = self.values.ravel()
        return np.asarray(numbers.take(first)), np.asarray(numbers.take(first + 1))

    def longest(self, places: IntArray) -> FloatArray:
        """[blocks, configs, doublings + 1] the same of `maximum_context`."""
        return np.asarray(self.values[:, -MAX_DOUBLINGS - 1:][places // _WIDTH])

    def described(self) -> IntArray:
        """The C structure Blocks; it holds until more columns are added."""
        if self._described is None:
            self._described = np.array([address_of(self.values), address_of(self.begins), *(
                address_of(own) for own in self.whole), int(self._is_padded)], np.int64)
        return self._described

    def _append(self, values: FloatArray, whole: tuple[int, ...], singles: FloatArray) -> None:
        blocks, column = self._blocks + len(values), self._columns
        self._described = None
        if blocks > len(self.values):
            held, self.values = self.values, np.empty((max(2 * blocks, _LEAST_BLOCKS), _WIDTH))
            self.values[: self._blocks] = held[: self._blocks]
        if column == len(self.begins):
            size = 2 * column + 16
            self.begins, self.whole, self.singles = (
                _grown(own, size) for own in (self.begins, self.whole, self.singles))
        self.values[self._blocks:blocks] = values
        self.begins[column], self.whole[:, column] = self._blocks, whole
        self.singles[:, column] = singles
        self._blocks, self._columns = blocks, column + 1


@cache
def _phase(native: Native) -> Callable[..., int]:
    """Derives a column, by addresses; its types are told once, for a search asks for hundreds."""
    function = native.library.xgpt_rra_phase
    function.restype = ctypes.c_int64
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address, *[number] * 4, ctypes.c_double, *[address] * 3]
    return function


def _grown(array: Any, size: int) -> Any:
    """With room for so many along its last axis."""
    grown = np.zeros((*array.shape[:-1], size), array.dtype)
    grown[..., : array.shape[-1]] = array
    return grown
