"""Queries that a replica was given and has not begun, and that would begin sooner in another: how
many are to be called back from whom, and for whom.

How long a replica takes for a batch is told without a clock, in queries that all replicas together
begin meanwhile: those begun last count most. A query in the j-th batch of those that wait in a
replica at work begins, as is to be expected, after j - 1/2 such times; one that comes to a replica
that has just begun others, after j, and after j - 1 to one that could begin at once. How long it
is at work there follows from Little's law: as long as the replica takes to begin as many as it has
at work. Queries move to where they end sooner. So what waits for a replica that is behind goes to
those that are not, and between equal ones it moves only to one that is dry."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from xrunner.rules.windows import Load, Window

# A replica's pace is told over as many queries as it has at work, and no fewer than so many
# batches; paces are the same to it from this share of the quickest on, for begins come in bursts.
_LEAST_BATCHES, _EVEN = 6, 0.75


class Recall(NamedTuple):
    """Queries wanted back from the replica, one for each of these others."""

    replica: int
    takers: tuple[int, ...]


class Paces:
    """How quickly each replica begins queries, beside the others."""

    def __init__(self, windows: Sequence[Window], speeds: Sequence[float] = ()) -> None:
        """`speeds`: as planned; () where all are alike."""
        self._memory = sum(max(_LEAST_BATCHES * window.batch, window.at_work)
                           for window in windows)
        planned = speeds or [1.0] * len(windows)
        self._usual = [self._memory * speed / sum(planned) for speed in planned]
        self._begun = list(self._usual)
        self.has_begun = [False] * len(windows)

    def note_begun(self, replica: int, count: int) -> None:
        """So many of the replica's queries have begun."""
        fading = math.exp(-count / self._memory)
        self._begun = [begun * fading for begun in self._begun]
        self._begun[replica] += self._memory * (1 - fading)
        self.has_begun[replica] = True

    def times(self) -> list[float]:
        """Of each replica: queries that all begin while it begins one."""
        shares = [begun / usual for begun, usual in zip(self._begun, self._usual, strict=True)]
        even = _EVEN * max(shares)
        return [self._memory / (usual * (max(shares) if share >= even else max(share, 1e-9)))
                for usual, share in zip(self._usual, shares, strict=True)]


def recalls(windows: Sequence[Window], paces: Paces, loads: Sequence[Load],
            coming: Sequence[int], asked: Sequence[bool]) -> list[Recall]:
    """What is to be called back, nothing being left to be given out. `coming`: queries on their way
    to each replica from others; `asked`: whose answer is awaited, or who has none to give back."""
    replicas = range(len(windows))
    lines = [load.waiting + more for load, more in zip(loads, coming, strict=True)]
    free = [window.can_begin(load) and not more
            for window, load, more in zip(windows, loads, coming, strict=True)]
    # who was given its first queries begins them as soon as it hears of them
    is_late = [not window.can_begin(Load(0, load.active))
               for window, load in zip(windows, loads, strict=True)]
    each = paces.times()
    times = [time * window.batch for time, window in zip(each, windows, strict=True)]
    lives = [time * window.at_work for time, window in zip(each, windows, strict=True)]
    takers: dict[int, list[int]] = {}

    def would_end(replica: int) -> float:
        """When one query more would end there."""
        batches = math.ceil((lines[replica] + 1) / windows[replica].batch)
        return (batches - free[replica]) * times[replica] + lives[replica]

    def is_to_end(replica: int) -> float:
        """When the last that waits there is to end."""
        batches = math.ceil(lines[replica] / windows[replica].batch)
        return (batches - (0.5 if is_late[replica] else 1.0)) * times[replica] + lives[replica]

    while True:
        givers = [replica for replica in replicas if not asked[replica] and paces.has_begun[replica]
                  and len(takers.get(replica, ())) < loads[replica].waiting]
        giver = max(givers, key=is_to_end, default=None)
        low = [replica for replica in replicas if giver is not None and (
            not loads[replica].waiting or each[replica] < each[giver] and (
                loads[replica].waiting <= windows[replica].waiting // 2))]
        if giver is None or not low:
            break
        taker = min(low, key=would_end)
        if would_end(taker) >= is_to_end(giver):
            break
        takers.setdefault(giver, []).append(taker)
        lines[giver] -= 1
        lines[taker] += 1
    return [Recall(replica, tuple(own)) for replica, own in sorted(takers.items())]
