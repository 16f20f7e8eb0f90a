"""How likely it is that nobody of a group is active: such a group takes no step."""

from __future__ import annotations

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray

GROUP_OCTAVES = np.arange(-6, 9)  # queries encoded in a group, as powers of 2


class Absence:
    """Chances that none of a group's queries is active, at each iteration of a phase, by how many
    queries the group encodes (GROUP_OCTAVES) and, where that is one every so many phases, by how
    many phases ago it last did: its offset."""

    def __init__(self, survival: FloatArray) -> None:
        """survival: [phases, N_D] P(D >= j N_D + u)."""
        with np.errstate(divide="ignore"):
            logs = np.log1p(-np.minimum(survival, 1.0))
        self._of_one = logs.sum(axis=0)
        self._by_offset: list[FloatArray] = []  # [offsets, N_D], for strides that fall to 2
        for stride in 2 ** np.arange(-GROUP_OCTAVES[0], 0, -1):
            # sums over the phases of one offset; offsets without a phase are certain, left out
            logs = _folded(logs, int(stride))
            self._by_offset.append(np.exp(logs))

    def log_mean(self) -> FloatArray:
        """[N_D, octaves] logarithm of the mean over offsets."""
        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = [np.log((rows.sum(axis=0) + stride - len(rows)) / stride)
                     for stride, rows in self._strides()]
            octaves += [self._of_one * times for times in self._multiples]
        return np.stack(octaves, axis=1)

    def mean_of(self, phases: IntArray) -> list[FloatArray]:
        """[N_D] mean over the offsets that these phases are at, for the octaves below 0."""
        means = []
        for stride, rows in self._strides():
            at = phases % stride
            certain = int((at >= len(rows)).sum())
            means.append((rows[at[at < len(rows)]].sum(axis=0) + certain) / len(phases))
        return means

    @property
    def of_multiples(self) -> list[FloatArray]:
        """[N_D] for the other octaves: offsets make no difference there."""
        return [np.exp(self._of_one * times) for times in self._multiples]

    def _strides(self) -> list[tuple[int, FloatArray]]:
        return [(2 ** (len(self._by_offset) - k), rows) for k, rows in enumerate(self._by_offset)]

    @property
    def _multiples(self) -> list[float]:
        return [2.0**octave for octave in GROUP_OCTAVES if octave >= 0]


def _folded(rows: FloatArray, stride: int) -> FloatArray:
    """Sums of rows that are `stride` apart: at most `stride` of them."""
    sums = rows[:stride].copy()
    for begin in range(stride, len(rows), stride):
        part = rows[begin:begin + stride]
        sums[: len(part)] += part
    return sums
