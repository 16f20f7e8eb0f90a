"""The measuring ranks as one: begin together, gather, agree. A single rank needs no MPI.

The share of the machine that other programs used is estimated in two ways; the larger counts:

- Core time that was neither idle nor used by these ranks, a host's other guests included, from
  the hundredths of a second of /proc/stat.

- Time that the ranks' threads waited for a core. /proc/self/task/*/schedstat counts nanoseconds,
  which is fine enough for short points."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from xgpt.core.system.machine import busy_s, children_s
from xprofiler.measure.probe import StepParts
from xprofiler.points import SPREAD_LIMIT
from xprofiler.profile import DISTURBED_LIMIT, NOISE_LIMIT
from xrunner import devices
from xrunner.comm.exchange import all_gather, broadcast
from xrunner.comm.point_to_point import wait_politely
from xrunner.rank.threads import WaitedForCores

_ATTEMPTS = 3  # chosen, as all here
_POINT_S = 0.15  # seconds of measuring a point, within these numbers of steps
_MIN_STEPS, _MAX_STEPS = 5, 40
_BRIEF_POINT_S, _BRIEF_STEPS = 0.02, 3  # seconds and least steps of a brief measurement
_SLOW_STEP_S, _SLOW_STEPS = 0.3, 2  # a step this slow hardly scatters: the first one counts too
_PAUSE_S = 0.02  # lets ranks that finished a point early stop spinning in the next barrier


class Steps(list[StepParts]):
    """Timed steps of one point. `missing`: share of the machine that other programs used."""

    missing = 0.0


class Ranks:
    """The measuring ranks. `world`: COMM_WORLD of mpi4py, or None for a single rank started without
    a launcher.

    Where ranks outnumber the cores they measure in `turns`, as many at once as have a core each:
    sharing a core would add the chance of the system's scheduling.
    """

    def __init__(self, world: Any, turns: int = 1) -> None:
        self.world, self._turns = world, turns
        self.rank = 0 if world is None else int(world.Get_rank())
        self.size = 1 if world is None else int(world.Get_size())

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world is not None:
            self.world.Barrier()

    def _in_turn(self, measure: Callable[[], Any]) -> Any:
        """This rank's result of `measure`, called together with the ranks of the same turn."""
        mine = None
        for turn in range(self._turns):
            if self._turns == 1 or self.world is None:
                self.barrier()
            else:  # those whose turn it is not must not spin away the others' cores
                request = self.world.Ibarrier()
                wait_politely(lambda request=request: bool(request.Test()))  # type: ignore[misc]
            if self.rank % self._turns == turn:
                mine = measure()
        return mine

    def gather(self, mine: Any, kind: Any) -> list[Any]:
        """Every rank's `mine`, a value of type `kind`, in the order of ranks, on every rank."""
        return [mine] if self.world is None else all_gather(self.world, mine, kind)

    def agree(self, mine: bool) -> bool:
        """Rank 0's answer, on every rank: clocks and files may differ between ranks."""
        return mine if self.world is None else bool(broadcast(self.world, mine, bool))

    def measure_all(self, measure: Callable[[], Sequence[Any]], kind: Any = float) -> list[Any]:
        """All ranks' results of `measure`, joined: values of type `kind`. Ranks call it at the same
        time, or in turns."""
        mine = list(self._in_turn(measure))
        time.sleep(_PAUSE_S)
        return [s for each in self.gather(mine, list[kind]) for s in each]

    def measure_step(self, step: Callable[[], StepParts], *, is_brief: bool = False,
                     watch: Disturbance | None = None, is_warm: bool = True) -> Steps:
        """Times `step` on all ranks; repeats where times disagree or other programs ran, and
        returns the least disturbed attempt.

        `is_brief`: few steps, repeated only above NOISE_LIMIT and while `watch` has patience.
        `watch`: detects other programs (None: not looked for). `is_warm`: False executes the step
        once before, to load its kernels."""
        if not is_warm:
            self._in_turn(step)
        first, count = self.gather(self._in_turn(step), StepParts), _SLOW_STEPS
        is_slow = max(parts.whole_s for parts in first) >= _SLOW_STEP_S
        if is_brief and not is_slow:
            once_s = max(parts.whole_s for parts in first)
            count = int(np.clip(_BRIEF_POINT_S / once_s, _BRIEF_STEPS, _MAX_STEPS))
        elif not is_slow:  # the first was a warm-up
            once_s = max(parts.whole_s for parts in self.gather(
                self._in_turn(step), StepParts))
            count = int(np.clip(_POINT_S / once_s, _MIN_STEPS, _MAX_STEPS))
        attempts: list[Steps] = []
        most = NOISE_LIMIT if is_brief else SPREAD_LIMIT
        for _ in range(_ATTEMPTS):
            if watch is not None:
                watch.begin()
            steps = self.measure_all(lambda: [step() for _ in range(count)], StepParts)
            attempts.append(Steps([*first, *steps] if is_slow else steps))
            if watch is not None:
                attempts[-1].missing = watch.missing()
            is_steady = _spread(attempts[-1]) <= most
            if is_steady and attempts[-1].missing <= DISTURBED_LIMIT:
                break
            # brief: no longer than there is patience, whatever disturbs
            if watch is not None and (is_steady or is_brief) and not watch.has_patience():
                break
        return min(attempts, key=lambda own: (
            own.missing if own.missing > DISTURBED_LIMIT else 0.0, _spread(own)))


