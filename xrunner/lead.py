"""Rank 0 around its head: the queries to be answered, and the account of the run."""

from __future__ import annotations

from collections.abc import Callable

from xgpt.core.spool import Spool
from xrunner.engine.head import Head
from xrunner.engine.measured import Outcome, write_measured
from xrunner.engine.pipeline import RankReport
from xrunner.io.prepare import queries_of
from xrunner.io.progress import Progress, write_progress
from xrunner.io.results import Answered, answered, count_results
from xrunner.io.sink import RunSink
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery
from xrunner.rank import Stopwatch
from xrunner.rules.order import run_order
from xrunner.world import World


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
