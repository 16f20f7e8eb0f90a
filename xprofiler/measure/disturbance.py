"""Whether others were at work on the machine while something was measured, and how fast it was.

Three signs, of which the strongest counts, each as a share of the machine that was missing:

- of the cores' time, what neither these ranks used nor nobody did, a host's other guests included
  (/proc/stat, in hundredths of a second, against the ranks' own processor time);
- of the ranks' time, what their threads waited for a core (/proc/self/task/*/schedstat,
  nanoseconds: it tells where a point takes less than the accounts' hundredths);
- what a short calibration takes, a matrix product and a read of memory, against the best that the
  machine has shown (an even slowdown, as of a clock turned down, leaves no other trace)."""

import json
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xgpt.core.busy import busy_s, children_s
from xgpt.core.whole_file import write_atomically
from xprofiler.measure.ranks import Ranks
from xprofiler.profile import DISTURBED_LIMIT
from xrunner.threads import WaitedForCores

LEAST_OTHERS_S = 0.03  # three of the accounts' hundredths: less may be a matter of rounding
LOOK_S = 0.25  # between looks whether the others have ended
_SIDE, _BYTES, _ROUNDS = 384, 2**24, 5
CALIBRATION_FILE = "calibration.json"  # the best that this machine has shown, beside the profiles


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


class Calibration:
    """The calibration of one kind of ranks, against the best of the machine."""

    def __init__(self, ranks: Ranks, folder: Path, name: str) -> None:
        """`folder`: of the profiles. `name`: of what is compared with its like."""
        self._ranks, self._path, self._name = ranks, folder / CALIBRATION_FILE, name
        matrix = torch.randn(_SIDE, _SIDE)
        source = torch.ones(_BYTES // 4)
        self._kernels: Mapping[str, Callable[[], object]] = {
            "product_s": lambda: matrix @ matrix, "read_s": lambda: source.sum()}
        self.best: dict[str, Any] = json.loads(ranks.gather(
            json.dumps(_read(self._path).get(name, {})), str)[0])

    def slowed(self) -> float:
        """How many times as long as at its best the machine takes for the slower of the two: 1, or
        more. What is quicker than ever is the best from now on."""
        for kernel in self._kernels.values():
            kernel()
        now = {name: statistics.median(self._ranks.together(
            lambda kernel=kernel: [_seconds(kernel) for _ in range(_ROUNDS)]))  # type: ignore[misc]
            for name, kernel in self._kernels.items()}
        factor = max((now[name] / self.best[name] for name in now if name in self.best),
                     default=1.0)
        better = {name: seconds for name, seconds in now.items()
                  if seconds < self.best.get(name, float("inf"))}
        if better:
            self.best |= {**better, "date": date.today().isoformat()}
            if self._ranks.rank == 0:
                write_atomically(self._path, json.dumps(
                    {**_read(self._path), self._name: self.best}, indent=1) + "\n")
        return max(factor, 1.0)


def _seconds(kernel: Callable[[], object]) -> float:
    begin = time.perf_counter()
    kernel()
    return time.perf_counter() - begin


def _read(path: Path) -> dict[str, Any]:
    """What is kept by name; nothing where it cannot be read: a cache is no input of the user's."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
