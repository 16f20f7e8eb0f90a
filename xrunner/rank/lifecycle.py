"""Start, end and clock of every rank; requests and figures of rank 0.

Rank 0 writes measured.json (figures) and steps.jsonl (steps of every stage). A stage of several
ranks counts as busy as its busiest one, and holds what its ranks hold together. Its steps are those
of its first rank, since all ranks of a group take the same ones."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from xgpt.core.errors import XgptError, run_error_words, visible
from xgpt.core.system.lifeline import end_if_unconnected, finish_imports, name_of_rank
from xgpt.core.system.whole_file import json_text, write_atomically
from xgpt.requests.spool import Spool
from xrunner.checkpoint.identity import changed_files, files_state, model_files
from xrunner.checkpoint.staging import release
from xrunner.engine.head import Head, run_to_end
from xrunner.engine.pipeline import DiedAlone, ExecutorDied, RankReport
from xrunner.files.heartbeat import of_replicas, read_heartbeats
from xrunner.files.order_file import saved_order
from xrunner.files.results import Answered, answered, count_results
from xrunner.files.sink import STARTING, RunSink, Tally, write_progress
from xrunner.files.spooled_requests import SpooledQueries
from xrunner.plan import PRIVATE_UMASK, RunPlan
from xrunner.query import PreparedQuery
from xrunner.rank.world import World


def run_rank(plan: RunPlan, join: Callable[[], World],
               work: Callable[[RunPlan, World], None]) -> int:
    """Runs one rank's `work` among the others; returns its exit code. `join`: connects to the other
    ranks."""
    world = None
    finish_imports()
    if plan.private:
        os.umask(PRIVATE_UMASK)  # ranks on other hosts do not inherit the launcher's umask
    try:
        world = join()
        work(plan, world)
        if plan.stage_model != "off":
            world.barrier()  # until rank 0 has written measured.json
            release(plan)
        world.close()
    except XgptError as error:
        return _end(error, world)
    except (ExecutorDied, DiedAlone) as death:  # counts as this rank's own death
        return _end(XgptError(str(death)), world, mark="")
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (words := run_error_words(error, plan.output)) is None:
            raise
        return _end(XgptError(words), world)
    return 0


def end_process(code: int) -> NoReturn:
    """Ends this process, if it succeeded once all others have come as far. Skips the interpreter's
    shutdown: all files are closed, and with torch it takes half a second."""
    if "mpi4py" in sys.modules and (code or "mpi4py.MPI" not in sys.modules):
        sys.exit(code)  # mpi4py tells the others of it
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py" in sys.modules:
        from mpi4py import MPI

        MPI.Finalize()
        # MPICH signs off at mpiexec when libraries are unloaded; without that the rank counts as
        # dead, and the others are killed. PyDLL keeps the interpreter lock, so no other thread runs
        # meanwhile.
        ctypes.PyDLL(None).exit(0)
    os._exit(code)


def _end(error: XgptError, world: World | None, mark: str = "xgpt: ") -> int:
    """Prints why this rank cannot go on, and ends all ranks. `mark`: begins what would end a
    further start, too (xgpt.launch.process.RanksFailed)."""
    where = f"{name_of_rank()}: " if world is None else f"rank {world.comm.rank}: "
    print(visible(f"{mark}{where}{error}"), file=sys.stderr, flush=True)
    if world is not None:
        world.abort(error.exit_code)
    end_if_unconnected()
    return error.exit_code


class Stopwatch:
    """Seconds since the run's common start, after every rank has loaded, from `begins_s` on."""

    def __init__(self, begins_s: float = 0.0) -> None:
        self._begins_s = begins_s
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter() - self._begins_s

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def open_requests(plan: RunPlan) -> tuple[Sequence[PreparedQuery], int, Answered]:
    """(all requests, read on access; number of error records; requests answered by an earlier
    run)."""
    write_progress(plan.output / "progress.json", replace(
        STARTING, state="loading", clock_s=plan.clock_s))
    spool, results = Spool(plan.output), plan.output / "results.jsonl"
    count_results(results)
    return SpooledQueries(spool, plan), spool.num_errors, answered(results)


def run_order(num_queries: int, plan: RunPlan, before: Answered) -> Iterator[int]:
    """Yields indices of the requests that are left, in the order that the run began with. Raises
    XgptError for a damaged order."""
    without = before.held | set(plan.aside)
    return (query for query in saved_order(plan.output, num_queries)
            if query >= before.written and query not in without)


def refuse_changed_model(plan: RunPlan) -> None:
    """Raises XgptError if the model's files have changed since the run was planned. Ranks may be
    started again long after. Called when all ranks have read the model."""
    if not plan.model_files or plan.output == plan.model_dir:  # the run itself writes there
        return
    with suppress(OSError):  # the folder is gone: the ranks have read it
        if files_state(plan.model_dir) != plan.model_state and (
                changed := changed_files(plan.model_files, model_files(plan.model_dir))):
            raise XgptError(
                f"{plan.model_dir}: {', '.join(changed)} changed since this run was planned, so "
                "further answers would be another model's. Put back the old files, and the "
                "same command goes on")


