"""What copies of a size may be worth once they are planned, by what is known of them so far:

    found      by a search, where there are no margins: that
    seen       at a glance, which sees a little less (UNSEEN)
    with margins of their own, of which nothing is known at first: all that was seen may be kept
    promised   seen under what their margins leave of the bound
    compared   equal copies of that size were planned for, and others have more: no more than those
    beaten     no more than they were asked for

Nothing is proved by a hope: it says which sizes are looked at more closely."""

from __future__ import annotations

import math

UNSEEN = 0.015  # share by which most sizes are worth more than a glance sees of those that win


class Hopes:
    """Hopes of the sizes of one problem's copies under one bound; throughputs are of one copy."""

    def __init__(self, *, has_margin: bool) -> None:
        """has_margin: what is seen has none, and what is used will."""
        self._has_margin = has_margin
        self._promised: set[int] = set()
        self._beaten: set[int] = set()
        self._compared: dict[int, float] = {}

    def is_promised(self, devices: int) -> bool:
        """Whether what is said of the size has its margin, as far as can be told before it is
        planned with one."""
        return not self._has_margin or devices in self._promised

    def promise(self, devices: int) -> None:
        self._promised.add(devices)

    def beat(self, devices: int) -> None:
        """What the size is worth is what it was asked for, and it has no more."""
        self._beaten.add(devices)

    def compare(self, devices: int, most_qps: float) -> None:
        self._compared[devices] = most_qps

    def of(self, devices: int, worth: float, seen_qps: float, *, is_found: bool) -> float:
        """worth: what is said of the size. seen_qps: what was seen of it without its margin."""
        if devices in self._beaten:
            return worth
        said_qps = worth if self.is_promised(devices) else seen_qps
        # what was promised was but seen
        is_all = is_found and not (self._has_margin and self.is_promised(devices))
        return min(said_qps if is_all else (1 + UNSEEN) * said_qps,
                   self._compared.get(devices, math.inf))
