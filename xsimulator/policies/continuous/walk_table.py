"""Walks (continuous.paged_walk) on a grid of slots, room, budget and groups.

What a walk finds changes smoothly with them, so each point of the grid is walked once, and what is
between is interpolated: a search then costs few walks, and less of their noise."""

from functools import cache
from itertools import count

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.native import native
from xsimulator.policies.continuous.paged_walk import Walk, WalkedQueries, walk

_SCALARS = ("running", "again", "evicted", "evictions", "chunks", "share")
_VECTORS = ("tokens", "joined")
_PER_OCTAVE = 4  # points of room and budget
_WHOLE_SLOTS = 12  # up to as many each is a point; beyond, _SLOT_RATIO apart
_SLOT_RATIO = 1.15
_AMPLE = 1.5  # times the queries that room holds in the mean: more slots change nothing
_SPARE = 4.0  # times the room that as many queries need in the mean: more changes nothing
_MOST_OCTAVES = 64
_POINTS = 1024  # walked at a time, of one group each
_LEVELS = 5  # 1, 2, 4 .. groups are walked together, the nearest number to those there are
_ENOUGH = 200  # queries of groups that are walked together: more hardly change what others take up
_ROOMY = 2.0  # times the room that as many queries need in the mean: nobody is evicted to share

_MOST_TABLES = 8  # kept
_tables: dict[tuple[object, ...], "WalkTable"] = {}


def shared_table(queries: WalkedQueries, sizes: int) -> "WalkTable":
    """The table of a workload, which does not depend on the devices: copies on parts of any size
    look into the same one. The latest _MOST_TABLES are kept."""
    key = (queries.iterations, queries.held, queries.is_chunked, sizes,
           queries.input_sizes.tobytes(), queries.last_sizes.tobytes())
    table = _tables.pop(key, None) or WalkTable(queries, sizes)
    while len(_tables) >= _MOST_TABLES:
        del _tables[next(iter(_tables))]
    _tables[key] = table  # the latest is the last
    return table


@cache
def _corners(variables: int) -> IntArray:
    """[corners, variables, 1] of a cell, the last variable's bit the fastest."""
    return np.array(list(np.ndindex(*(2,) * variables)), np.int64)[:, :, None]


class WalkTable:
    """The table has walks of one workload as a function of (slots, room, budget, groups)."""

    def __init__(self, queries: WalkedQueries, sizes: int) -> None:
        """`sizes` is that of `walk`."""
        self._queries, self._sizes = queries, sizes
        nodes = np.arange(1.0, _WHOLE_SLOTS + 1)
        beyond = _WHOLE_SLOTS * _SLOT_RATIO ** np.arange(1, 240)
        self._slots = np.concatenate([nodes, np.rint(beyond)])
        self._row_of: dict[int, int] = {}
        self._rows = np.empty((0, len(_SCALARS) + len(_VECTORS) * sizes))

    def __call__(self, slots: FloatArray, room: FloatArray, budget: FloatArray,
                 groups: FloatArray) -> Walk:
        """The walk of configurations, [configs] each, is interpolated."""
        slots = np.clip(slots, 1.0, self._slots[-2])
        low = np.searchsorted(self._slots, slots, side="right") - 1
        shares = [(slots - self._slots[low]) / (self._slots[low + 1] - self._slots[low])]
        lows = [low]
        for values in (room, budget)[:1 + self._queries.is_chunked]:
            place = np.log2(values) * _PER_OCTAVE
            lows.append(np.floor(place + 1e-9).astype(np.int64))
            shares.append(np.maximum(place - lows[-1], 0.0))
        # corners in the order of their bits, the last variable's the fastest
        weight = np.ones((1, len(slots)))  # [corners, configs]
        for share in shares:
            weight = (weight[:, None] * np.array([1 - share, share])).reshape(-1, len(slots))
        points = np.array(lows) + _corners(len(lows))
        level = np.minimum(np.rint(np.log2(groups)), _LEVELS - 1).astype(np.int64)
        rows = self._find(points, level, weight > 1e-9)
        between = np.einsum("kc,kcv->cv", weight, self._rows[rows])
        scalars = {name: between[:, i] for i, name in enumerate(_SCALARS)}
        vectors = np.split(between[:, len(_SCALARS):], len(_VECTORS), axis=1)
        return Walk(**scalars, **dict(zip(_VECTORS, vectors, strict=True)))

    def _find(self, points: IntArray, level: IntArray, is_needed: BoolArray) -> IntArray:
        """The `points` [corners, variables, configs] lie in these rows [corners, configs]; any row
        stands where a corner is not needed. `level`: [configs] of groups."""
        slot, room = points[:, 0], points[:, 1]
        budget = points[:, 2] if self._queries.is_chunked else np.zeros_like(slot)
        holds = 2.0 ** (room / _PER_OCTAVE) / self._queries.held
        slot = np.minimum(slot, np.searchsorted(self._slots, _AMPLE * holds + 4))
        needed = self._queries.held * (self._slots[slot] + 1)
        spare = np.ceil(np.log2(_SPARE * needed) * _PER_OCTAVE)
        room = np.minimum(room, spare.astype(np.int64))
        roomy = np.log2(_ROOMY * needed) * _PER_OCTAVE
        enough = np.log2(np.maximum(_ENOUGH / np.minimum(self._slots[slot], holds), 1.0))
        level = np.where(room >= roomy, 0, np.minimum(level, np.rint(enough).astype(np.int64)))
        base = _PER_OCTAVE * _MOST_OCTAVES
        keys = ((slot * base + room) * base + budget) * _LEVELS + level
        unique, inverse = np.unique(keys[is_needed], return_inverse=True)
        missing = self._with_next([key for key in unique.tolist() if key not in self._row_of],
                                  base**2 * _LEVELS)
        for level_of in np.unique(missing % _LEVELS).tolist():
            of_level = missing[missing % _LEVELS == level_of]
            for part in np.array_split(of_level, -(-len(of_level) * 2**level_of // _POINTS)):
                if part.size:
                    self._walk(part, part // _LEVELS, base, 2**level_of)
        rows = np.zeros(keys.shape, np.int64)
        rows[is_needed] = np.array([self._row_of[key] for key in unique.tolist()])[inverse]
        return rows

    def _walk(self, keys: IntArray, points: IntArray, base: int, together: int) -> None:
        """Rows are added of these points, of so many groups."""
        slots, room, budget = points // base**2, points // base % base, points % base
        walked = walk(self._queries, self._slots[slots], 2.0 ** (room / _PER_OCTAVE),
                      2.0 ** (budget / _PER_OCTAVE), self._sizes, together)
        columns = [getattr(walked, name)[:, None] for name in _SCALARS]
        vectors = [getattr(walked, name) for name in _VECTORS]
        self._row_of.update(zip(keys.tolist(), count(len(self._rows)), strict=False))
        self._rows = np.concatenate([
            self._rows, np.concatenate([*columns, *vectors], axis=1)])

    def _with_next(self, keys: list[int], stride: int) -> IntArray:
        """The points that are missing; where arrays walk, with those of the numbers of slots beside
        theirs, which are likely to be asked for next: there a few more cost next to nothing.
        `stride` of keys from one number of slots to the next."""
        steps = (-1, 0, 1) if native() is None else (0,)
        beside = {key + step * stride for key in keys for step in steps}
        most = len(self._slots) * stride
        return np.array(sorted(key for key in beside if 0 <= key < most
                               and key not in self._row_of), np.int64)