def run_head(head: Head, sink: RunSink, world: World, clock: Stopwatch, *,
            report: Callable[[], RankReport], queries_before: int, num_errors: int) -> None:
    """Runs rank 0's head from the ranks' common start, and writes the run's figures. `report`:
    makes this rank's report."""
    world.barrier()
    refuse_changed_model(sink.plan)
    clock.restart()
    sink.deadlines.began_s = time.time() - sink.plan.started_at
    is_complete = run_to_end(head)
    wall_s = clock() - sink.plan.clock_s
    # requests left to the end of the job are not done
    state = "done" if is_complete and not sink.leaves_some else "stopped"
    sink.close(clock(), state)
    world.comm.flush()
    own = report()
    world.barrier()
    reports = world.gather(own) or []
    write_measured(sink.output, RunOutcome(
        state=state, wall_s=wall_s, queries_before=queries_before, num_errors=num_errors,
        num_held=sink.num_held, facts={**sink.deadlines.facts, **(sink.sharing.facts(
            head.encoded_tokens + sum(one.encoded_tokens for one in reports))
            if is_complete else {})},
        changes=sink.launcher.changes if sink.launcher is not None else ()),
        sink.tally, reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. `num_held`: results in held.jsonl of a stopped run, behind a request that is
    not done. `changes`: changes of settings while it ran. `facts`: more keys."""

    state: str  # "done" | "stopped"
    wall_s: float
    queries_before: int
    num_errors: int
    num_held: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Mapping[str, Any]] = ()


def write_measured(output: Path, outcome: RunOutcome, tally: Tally,
                   reports: Sequence[RankReport]) -> None:
    """Writes measured.json and steps.jsonl. `tally`: of this run's requests."""
    wall_s, tokens = outcome.wall_s, tally.output_tokens
    stages = [list(group) for _, group in groupby(
        sorted(reports, key=lambda r: (r.stage, r.rank)), key=lambda r: r.stage)]
    busiest_s = max((report.busy_s for report in reports), default=0.0)
    figures = {
        "version": 1, "state": outcome.state, "queries": len(tally),
        "queries_before": outcome.queries_before, "queries_held": outcome.num_held,
        "errors": outcome.num_errors, "failed": tally.num_failed, "wall_s": wall_s,
        **outcome.facts,
        "throughput_qps": len(tally) / wall_s if wall_s > 0 else None,
        "output_tokens": tokens, "output_tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        **tally.percentiles(),
        "load_s": max((report.load_s for report in reports), default=0.0),
        "loaded_bytes": sum(report.bytes_read for report in reports),
        "operators": operators_of(reports),
        # share of the wall time that even the busiest stage waited (bubbles, host, messages)
        "overhead_share": 1 - busiest_s / wall_s if wall_s > 0 else None,
        "changes": list(outcome.changes),
        **({"replicas": rows} if (rows := _of_replicas(output, tally, reports))[1:] else {}),
        "stages": [_of_stage(group) for group in stages],
        "ranks": [{"rank": r.rank, **_place(r), **_figures([r]), **(
            {"offload": asdict(r.offload)} if r.offload else {})} for r in reports]}
    write_atomically(output / "measured.json", json_text(figures, indent=1) + "\n")
    lines = [json_text({"rank": group[0].rank, **_place(group[0]), **record._asdict()})
             for group in stages for record in group[0].log]
    write_atomically(output / "steps.jsonl", "\n".join(lines) + "\n" if lines else "")


def _of_replicas(output: Path, tally: Tally,
                 reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    """The figures of each replica. `wall_s`: to its last token."""
    return [{"replica": state.replica, "node": state.node, "devices": state.devices,
             "restarts": state.restarts,
             "load_s": max((one.load_s for one in reports if one.replica == state.replica),
                           default=0.0),
             "queries": queries, "output_tokens": tokens, "wall_s": last_s,
             "output_tokens_per_s": tokens / last_s if last_s else None}
            for state in of_replicas(read_heartbeats(output))
            for queries, tokens, last_s in [tally.replicas[state.replica]]]


def operators_of(reports: Sequence[RankReport]) -> str | None:
    """The operators that ranks used, in a line. If ranks differ, each kind is named with its first
    rank (an encode pool captures no steps)."""
    first: dict[str, int] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        if report.operators is not None:
            first.setdefault(report.operators, report.rank)
    if len(first) < 2:
        return next(iter(first), None)
    return "; ".join(f"rank {rank}: {said}" for said, rank in first.items())


def _of_stage(ranks: Sequence[RankReport]) -> dict[str, Any]:
    """A stage's figures, from the reports of its ranks."""
    first = ranks[0]
    for other in ranks[1:]:
        orders = [_order(first), _order(other)]
        kept = min(map(len, orders))  # long logs keep only their last steps
        assert orders[0][-kept:] == orders[1][-kept:], (
            f"ranks {first.rank} and {other.rank} of stage {first.stage} took different steps")
    return {**_place(first), "ranks": [r.rank for r in ranks], **_figures(ranks)}


def _place(report: RankReport) -> dict[str, Any]:
    return {"stage": report.stage, "replica": report.replica, "pool": report.pool,
            "role": report.role}


def _figures(ranks: Sequence[RankReport]) -> dict[str, Any]:
    """Figures of one rank, or of a stage's ranks together. Only the sender knows handover_s."""
    first = ranks[0]
    figures = {"busy_s": max(r.busy_s for r in ranks),
               "load_s": max(r.load_s for r in ranks),
               "bytes_read": sum(r.bytes_read for r in ranks),
               "rows_compacted": first.rows_compacted,
               "peak_memory_bytes": max(r.peak_memory_bytes for r in ranks),
               "kv_bytes": max(r.kv_bytes for r in ranks),
               "kv_peak_bytes": max(r.kv_peak_bytes for r in ranks)}
    if first.role != "both":
        figures["handover_bytes"] = sum(r.handover_bytes for r in ranks)
    if first.role == "encode":
        figures["handover_s"] = max(r.handover_s for r in ranks)
    return figures


def _order(report: RankReport) -> list[tuple[object, ...]]:
    """Steps of the rank in their order, without encoder output, which is taken as it arrives."""
    return [record[:6] for record in report.log if record.kind != "cross_kv"]
