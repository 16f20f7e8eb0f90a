"""One rank's part of the model, loaded and ready to execute steps."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import torch

from xgpt.core.model import ModelSpec
from xgpt.core.schedule import Deployment, Pool, Schedule, StageAssignment
from xrunner.checkpoint.disk import DiskMeter, disk_bytes_per_s
from xrunner.checkpoint.reader import CheckpointReader, open_weights
from xrunner.checkpoint.source import read_spec
from xrunner.devices import peak_memory_bytes
from xrunner.engine.pipeline import RankReport
from xrunner.engine.stage import StageExecutor
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.shard import WHOLE, Shard
from xrunner.plan import RunPlan
from xrunner.rank import Stopwatch
from xrunner.transport.courier import EntryReceiver, EntrySender
from xrunner.transport.handover import transfers
from xrunner.transport.route import Route, routes
from xrunner.world import World


class Loaded(NamedTuple):
    """This rank's part of the model, and what loading it took."""

    executor: StageExecutor
    route: Route
    pool: Pool
    stage: StageAssignment
    seconds: float
    bytes_read: int
    disk_bytes: int | None  # of them, and of what was read ahead: from storage
    disk_bytes_per_s: float | None  # rank 0 of a checkpoint's: one reader's of the disk


def load(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch) -> Loaded:
    deployment, rank = schedule.deployment, world.comm.rank
    pool, stage = next((pool, stage) for pool in deployment.pools for stage in pool.stages
                       if rank in stage.ranks)
    shard = WHOLE
    if any(other.tp_degree > 1 for other in deployment.stages):
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
    sender, receiver = _couriers(deployment, pool, spec, world)
    return Loaded(
        StageExecutor(model, clock=clock, sender=sender, receiver=receiver),
        routes(deployment.pools)[rank], pool, stage, seconds, reader.bytes_read, from_disk,
        disk_rate)


def _couriers(deployment: Deployment, pool: Pool, spec: ModelSpec,
              world: World) -> tuple[EntrySender | None, EntryReceiver | None]:
    """This rank's end of the handover between an encode and a decode pool."""
    if len(deployment.pools) == 1:
        return None, None
    encode, decode = deployment.encoding, deployment.decoding
    comm, abort = world.duplicate(), partial(world.abort, 1)
    needed = transfers(encode.stages, decode.stages, spec)
    if pool.role == "encode":
        return EntrySender(comm, needed, abort=abort), None
    ranks = [rank for stage in decode.stages for rank in stage.ranks]
    return None, EntryReceiver(comm, needed, ranks, abort=abort)


def report_of(loaded: Loaded) -> RankReport:
    executor = loaded.executor
    peak = peak_memory_bytes(executor.model.device)
    handed_bytes, handover_s = 0, 0.0
    if executor.sender is not None:
        handed_bytes, handover_s = executor.sender.num_bytes, executor.sender.seconds
    elif executor.receiver is not None:
        handed_bytes = executor.receiver.num_bytes
    return RankReport(
        rank=loaded.route.rank, stage=loaded.stage.index, pool=loaded.pool.name,
        role=loaded.pool.role, log=tuple(executor.log), busy_s=executor.busy_s,
        load_s=loaded.seconds, bytes_read=loaded.bytes_read,
        rows_compacted=executor.rows_compacted, peak_memory_bytes=peak,
        handover_bytes=handed_bytes, handover_s=handover_s, disk_bytes=loaded.disk_bytes,
        disk_bytes_per_s=loaded.disk_bytes_per_s)
