"""One rank: `mpiexec -n N python -m mpi4py -m xrunner.worker OUT/run.json`.

All ranks run this; what differs is the stage they belong to, and their place in it. `-m mpi4py`
makes an uncaught error on one rank end them all.
"""

from __future__ import annotations

import errno
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule, StageAssignment
from xgpt.core.schedule_file import load_schedule
from xgpt.core.workload import RequestError, read_requests
from xrunner.checkpoint.disk import DiskMeter, disk_bytes_per_s
from xrunner.checkpoint.reader import CheckpointReader, open_weights
from xrunner.checkpoint.source import read_spec
from xrunner.devices import peak_memory_bytes
from xrunner.engine.baseline_heads import head_for
from xrunner.engine.head import Head
from xrunner.engine.measured import write_measured
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.engine.stage import StageExecutor
from xrunner.engine.waa_heads import DecodeHead, EncodeHead
from xrunner.io.adjustments import Steering
from xrunner.io.prepare import prepare
from xrunner.io.progress import Progress, ProgressFile, write_progress
from xrunner.io.results import Answered, ResultWriter, answered, count_results, write_errors
from xrunner.io.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.shard import WHOLE, Shard
from xrunner.plan import RunPlan, load_plan, write_atomically
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.order import run_order
from xrunner.rules.registry import rules_for
from xrunner.rules.rra import RraRule, rra_rule
from xrunner.rules.waa import waa_rules
from xrunner.transport.comm import Comm
from xrunner.transport.courier import EntryReceiver, EntrySender
from xrunner.transport.handover import parts
from xrunner.transport.route import Route, pools, routes
from xrunner.world import World, connect

STOP_FILE = "stop"  # its presence in the output folder asks the run to end early
_LOOK_S = 0.1  # between looks for it: a folder that other machines share answers slowly
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Loaded(NamedTuple):
    """This rank's part of the model, and what loading it took."""

    executor: StageExecutor
    route: Route
    stage: StageAssignment
    seconds: float
    bytes_read: int
    disk_bytes: int | None  # of them, and of what was read ahead: from storage
    disk_bytes_per_s: float | None  # rank 0 of a checkpoint's: one reader's of the disk


class RunSink:
    """Results, progress and the wish to stop, as files of the output folder."""

    def __init__(self, plan: RunPlan, *, num_queries: int, before: Answered) -> None:
        """Of a run that goes on after those answered `before`."""
        self.output, self._stop_path = plan.output, plan.output / STOP_FILE
        self._writer = ResultWriter(plan.output / "results.jsonl", first_index=before.written,
                                    model=plan.model_name)
        self._progress = ProgressFile(plan.output / "progress.json", total=num_queries,
                                      done_before=before.total)
        self._looked_s, self._is_to_stop = -math.inf, False
        self.steering: Steering | None = None  # where the launcher follows the output lengths
        self.finished_queries: list[tuple[int, float]] = []  # (output tokens, latency_s)

    def finished(self, result: FinishedQuery) -> None:
        self._writer.write(result)
        self.finished_queries.append((len(result.output_ids), result.latency_s))
        self._progress.add(result.latency_s)
        if self.steering is not None:
            self.steering.finished(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        self._progress.tick(elapsed_s, output_tokens)
        if self.steering is not None:
            self.steering.look(elapsed_s)

    def should_stop(self) -> bool:
        now = time.monotonic()
        if not self._is_to_stop and now - self._looked_s >= _LOOK_S:
            self._looked_s, self._is_to_stop = now, self._stop_path.exists()
        return self._is_to_stop

    @property
    def num_held(self) -> int:
        """Results that wait for one before them."""
        return self._writer.num_held

    def close(self, wall_s: float, state: str) -> None:
        """`state`: "done" or "stopped"."""
        self._writer.close()
        self._progress.tick(wall_s, sum(tokens for tokens, _ in self.finished_queries), state)


def main(arguments: list[str]) -> int:
    plan = load_plan(Path(arguments[0]))
    return to_the_end(plan, lambda: connect(plan.device_kind), _run)


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


def _run(plan: RunPlan, world: World) -> None:
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world.comm)
    if world.comm.rank == 0:
        _lead(plan, schedule, world)
    elif world.comm.rank == _decode_head(schedule):
        _lead_decoding(plan, schedule, world)
    else:
        _follow(plan, schedule, world)


