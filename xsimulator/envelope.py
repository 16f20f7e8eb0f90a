"""Lower envelopes of step times: what bounds rest on where times are only nearly monotone.

An envelope never exceeds the times it is made of, rises with the size, and falls in relation to it:
twice the size never takes less, nor more than twice as long. Where the times themselves are like
that, as physics would have it, the envelope is the times; a measured table's dips and jumps, which
would make a bound at the corner of a box wrong, are cut off."""

from collections.abc import Callable

import numpy as np

from xgpt.core.lengths import FloatArray

NODES_AN_OCTAVE = 8  # of the length, at which a function of two is looked at
# The count is looked at wherever it is whole up to SINGLES, where a measured table's points lie,
# and closely beyond: a dip of a single count above SINGLES may go unseen between two of these.
COUNTS_AN_OCTAVE, SINGLES = 32, 256
FIRST_TOP = 512.0  # sizes up to which it is looked at to begin with
# Counts above CORNERS are those of a whole space's corner, which another plan's soon exceeds: there
# is room for so many times as many, for a larger grid takes little longer than a first one.
CORNERS, CORNERS_ROOM = 2.0**16, 1024.0
FLAT = 1 - 1e-9  # factors above it count as 1


def rising_minorant(sizes: FloatArray, seconds: FloatArray) -> FloatArray:
    """[..., sizes] the largest that `seconds` bounds from above, that rises with the size and whose
    ratio to it falls."""
    rising = np.minimum.accumulate(seconds[..., ::-1], axis=-1)[..., ::-1]
    falling = sizes * np.minimum.accumulate(seconds / sizes, axis=-1)
    return np.asarray(np.minimum(rising, falling))


class PairEnvelope:
    """Factors, at most 1, that lower a function of (count, length), such as attention over queries
    and tokens of context, until its value bounds others. The function is looked at on a grid of
    sizes from 1 up; between them the lowest factor around counts."""

    def __init__(self, function: Callable[[FloatArray, FloatArray], FloatArray]) -> None:
        self._function = function
        self._top = (0.0, 0.0)
        self._counts = self._lengths = np.empty(0)
        self._factors: dict[bool, FloatArray | None] = {}  # by of_more
        self._rates = np.empty((0, 0))

    def factor(self, count: FloatArray, length: FloatArray, *, of_more: bool) -> FloatArray | float:
        """The factor with which seconds bound those of every larger count and length (`of_more`),
        or seconds / count those of every smaller count and no smaller length."""
        self._reach(count, length)
        table = self._factors[of_more]
        if table is None:
            return 1.0
        row = np.clip(np.searchsorted(self._counts, count) - 1, 0, len(self._counts) - 2)
        column = np.clip(np.searchsorted(self._lengths, length) - 1, 0, len(self._lengths) - 2)
        return np.asarray(table[row, column])

    def least_rate(self, count: FloatArray, length: FloatArray) -> FloatArray:
        """Seconds / (count x length) of no smaller pair is below this."""
        self._reach(count, length)
        row = np.minimum(np.searchsorted(self._counts, count), len(self._counts) - 1)
        column = np.minimum(np.searchsorted(self._lengths, length), len(self._lengths) - 1)
        return np.asarray(self._rates[row, column])

    def _reach(self, counts: FloatArray, lengths: FloatArray) -> None:
        """The grid covers these sizes."""
        count, length = float(counts.max(initial=1.0)), float(lengths.max(initial=1.0))
        if count <= self._top[0] and length <= self._top[1]:
            return
        room = CORNERS_ROOM if count > CORNERS else 2.0
        self._top = (max(room * count, self._top[0], FIRST_TOP),
                     max(2 * length, self._top[1], FIRST_TOP))
        self._counts = _nodes(self._top[0], COUNTS_AN_OCTAVE)
        self._counts = np.append(np.arange(1.0, min(SINGLES, self._top[0])), self._counts[
            self._counts >= min(SINGLES, self._top[0])])
        self._lengths = _nodes(self._top[1], NODES_AN_OCTAVE)
        seconds = self._function(self._counts[:, None], self._lengths[None, :])
        finite = np.where(np.isfinite(seconds), seconds, np.inf)
        longer = np.minimum.accumulate(finite[:, ::-1], axis=1)[:, ::-1]
        share = longer / self._counts[:, None]
        fewer = np.minimum.accumulate(share, axis=0) * self._counts[:, None]
        more = np.minimum.accumulate(longer[::-1], axis=0)[::-1]
        self._factors = {False: _cells(fewer, seconds), True: _cells(more, seconds)}
        rate = finite / (self._counts[:, None] * self._lengths[None, :])
        self._rates = np.minimum.accumulate(np.minimum.accumulate(rate, axis=0), axis=1)


def _nodes(top: float, an_octave: int) -> FloatArray:
    """Sizes from 1 to `top` at least."""
    return np.asarray(2.0 ** (np.arange(np.ceil(np.log2(top) * an_octave) + 1) / an_octave))


def _cells(lower: FloatArray, seconds: FloatArray) -> FloatArray | None:
    """[nodes - 1, nodes - 1] the least factor at a cell's corners; None where all are 1."""
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where(np.isfinite(seconds) & (seconds > 0), lower / seconds, 1.0)
    if (factor >= FLAT).all():
        return None
    least = np.minimum(np.minimum(factor[:-1, :-1], factor[1:, :-1]),
                       np.minimum(factor[:-1, 1:], factor[1:, 1:]))
    return np.asarray(least)
