"""Rank 0 around its head: the queries to be answered, and the account of the run."""

from __future__ import annotations

import json
from collections.abc import Callable

from xgpt.core.schedule import Schedule
from xgpt.core.workload import RequestError, read_requests
from xrunner.checkpoint.source import read_spec
from xrunner.engine.head import Head
from xrunner.engine.measured import write_measured
from xrunner.engine.pipeline import RankReport
from xrunner.io.prepare import prepare
from xrunner.io.progress import Progress, write_progress
from xrunner.io.results import Answered, answered, count_results
from xrunner.io.sink import RunSink
from xrunner.io.tokenizer import TextTokenizer
from xrunner.plan import RunPlan, write_atomically
from xrunner.query import PreparedQuery
from xrunner.rank import Stopwatch
from xrunner.rules.order import run_order
from xrunner.world import World


def read_work(plan: RunPlan, schedule: Schedule,
              ) -> tuple[list[PreparedQuery], list[RequestError], Answered]:
    """(all queries, error records, those of the queries that an earlier run answered)."""
    write_progress(plan.output / "progress.json", Progress(
        state="loading", total=0, done=0, output_tokens=0, elapsed_s=0.0, latency_p50_s=None,
        latency_p99_s=None))
    requests, errors = read_requests(plan.requests)
    spec = read_spec(plan.model_dir, plan.model_name)
    queries, unusable = prepare(requests, TextTokenizer(plan.model_dir), plan, spec,
                                most_input_tokens=plan.most_input_tokens or None)
    # lets a later start tell a finished run from a stopped one
    write_atomically(plan.output / "total.json", json.dumps({"queries": len(queries)}) + "\n")
    results = plan.output / "results.jsonl"
    count_results(results)
    return queries, errors + unusable, answered(results)


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
    write_measured(sink.output, state=state, wall_s=wall_s, finished=sink.finished_queries,
                   queries_before=queries_before, num_errors=num_errors, reports=reports,
                   num_held=sink.num_held,
                   changes=sink.steering.taken if sink.steering is not None else ())
