"""One rank: `mpiexec -n N python -m mpi4py -m xrunner.worker OUT/run.json`.

All ranks run this; what differs is the stage they belong to, and their place in it. `-m mpi4py`
makes an uncaught error on one rank end them all.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from xgpt.errors import XgptError
from xgpt.schedule import Schedule, load_schedule
from xgpt.workload import RequestError, read_requests
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.source import read_spec
from xrunner.collective import Group, MpiGroup
from xrunner.comm import Comm, MpiComm, local_comms, wait_politely
from xrunner.head import Head
from xrunner.io.prepare import prepare
from xrunner.io.progress import Progress, ProgressFile, write_progress
from xrunner.io.results import ResultWriter, count_results, write_errors
from xrunner.io.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.measured import write_measured
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.shard import WHOLE, Shard
from xrunner.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.plan import RunPlan, load_plan, write_atomically
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.route import Route, routes
from xrunner.rules.rra import rra_rule
from xrunner.stage import StageExecutor

STOP_FILE = "stop"  # its presence in the output folder asks the run to end early


class World(NamedTuple):
    """The ranks of this run, and what they do together."""

    comm: Comm
    barrier: Callable[[], None]
    gather: Callable[[RankReport], list[RankReport] | None]  # to rank 0
    abort: Callable[[int], None]
    split: Callable[[int, int], Group]  # (group, place in it): the ranks of one group; collective


class Loaded(NamedTuple):
    """This rank's part of the model, and what loading it took."""

    executor: StageExecutor
    route: Route
    seconds: float
    bytes_read: int


class RunSink:
    """Results, progress and the wish to stop, as files of the output folder."""

    def __init__(self, output: Path, writer: ResultWriter, progress: ProgressFile) -> None:
        self._stop_path, self._writer, self._progress = output / STOP_FILE, writer, progress
        self.finished_queries: list[tuple[int, float]] = []  # (output tokens, latency_s)

    def finished(self, result: FinishedQuery) -> None:
        self._writer.write(result)
        self.finished_queries.append((len(result.output_ids), result.latency_s))
        self._progress.add(result.latency_s)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        self._progress.tick(elapsed_s, output_tokens)

    def should_stop(self) -> bool:
        return self._stop_path.exists()


def main(arguments: list[str]) -> int:
    plan = load_plan(Path(arguments[0]))
    world = _connect()
    try:
        _run(plan, world)
    except XgptError as error:
        print(f"xgpt: rank {world.comm.rank}: {error}", file=sys.stderr, flush=True)
        world.abort(error.exit_code)
        return error.exit_code
    return 0


class Stopwatch:
    """Seconds since the run's common start, which comes after every rank has loaded."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def restart(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def _run(plan: RunPlan, world: World) -> None:
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world.comm)
    if world.comm.rank == 0:
        _lead(plan, schedule, world)
    else:
        _follow(plan, schedule, world)


def _follow(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Every rank but the first: load, then serve its stage until told to stop."""
    clock = Stopwatch()
    loaded = _load(plan, schedule, world, clock)
    neighbours = Neighbours(world.comm, loaded.route)
    await_start(neighbours, loaded.executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, loaded.executor)
    world.gather(_report(loaded))