def connect(ranks: int, sharing: float = 1.0) -> Ranks:
    """The launcher's ranks, of which there must be `ranks`. `sharing`: see
    xprofiler.profile.ProfileMetadata."""
    if "mpi4py" not in sys.modules:
        assert ranks == 1, f"{ranks = } without MPI"
        return Ranks(None)
    from mpi4py import MPI

    connected = Ranks(MPI.COMM_WORLD, math.ceil(sharing))
    assert connected.size == ranks, f"{connected.size = } {ranks = }"
    return connected


def select_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this rank: the CPU, or for a profile of GPUs one of them, as in a run."""
    place = 0 if ranks.world is None else devices.local_rank(ranks.world)
    return devices.select_device("cpu" if name.startswith("cpu") else "gpu", place)


def _spread(steps: Sequence[StepParts]) -> float:
    low, middle, high = np.quantile([s.whole_s for s in steps], (0.25, 0.5, 0.75))
    return float(high - low) / float(middle)


LEAST_OTHERS_S = 0.03  # chosen: three hundredths of /proc/stat; less may be a matter of rounding
LOOK_S = 0.25  # chosen: seconds between looks whether other programs have ended


class _Seen(NamedTuple):
    """Counts of one rank, in seconds."""

    host: str
    busy_s: float | None  # sum over all cores of the host
    own_s: float
    waited_s: float
    elapsed_s: float


class Disturbance:
    """Detects other programs on the machine while ranks measure. Every call is collective."""

    def __init__(self, ranks: Ranks, patience_s: float) -> None:
        """`patience_s`: total seconds to spend waiting for other programs and re-measuring."""
        self._ranks, self._waited = ranks, WaitedForCores(is_always=True)
        self._cores, self._left_s = os.cpu_count() or 1, patience_s
        self._before = self._now()
        self._last_s = 0.0

    def begin(self) -> None:
        """Starts counting from this moment."""
        self._before = self._now()

    def missing(self) -> float:
        """Share of the machine, 0 to 1, that other programs used since `begin`."""
        then, now = self._before, self._now()
        busy = None if now.busy_s is None or then.busy_s is None else now.busy_s - then.busy_s
        self._last_s = now.elapsed_s - then.elapsed_s
        mine = _Seen(now.host, busy, now.own_s - then.own_s, now.waited_s - then.waited_s,
                     self._last_s)
        return missing_share(self._ranks.gather(mine, _Seen), self._cores)

    def has_patience(self) -> bool:
        """Waits until other programs have ended; False once the patience is spent, and the
        disturbed measurement is not to be repeated."""
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
    """Share of the machine, 0 to 1, that other programs used: the largest over all hosts. `cores`:
    of each host."""
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
