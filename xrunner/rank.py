"""What every rank's life has in common, whatever it executes: its end, and its clock."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable

from xgpt.core.errors import XgptError
from xrunner.plan import RunPlan
from xrunner.world import World

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def to_the_end(plan: RunPlan, join: Callable[[], World],
               work: Callable[[RunPlan, World], None]) -> int:
    """One rank's `work` among the others that it joins, whatever comes in between; its exit
    code."""
    world = None
    try:
        world = join()
        work(plan, world)
        world.close()
    except XgptError as error:
        return _end(error, world)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return _end(XgptError(f"{plan.output}: {error.strerror}; what is done is kept, and with "
                              "room made the same command goes on from there"), world)
    return 0


def _end(error: XgptError, world: World | None) -> int:
    """Says why this rank cannot go on, and ends them all."""
    where = "" if world is None else f"rank {world.comm.rank}: "
    print(f"xgpt: {where}{error}", file=sys.stderr, flush=True)
    if world is not None:
        world.abort(error.exit_code)
    return error.exit_code


class Stopwatch:
    """Seconds since the run's common start, which comes after every rank has loaded."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def restart(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start
