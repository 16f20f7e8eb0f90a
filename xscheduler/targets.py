"""Latency bounds to search with, one after the other, for the best schedule whose own margin still
keeps the bound that was asked for.

    empty    nothing at all keeps the target
    beaten   what does has no more than what is had elsewhere, or nobody asked how safe it is
    safe     its best schedule keeps the bound with its margin
    unsafe   it does not

Next comes a target above the last that is not unsafe, and below the least that is. What comes next
depends on the unsafe ones alone, and where one had to be looked for at all: not on the figures of
what is beaten or safe, nor on what is had elsewhere. So who looks for what is better than a floor
goes the same way as who has none, as far as it leads to anything: a target whose best is no better
than the floor is `beaten` to the one and `safe` to the other, which is the same here; or it is
`unsafe` to the other, who then looks below it alone, where no more is to be had than there."""

from __future__ import annotations

import math
from typing import NamedTuple

from xscheduler.uncertainty import MarginParts

NEAR = 1.02  # a target that is not unsafe and an unsafe one this near each other: no more is to be
# gained, but while
STEEP = 1.05  # times what is had: an unsafe schedule near it has more; then as far as
NEAREST = 1.005
WORTH = 0.02  # share of its throughput that an unsafe schedule must have more to go on: the first
# searches of all policies leave as much open, and what is given up is within the bound that is told
GROW = 1.15  # from a target to the next, while none is known to be unsafe
SHRINK = 0.985  # of an unsafe schedule's latency: what is tried next, at least; more each time
FAR = 1.3  # between what nothing meets and an unsafe target: further apart, their middle is tried
# where margins leap, as those for lengths do
SHRINK_UNKNOWN = 0.75  # the same of one whose margin is infinite: beyond what the profile reaches


class Unsafe(NamedTuple):
    """A target whose best schedule does not keep the bound with its margin. needed_s: its latency
    with it. qps: its throughput."""

    target_s: float
    needed_s: float
    qps: float
    margin: MarginParts


class Targets:
    """What came of the targets so far, and which is next. All in seconds."""

    def __init__(self, bound_s: float, begin_s: float) -> None:
        """bound_s: what is asked for. begin_s: the first target."""
        self._bound_s, self._begin_s = bound_s, begin_s
        self._low_s: float | None = None  # the largest that is not unsafe
        self._is_empty = False  # that one
        self._high: Unsafe | None = None  # the least that is
        self._num_unsafe = 0

    def next_s(self, *, had_qps: float, safe_qps: float) -> float | None:
        """The next target; None where no more is to be gained. had_qps: had with its margin, here
        or elsewhere. safe_qps: here alone."""
        low_s, high = self._low_s, self._high
        if high is None:
            return self._begin_s if low_s is None else GROW * low_s
        if high.qps <= (1 + WORTH) * had_qps:
            return None
        if low_s is None:
            return self._begin_s
        apart = high.target_s / low_s
        if apart <= NEAREST or (apart <= NEAR and high.qps <= STEEP * safe_qps) or (
                self._is_empty and self._is_shut(low_s, high)):
            return None
        aimed_s, room = self._aimed_s(high), min(math.sqrt(NEAR), math.sqrt(math.sqrt(apart)))
        return math.sqrt(low_s * high.target_s) if aimed_s < low_s * room else (
            min(aimed_s, high.target_s / room))

    def beaten(self, target_s: float) -> None:
        """Or safe."""
        self._low_s, self._is_empty = target_s, False

    def empty(self, target_s: float) -> None:
        self._low_s, self._is_empty = target_s, True

    def unsafe(self, unsafe: Unsafe, searched_s: float) -> None:
        """searched_s: the schedule's latency in the eyes of the search."""
        self._high, self._num_unsafe = unsafe, self._num_unsafe + 1
        self._begin_s = min(SHRINK**self._num_unsafe * searched_s, tighter_s(
            unsafe.target_s, searched_s, unsafe.needed_s / self._bound_s))

    def begin_below(self, unsafe: Unsafe) -> None:
        """What is known to be unsafe from the start."""
        self._high = unsafe

    def _aimed_s(self, high: Unsafe) -> float:
        """Where the bound would just be kept, if margins were all like that of the unsafe one."""
        return high.target_s * self._bound_s / high.needed_s

    def _is_shut(self, low_s: float, high: Unsafe) -> bool:
        """Whether nothing is expected above a target that nothing keeps. One that a replay shows to
        be far off is that schedule's own."""
        margin = high.margin
        is_even = margin.lengths * margin.drift == 1 and margin.model < FAR
        return math.isfinite(high.needed_s) and self._aimed_s(high) <= NEAR * low_s and (
            is_even or high.target_s <= FAR * low_s)


def tighter_s(target_s: float, searched_s: float, factor: float) -> float:
    """The target after one whose schedule (of latency `searched_s`) needs `factor` times as
    much."""
    if math.isinf(factor):
        return SHRINK_UNKNOWN * min(target_s, searched_s)
    return target_s / factor
