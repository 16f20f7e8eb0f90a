"""Which ids of requests there were, and where: 24 bytes an id at most twice over, however long it
is, so that ten million lines take less than half a gigabyte."""

from __future__ import annotations

from array import array
from hashlib import blake2b

_LEAST_SLOTS = 2**12
_FULL = 0.7  # beyond it searches grow long


class SeenIds:
    """A table by open addressing of ids' digests (128 bits: no two ids share one) to places, which
    are whole numbers >= 0."""

    def __init__(self) -> None:
        self._make(_LEAST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def place(self, name: str) -> int | None:
        """Where the id was; None where there was none such."""
        high, low = _digest(name)
        slot = self._slot(high, low)
        return self._places[slot] if self._low[slot] else None

    def add(self, name: str, place: int) -> None:
        """An id that was not there."""
        if self._count >= _FULL * len(self._low):
            self._grow()
        self._put(*_digest(name), place)

    def _put(self, high: int, low: int, place: int) -> None:
        slot = self._slot(high, low)
        assert not self._low[slot], "the id was there"
        self._high[slot], self._low[slot], self._places[slot] = high, low, place
        self._count += 1

    def _slot(self, high: int, low: int) -> int:
        """That of the digest, or the free one that it would take."""
        lows, highs, mask = self._low, self._high, len(self._low) - 1
        slot = low & mask
        while lows[slot] and (lows[slot] != low or highs[slot] != high):
            slot = (slot + 1) & mask
        return slot

    def _make(self, slots: int) -> None:
        empty = bytes(8 * slots)
        self._high, self._low = array("Q", empty), array("Q", empty)
        self._places, self._count = array("q", empty), 0

    def _grow(self) -> None:
        before = (self._high, self._low, self._places)
        self._make(2 * len(self._low))
        for high, low, place in zip(*before, strict=True):
            if low:
                self._put(high, low, place)


def _digest(name: str) -> tuple[int, int]:
    """Two halves, the lower never 0, which stands for a free slot."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") or 1
