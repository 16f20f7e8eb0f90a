"""How much of the cores others used meanwhile: the usual reason why a run on CPU ranks is slower
than its prediction."""

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path

NOTICEABLE_SHARE = 0.05  # with a rank on every core, this much slows all of them


class Contention:
    """Starts counting when made. `others_share` is known once child processes have been waited for:
    their time counts as ours, but for what those that are there already (`children`) have used."""

    def __init__(self, stat: Path = Path("/proc/stat"), children: Iterable[int] = ()) -> None:
        self._stat = stat
        self._busy_s, self._start_s = _busy_s(stat), time.monotonic()
        self._own_s = _own_s() + sum(_used_s(child) for child in children)

    def others_share(self) -> float | None:
        """Share of all cores that was neither idle nor ours (a host's other guests included); None
        where the system does not say."""
        busy_s, elapsed_s = _busy_s(self._stat), time.monotonic() - self._start_s
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return max(others_s, 0.0) / elapsed_s / (os.cpu_count() or 1)


def in_words(share: float | None) -> str | None:
    """A sentence where others were noticeable."""
    if share is None or share < NOTICEABLE_SHARE:
        return None
    return (f"other processes used {share:.0%} of the cores meanwhile; times measured here mean "
            "little unless the machine is quiet")


def _busy_s(stat: Path) -> float | None:
    """Seconds all cores together were not idle since boot."""
    try:
        fields = stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _used_s(process: int) -> float:
    """Seconds of the cores that a process has used; 0 where it has ended, or the system does not
    say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in spent)