def _follow(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Every rank that is no pool's head: load, then serve its stage until told to stop."""
    clock = Stopwatch()
    loaded = _load(plan, schedule, world, clock)
    neighbours = Neighbours(world.comm, loaded.route)
    await_start(neighbours, loaded.executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, loaded.executor)
    loaded.executor.close()
    world.gather(_report(loaded))


def _lead_decoding(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """The first rank of WAA's decode pool; what is done goes to rank 0."""
    clock = Stopwatch()
    loaded = _load(plan, schedule, world, clock)
    receiver = loaded.executor.receiver
    assert receiver is not None
    _, rule = waa_rules(schedule.estimate)
    head = DecodeHead(rule=rule, receiver=receiver, encode_head=0, clock=clock,
                      **_of_head(plan, world, loaded))
    head.start()
    world.barrier()
    clock.restart()
    head.run()
    world.comm.flush()
    loaded.executor.close()
    world.gather(_report(loaded))


def _lead(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Rank 0: reads the requests, runs the (encode pool's) head, writes everything."""
    queries, errors, before = read_work(plan, schedule)
    write_errors(plan.output / "errors.jsonl", errors)
    clock = Stopwatch()
    loaded = _load(plan, schedule, world, clock)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    rule = rra_rule(schedule.estimate, slots=plan.slots) if (
        policy(schedule.estimate.policy).is_changeable) else None
    head = _first_head(schedule, rule, sink=sink, clock=clock, **_of_head(plan, world, loaded))
    order = order_of(len(queries), plan, before)
    if plan.is_watched:
        sink.steering = Steering(plan.output, rule=rule, first_query=before.total,
                                 at_work=None if rule is None else head.lengths_so_far,
                                 order=order if plan.shuffle_window > 1 or before.held else None)
    for place in order:
        query = queries[place]
        assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
    estimate = schedule.estimate
    head.start(spare_bytes=max(estimate.figures.memory_capacity_bytes - max(estimate.figures.memory_bytes), 0))

    def report() -> RankReport:
        loaded.executor.close()
        return _report(loaded)

    conduct(head, sink, world, clock, report=report, queries_before=before.total,
            num_errors=len(errors))


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


def _first_head(schedule: Schedule, rule: RraRule | None, **own: Any) -> Head:
    """Rank 0's. `rule`: RRA's."""
    decode_head = _decode_head(schedule)
    if decode_head is None:
        return head_for(rule or rules_for(schedule.estimate)[0], **own)
    encode_rule, decode_rule = waa_rules(schedule.estimate)
    return EncodeHead(rule=encode_rule, decode_rule=decode_rule, decode_head=decode_head, **own)


def _of_head(plan: RunPlan, world: World, loaded: Loaded) -> dict[str, Any]:
    """What any head is made of."""
    is_encoder_decoder = loaded.executor.model.spec.is_encoder_decoder
    return {"executor": loaded.executor, "comm": world.comm, "route": loaded.route,
            "eos_ids": eos_ids(plan.model_dir),
            "start_token": start_token(plan.model_dir) if is_encoder_decoder else None,
            "decode_text": TextTokenizer(plan.model_dir).decode}


def _decode_head(schedule: Schedule) -> int | None:
    """First rank of WAA's decode pool."""
    both = pools(schedule.estimate.deployment.stages)
    return None if len(both) == 1 else both[1][0].ranks[0]


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


def _load(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch) -> Loaded:
    stages, rank = schedule.estimate.deployment.stages, world.comm.rank
    stage = next(stage for stage in stages if rank in stage.ranks)
    shard = WHOLE
    if any(stage.tp_degree > 1 for stage in stages):
        index = stage.ranks.index(rank)
        group = world.split(stage.index, index)
        if stage.tp_degree > 1:
            shard = Shard(index, stage.tp_degree, group.all_reduce, group.gather)
    start, meter = time.perf_counter(), DiskMeter()
    spec = read_spec(plan.model_dir, plan.model_name)
    dtype = getattr(torch, plan.dtype)
    reader = open_weights(plan.model_dir, dtype)
    model = load_stage(spec, reader, stage, dtype, shard, world.device)
    reader.close()
    seconds, from_disk = time.perf_counter() - start, meter.num_bytes
    is_sampled = rank == 0 and isinstance(reader, CheckpointReader)
    disk_rate = disk_bytes_per_s(plan.model_dir) if is_sampled else None
    sender, receiver = _couriers(schedule, spec, stage, world)
    return Loaded(
        StageExecutor(model, clock=clock, sender=sender, receiver=receiver), routes(stages)[rank],
        stage, seconds, reader.bytes_read, from_disk, disk_rate)


def _couriers(schedule: Schedule, spec: ModelSpec, stage: StageAssignment,
              world: World) -> tuple[EntrySender | None, EntryReceiver | None]:
    """This rank's end of the handover, under WAA."""
    both = pools(schedule.estimate.deployment.stages)
    if len(both) == 1:
        return None, None
    comm, found = world.duplicate(), parts(schedule.estimate.deployment.stages, spec)
    abort = partial(world.abort, 1)
    if stage.role == "encode":
        return EntrySender(comm, found, abort=abort), None
    ranks = [rank for other in both[1] for rank in other.ranks]
    return None, EntryReceiver(comm, found, ranks, abort=abort)


def _check_fits(schedule: Schedule, comm: Comm) -> None:
    estimate = schedule.estimate
    roles = [pool[0].role for pool in pools(estimate.deployment.stages)]
    expected = list(policy(estimate.policy).pools)
    if roles != expected:
        raise XgptError(f"the schedule's stages have the roles {roles}; {estimate.policy} has "
                        f"{expected}")
    ranks = sorted(rank for stage in estimate.deployment.stages for rank in stage.ranks)
    if ranks != list(range(comm.size)):
        raise XgptError(f"the schedule's stages have the ranks {ranks}, the launcher started "
                        f"{comm.size}")
    if estimate.deployment.stages[0].ranks[0] != 0:
        raise XgptError(f"the schedule's first stage has the ranks {estimate.deployment.stages[0].ranks}: "
                        "rank 0 must be its first, since it decides")


def _report(loaded: Loaded) -> RankReport:
    executor = loaded.executor
    peak = peak_memory_bytes(executor.model.device)
    handed_bytes, handover_s = 0, 0.0
    if executor.sender is not None:
        handed_bytes, handover_s = executor.sender.num_bytes, executor.sender.seconds
    elif executor.receiver is not None:
        handed_bytes = executor.receiver.num_bytes
    return RankReport(rank=loaded.route.rank, stage=loaded.stage.index, role=loaded.stage.role,
                      log=tuple(executor.log),
                      busy_s=executor.busy_s, load_s=loaded.seconds, bytes_read=loaded.bytes_read,
                      rows_compacted=executor.rows_compacted, peak_memory_bytes=peak,
                      handover_bytes=handed_bytes, handover_s=handover_s,
                      disk_bytes=loaded.disk_bytes, disk_bytes_per_s=loaded.disk_bytes_per_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
