"""Terms of a layer's time as linear functions of a placement's nine shares: copies up (host to
device) and down, reads and writes of the disk, and computing (xsimulator.placed)."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray
from xgpt.core.placement import DISK, HOST

TERMS = UP, DOWN, READ, WRITE, COMPUTE = range(5)
WEIGHTS, KV, HIDDEN = 0, 3, 6  # place of each kind's shares (device, host, disk) among the nine
_NAMES = {WEIGHTS: "weights", KV: "kv", HIDDEN: "hidden"}


class Links(Protocol):
    """Rates of a node's copies."""

    def seconds_per_byte(self, term: int, what: str, phase: str) -> float | None:
        """Seconds of a byte of weights, kv or hidden over the link of `term`, in a step that
        encodes or decodes; None: there is no such link."""


class Terms(NamedTuple):
    """Terms of one layer as linear functions of the nine shares: `by_share` [..., 5, 9] and
    `fixed` [..., 5] in seconds, `moved` [..., 4, 9] in bytes of the four links."""

    by_share: FloatArray
    fixed: FloatArray
    moved: FloatArray

    def at(self, shares: ArrayLike) -> FloatArray:
        """[..., 5] seconds of each term at `shares` [..., 9]."""
        return _times(self.by_share, shares) + self.fixed

    def bytes_at(self, shares: ArrayLike) -> FloatArray:
        """[..., 4] bytes up, down, read and written at `shares` [..., 9]."""
        return _times(self.moved, shares)


class PlacedStep(NamedTuple):
    """A step on one stage: `layers` layers with the terms `layer` each, the head as a layer of its
    own (None: not on this stage), and [...] seconds of embedding, messages and overhead."""

    layers: int
    layer: Terms
    head: Terms | None
    other_s: FloatArray

    def seconds(self, shares: ArrayLike, serial_share: float) -> FloatArray:
        """[...] seconds of the step with `shares` [..., 9] in every layer and in the head."""
        total = self.other_s + self.layers * layer_s(self.layer.at(shares), serial_share)
        return total if self.head is None else total + layer_s(self.head.at(shares), serial_share)


def layer_s(terms: FloatArray, serial_share: float) -> FloatArray:
    """[...] seconds of a layer with `terms` [..., 5]."""
    return np.asarray((1 - serial_share) * terms.max(-1) + serial_share * terms.sum(-1))


def _times(by_share: FloatArray, shares: ArrayLike) -> FloatArray:
    own = np.asarray(shares, float)[..., None, :]
    with np.errstate(invalid="ignore"):  # an unknown (infinite) time of what is nowhere
        return np.asarray(np.where(own == 0, 0.0, by_share * own).sum(-1))


class TermsForm:
    """Terms of a layer while they are added up."""

    def __init__(self, links: Links, compute: FloatArray, phase: str) -> None:
        """compute: [...] seconds whatever the shares. phase: encode or decode."""
        self._links, self._phase, shape = links, phase, compute.shape
        self.terms = Terms(np.zeros((*shape, 5, 9)), np.zeros((*shape, 5)),
                           np.zeros((*shape, 4, 9)))
        self.terms.fixed[..., COMPUTE] = compute

    def add(self, term: int, kind: int, num_bytes: FloatArray, *tiers: int, what: str = "") -> None:
        """Adds bytes over a link for what lies on `tiers`. Without a host there is no link to it.
        """
        rate = self._links.seconds_per_byte(term, what or _NAMES[kind], self._phase)
        if rate is None:
            return
        for tier in tiers:
            self.terms.moved[..., term, kind + tier] += num_bytes
            self.terms.by_share[..., term, kind + tier] += num_bytes * rate

    def compute(self, kind: int, seconds: FloatArray, *tiers: int) -> None:
        """Adds seconds of computing for what lies on `tiers`."""
        for tier in tiers:
            self.terms.by_share[..., COMPUTE, kind + tier] += seconds

    def copy(self, kind: int, num_bytes: FloatArray, widened_s: FloatArray | float = 0.0) -> None:
        """Adds bytes that are needed on the device, and seconds to widen them there."""
        self.add(UP, kind, num_bytes, HOST, DISK)
        self.add(READ, kind, num_bytes, DISK)
        self.compute(kind, np.asarray(widened_s), HOST, DISK)

    def store(self, kind: int, num_bytes: FloatArray, packed_s: FloatArray | float = 0.0) -> None:
        """Adds bytes that the device writes, and seconds to pack them there."""
        self.add(DOWN, kind, num_bytes, HOST, DISK)
        self.add(WRITE, kind, num_bytes, DISK)
        self.compute(kind, np.asarray(packed_s), HOST, DISK)
