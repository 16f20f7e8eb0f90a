"""Terms of a layer's time as linear functions of a placement's nine shares: copies up (host to
device) and down, reads and writes of the disk, and computing (xsimulator.placed)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray

TERMS = UP, DOWN, READ, WRITE, COMPUTE = range(5)
WEIGHTS, KV, HIDDEN = 0, 3, 6  # place of each kind's shares (device, host, disk) among the nine


class Terms(NamedTuple):
    """Terms of one layer as linear functions of the nine shares: `by_share` [..., 5, 9] and
    `fixed` [..., 5] in seconds, `moved` [..., 4, 9] in bytes of the four links."""

    by_share: FloatArray
    fixed: FloatArray
    moved: FloatArray

    def at(self, shares: ArrayLike) -> FloatArray:
        """[..., 5] seconds of each term at `shares` [..., 9]."""
        return _at(self.by_share, shares) + self.fixed

    def bytes_at(self, shares: ArrayLike) -> FloatArray:
        """[..., 4] bytes up, down, read and written at `shares` [..., 9]."""
        return _at(self.moved, shares)


class PlacedStep(NamedTuple):
    """A step on one stage: `layers` layers with the terms `layer` each, the head as a layer of its
    own (None: not on this stage), and [...] seconds of embedding, messages and overhead."""

    layers: int
    layer: Terms
    head: Terms | None
    other_s: FloatArray

    def of(self, index: int) -> "PlacedStep":
        """One of several steps."""
        parts = [Terms(*(own[index] for own in terms)) for _, terms in self.parts]
        return PlacedStep(self.layers, parts[0], parts[1] if self.head else None,
                          self.other_s[index])

    @property
    def parts(self) -> list[tuple[int, Terms]]:
        """Numbers of equal layers, each with its terms."""
        return [(self.layers, self.layer), *([] if self.head is None else [(1, self.head)])]

    def seconds(self, shares: ArrayLike, serial_share: float) -> FloatArray:
        """[...] seconds of the step with `shares` [..., 9] in every layer and in the head."""
        return self.other_s + sum(times * layer_s(terms.at(shares), serial_share)
                                  for times, terms in self.parts)


def layer_s(terms: FloatArray, serial_share: float) -> FloatArray:
    """[...] seconds of a layer with `terms` [..., 5]."""
    longest = terms.max(-1)
    with np.errstate(invalid="ignore"):  # an unknown (infinite) time is one of the layer
        return np.asarray(np.where(np.isinf(longest), longest,
                                   (1 - serial_share) * longest + serial_share * terms.sum(-1)))


def _at(by_share: FloatArray, shares: ArrayLike) -> FloatArray:
    own = np.asarray(shares, float)[..., None, :]
    with np.errstate(invalid="ignore"):  # an unknown (infinite) time of what is nowhere
        return np.asarray(np.where(own == 0, 0.0, by_share * own).sum(-1))
