"""What every rank's life has in common, whatever it executes: its end, and its clock; and around
rank 0's head the queries to be answered, and the account of the run."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable

from xgpt.core.errors import XgptError
from xgpt.core.spool import Spool
from xrunner.engine.head import Head
from xrunner.engine.measured import Outcome, write_measured
from xrunner.engine.pipeline import RankReport
from xrunner.io.intake import queries_of
from xrunner.io.results import Answered, answered, count_results
from xrunner.io.sink import Progress, RunSink, write_progress
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery
from xrunner.rules.order import run_order
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


def read_work(plan: RunPlan) -> tuple[list[PreparedQuery], int, Answered]:
    """(all queries, number of error records, those of the queries that an earlier run answered)"""
    write_progress(plan.output / "progress.json", Progress(
        state="loading", total=0, done=0, output_tokens=0, elapsed_s=0.0, latency_p50_s=None,
        latency_p99_s=None))
    spool, results = Spool(plan.output), plan.output / "results.jsonl"
    count_results(results)
    return list(queries_of(spool, plan)), spool.num_errors, answered(results)


def order_of(num_queries: int, plan: RunPlan, before: Answered) -> list[int]:
    """Places of the queries that are left, as they are taken up."""
    return run_order(num_queries, plan.shuffle_window, plan.seed, first=before.written,
                     without=before.held)


def conduct(head: Head, sink: RunSink, world: World, clock: Stopwatch, *,
            report: Callable[[], RankReport], queries_before: int, num_errors: int) -> None:
    """Rank 0's run, from the ranks' common start on, and its account. `report`: of this rank."""
    world.barrier()
    clock.restart()
    is_complete = head.run()
    wall_s = clock()
    state = "done" if is_complete else "stopped"
    sink.close(wall_s, state)
    world.comm.flush()
    reports = world.gather(report()) or []
    write_measured(sink.output, Outcome(
        state=state, wall_s=wall_s, queries_before=queries_before, num_errors=num_errors,
        num_held=sink.num_held, changes=sink.launcher.taken if sink.launcher is not None else ()),
        sink.tally, reports)