def _lead(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Rank 0: reads the requests, runs the head, writes everything."""
    queries, errors, done_before = _read_work(plan)
    write_errors(plan.output / "errors.jsonl", errors)
    clock = Stopwatch()
    loaded = _load(plan, schedule, world, clock)
    writer = ResultWriter(plan.output / "results.jsonl", first_index=done_before,
                          model=plan.model_name)
    progress = ProgressFile(plan.output / "progress.json", total=len(queries),
                            done_before=done_before)
    sink = RunSink(plan.output, writer, progress)
    is_encoder_decoder = loaded.executor.model.spec.is_encoder_decoder
    head = Head(rule=rra_rule(schedule.estimate), executor=loaded.executor, comm=world.comm,
                route=loaded.route, sink=sink, eos_ids=eos_ids(plan.model_dir),
                start_token=start_token(plan.model_dir) if is_encoder_decoder else None,
                decode_text=TextTokenizer(plan.model_dir).decode, clock=clock)
    for query in queries[done_before:]:
        assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
    estimate = schedule.estimate
    head.start(spare_bytes=max(estimate.memory_capacity_bytes - max(estimate.memory_bytes), 0))
    world.barrier()
    clock.restart()
    is_complete = head.run()
    wall_s = clock()
    writer.close()
    state = "done" if is_complete else "stopped"
    progress.tick(wall_s, sum(tokens for tokens, _ in sink.finished_queries), state)
    world.comm.flush()
    reports = world.gather(_report(loaded)) or []
    write_measured(plan.output, state=state, wall_s=wall_s, finished=sink.finished_queries,
                   queries_before=done_before, num_errors=len(errors), reports=reports)


def _read_work(plan: RunPlan) -> tuple[list[PreparedQuery], list[RequestError], int]:
    """(all queries, error records, queries already answered by an earlier run)."""
    write_progress(plan.output / "progress.json", Progress(
        state="loading", total=0, done=0, output_tokens=0, elapsed_s=0.0, latency_p50_s=None,
        latency_p99_s=None))
    requests, errors = read_requests(plan.requests)
    spec = read_spec(plan.model_dir, plan.model_name)
    queries, unusable = prepare(requests, TextTokenizer(plan.model_dir), plan, spec)
    # lets a later start tell a finished run from a stopped one
    write_atomically(plan.output / "total.json", json.dumps({"queries": len(queries)}) + "\n")
    return queries, errors + unusable, count_results(plan.output / "results.jsonl")


def _load(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch) -> Loaded:
    stages, rank = schedule.estimate.stages, world.comm.rank
    stage = next(stage for stage in stages if rank in stage.ranks)
    shard = WHOLE
    if any(stage.tp_degree > 1 for stage in stages):
        index = stage.ranks.index(rank)
        group = world.split(stage.index, index)
        if stage.tp_degree > 1:
            shard = Shard(index, stage.tp_degree, group.all_reduce, group.gather)
    start = time.perf_counter()
    spec = read_spec(plan.model_dir, plan.model_name)
    dtype = getattr(torch, plan.dtype)
    reader = CheckpointReader(plan.model_dir, dtype)
    model = load_stage(spec, reader, stage, dtype, shard)
    reader.close()
    return Loaded(StageExecutor(model, clock=clock), routes(stages)[rank],
                  time.perf_counter() - start, reader.bytes_read)


def _check_fits(schedule: Schedule, comm: Comm) -> None:
    estimate = schedule.estimate
    if estimate.policy != "rra":
        raise XgptError(f"policy {estimate.policy!r} cannot be executed yet; can be: rra")
    ranks = sorted(rank for stage in estimate.stages for rank in stage.ranks)
    if ranks != list(range(comm.size)):
        raise XgptError(f"the schedule's stages have the ranks {ranks}, the launcher started "
                        f"{comm.size}")
    if estimate.stages[0].ranks[0] != 0:
        raise XgptError(f"the schedule's first stage has the ranks {estimate.stages[0].ranks}: "
                        "rank 0 must be its first, since it decides")


def _report(loaded: Loaded) -> RankReport:
    executor = loaded.executor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankReport(rank=loaded.route.rank, stage=loaded.route.stage, log=tuple(executor.log),
                      busy_s=executor.busy_s, load_s=loaded.seconds, bytes_read=loaded.bytes_read,
                      rows_compacted=executor.rows_compacted, peak_memory_bytes=peak)


def _connect() -> World:
    """All ranks of the launcher; a single rank started without one needs no MPI."""
    if "mpi4py" not in sys.modules:
        return World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                     abort=lambda code: None, split=_no_group)
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def barrier() -> None:
        # rank 0 may tokenise for minutes: the others must not spin in a blocking call meanwhile
        request = world.Ibarrier()
        wait_politely(lambda: bool(request.Test()))

    return World(MpiComm(world), barrier=barrier, abort=world.Abort,
                 gather=lambda report: world.gather(report, root=0),
                 split=lambda group, place: MpiGroup(world.Split(group, place)))


def _no_group(group: int, place: int) -> Group:
    raise AssertionError(f"{group = } {place = }: a rank alone is in no group")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
