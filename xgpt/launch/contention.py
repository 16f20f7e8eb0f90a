"""How much of the cores others used meanwhile: the usual reason why a run on CPU ranks is slower
than its prediction."""

import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from xgpt.core.system.machine import busy_s, used_s

NOTICEABLE_SHARE = 0.10  # below it times are off by less than profiles' own points scatter
LARGE_SHARE = 0.30  # above it nothing tells by how much times are off


class Contention:
    """Starts counting when made. The time of child processes that have been waited for counts as
    ours, and that of `alive`, which tells those that are there without having been."""

    def __init__(self, stat: Path = Path("/proc/stat"),
                 alive: Callable[[], Iterable[int]] = lambda: ()) -> None:
        self._stat, self._alive = stat, alive
        self._busy_s, self._start_s = busy_s(stat), time.monotonic()
        self._own_s = self._used_by_us_s()

    def others_share(self) -> float | None:
        """Share of all cores that was neither idle nor ours (a host's other guests included); None
        where the system does not say."""
        now_s, elapsed_s = busy_s(self._stat), time.monotonic() - self._start_s
        if now_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        others_s = now_s - self._busy_s - (self._used_by_us_s() - self._own_s)
        return max(others_s, 0.0) / elapsed_s / (os.cpu_count() or 1)

    def _used_by_us_s(self) -> float:
        return _own_s() + sum(used_s(child) for child in self._alive())


def in_words(share: float | None) -> str | None:
    """A sentence where others were noticeable."""
    if share is None or share < NOTICEABLE_SHARE:
        return None
    text = f"other processes used {share:.0%} of the cores meanwhile; times measured here "
    if share >= LARGE_SHARE:
        return f"{text}mean little unless the machine is quiet"
    return f"{text}may be up to {share / (1 - share):.0%} longer than on a quiet machine"


def _own_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in spent)
