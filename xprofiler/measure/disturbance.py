"""Whether others were at work on the machine while something was measured.

Two signs, of which the stronger counts, each as a share of the machine that was missing:

- of the cores' time, what neither these ranks used nor nobody did, a host's other guests included
  (/proc/stat, in hundredths of a second, against the ranks' own processor time);
- of the ranks' time, what their threads waited for a core (/proc/self/task/*/schedstat,
  nanoseconds: it tells where a point takes less than the accounts' hundredths)."""

import os
import socket
import time
from collections import defaultdict
from typing import NamedTuple

from xgpt.core.busy import busy_s, children_s
from xprofiler.measure.ranks import Ranks
from xprofiler.profile import DISTURBED_LIMIT
from xrunner.rank.threads import WaitedForCores

LEAST_OTHERS_S = 0.03  # three of the accounts' hundredths: less may be a matter of rounding
LOOK_S = 0.25  # between looks whether the others have ended


class _Seen(NamedTuple):
    """One rank's counts since the beginning."""

    host: str
    busy_s: float | None  # of all cores of the host
    own_s: float
    waited_s: float
    elapsed_s: float


class Disturbance:
    """Of all ranks together: every call is collective."""

    def __init__(self, ranks: Ranks, patience_s: float) -> None:
        """patience_s: that may be spent, in all, on waiting for others and on measuring again what
        they disturbed."""
        self._ranks, self._waited = ranks, WaitedForCores(is_always=True)
        self._cores, self._left_s = os.cpu_count() or 1, patience_s
        self._before = self._now()
        self._last_s = 0.0

    def begin(self) -> None:
        """Counts from here on."""
        self._before = self._now()

    def missing(self) -> float:
        """Share of the machine that was missing since the beginning."""
        then, now = self._before, self._now()
        busy = None if now.busy_s is None or then.busy_s is None else now.busy_s - then.busy_s
        self._last_s = now.elapsed_s - then.elapsed_s
        mine = _Seen(now.host, busy, now.own_s - then.own_s, now.waited_s - then.waited_s,
                     self._last_s)
        return missing_share(self._ranks.gather(mine, _Seen), self._cores)

    def has_patience(self) -> bool:
        """Whether to measure again what was disturbed: after waiting until the others have ended,
        as far as there is patience left."""
        self._left_s -= self._last_s  # of the attempt that is thrown away
        while self._ranks.agree(self._left_s > LOOK_S):
            self.begin()
            time.sleep(LOOK_S)
            self._left_s -= LOOK_S
            if self.missing() <= DISTURBED_LIMIT:
                return True
        return False

    def _now(self) -> _Seen:
        children = children_s(os.getpid())  # vLLM computes in those, while this process waits
        return _Seen(socket.gethostname(), busy_s(), time.process_time() + children,
                     0.0 if children else self._waited(), time.monotonic())


def missing_share(seen: list[_Seen], cores: int) -> float:
    """The largest of what each host's ranks saw."""
    hosts: dict[str, list[_Seen]] = defaultdict(list)
    for one in seen:
        hosts[one.host].append(one)
    shares = [0.0]
    for own in hosts.values():
        elapsed_s = max(max(one.elapsed_s for one in own), 1e-9)
        counted = [one.busy_s for one in own if one.busy_s is not None]
        if counted:
            others_s = max(counted) - sum(one.own_s for one in own)
            shares.append(others_s / elapsed_s / cores if others_s > LEAST_OTHERS_S else 0.0)
        # of several threads one that waits holds up all
        shares.append(max(one.waited_s / max(one.elapsed_s, 1e-9) for one in own))
    return min(max(shares), 1.0)
