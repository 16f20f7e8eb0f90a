"""Loads one rank's part of the model, ready to execute steps."""

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.schedule import Schedule
from xgpt.core.units import INT8
from xrunner.checkpoint.reader import open_weights
from xrunner.checkpoint.source import read_spec
from xrunner.checkpoint.staging import staged
from xrunner.comm.handover import EntryReceiver, EntrySender, transfers
from xrunner.devices import device_words, peak_memory_bytes
from xrunner.engine.graphs import CudaCapture
from xrunner.engine.group import Model
from xrunner.engine.pipeline import Executor, RankReport, Route, routes
from xrunner.engine.stage import StageExecutor
from xrunner.files.forms import Forms
from xrunner.files.heartbeat import Heartbeat
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.weights import WHOLE, Shard
from xrunner.offload.placed_stage import PlacedStage, open_tiers
from xrunner.ops import invariant
from xrunner.ops.cpu import native
from xrunner.ops.cpu.products import is_int8_served
from xrunner.ops.cuda import cuda_modules
from xrunner.plan import RunPlan, weights_key
from xrunner.query import FinishedQuery
from xrunner.rank.lifecycle import Stopwatch
from xrunner.rank.threads import threads_of
from xrunner.rank.world import Replica, World, replicas_of


class Weights(NamedTuple):
    """This rank's part of the model, with the seconds and bytes that loading took."""

    model: Model
    seconds: float
    bytes_read: int


class KeptWeights:
    """Keeps this rank's weights for the next run, which may use the same."""

    def __init__(self) -> None:
        self._content: tuple[object, Weights] | None = None

    def weights(self, key: object, load: Callable[[], Weights]) -> Weights:
        """The kept weights if they have this key, at no cost; else those of `load`, kept from now
        on. Collective: the key must be new on every rank or on none."""
        if self._content is not None and self._content[0] == key:
            return Weights(self._content[1].model, 0.0, 0)
        before, self._content = self._content, None  # first: both might not fit
        if before is not None and isinstance(before[1].model, PlacedStage):
            before[1].model.lender.close()
            del before
            gc.collect()  # a stage on tiers and its parts refer to each other
        self._content = key, load()
        return self._content[1]


class Loaded(NamedTuple):
    """This rank's part of the model in its place, ready to execute steps. `report`: makes the
    figures of its run. `replicas`: all of the run. `parsed`: turns a result into the form to
    write."""

    executor: Executor
    route: Route
    replica: Replica
    pool: Pool
    spec: ModelSpec
    report: Callable[[], RankReport]
    replicas: tuple[Replica, ...]
    receiver: EntryReceiver | None = None
    may_die: bool = False
    parsed: Callable[[FinishedQuery], FinishedQuery] = lambda result: result


def load(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch,
         kept_weights: KeptWeights) -> Loaded:
    """Loads this rank's part of the model, or takes it from the `kept_weights`. Raises XgptError
    if the launcher has started other ranks than the schedule needs."""
    rank, replicas = world.comm.rank, replicas_of(schedule.estimate)
    ranks = sorted(rank for replica in replicas for rank in replica.ranks)
    if ranks != list(range(world.comm.size)):
        raise XgptError(f"the schedule's stages need the ranks {ranks}, but the launcher started "
                        f"{world.comm.size}")
    replica = next(replica for replica in replicas if rank in replica.ranks)
    pool, stage = next((pool, stage) for pool in replica.pools for stage in pool.stages
                       if rank in stage.ranks)
    invariant.set_deterministic(plan.deterministic)
    heartbeat = Heartbeat(plan.output, rank=rank, stage=replica.first_stage + stage.index,
                          pool=pool.name, replica=replica.number,
                          devices=device_words(world.device))
    heartbeat.start()
    weights = kept_weights.weights(weights_key(plan, schedule), lambda: _read(
        staged(plan), schedule, replica, pool, stage, world))
    sender, receiver = _couriers(replica, pool, weights.model.spec, world)
    # an encode pool does not decode; copies between tiers cannot be captured
    is_captured = plan.cuda_graphs and world.device.type == "cuda" and pool.role != "encode" and (
        pool.placement is None)
    capture = CudaCapture(world.device) if is_captured and world.has_own_gpus else None
    forms = Forms(plan.model_dir, weights.model.spec.vocab_size)
    if plan.has_forms and weights.model.is_last and forms.refusal:
        raise XgptError(forms.refusal)  # which has read the tokenizer, before the clock starts
    executor = StageExecutor(weights.model, clock=clock, sender=sender, receiver=receiver,
                             heartbeat=heartbeat, capture=capture,
                             forms=forms)
    if is_captured and capture is None:
        executor.graphs_said = "no CUDA graphs: ranks share a GPU, whose memory is planned"
    executor.records.threads = threads_of(world.device.type, plan.dtype, plan.threads_per_rank,
                                          is_deterministic=plan.deterministic)
    return Loaded(executor, routes(replica.pools)[rank], replica, pool, weights.model.spec,
                  lambda: _report(executor, weights, replica, pool, stage, rank),
                  replicas, receiver)


def _read(plan: RunPlan, schedule: Schedule, replica: Replica, pool: Pool, stage: StageAssignment,
          world: World) -> Weights:
    rank, shard = world.comm.rank, WHOLE
    # all ranks split together, also those of replicas without such a group
    if any(other.tp_degree > 1 for shape in schedule.estimate.shapes
           for own in shape.deployment.pools for other in own.stages):
        index = stage.ranks.index(rank)
        group = world.split(replica.first_stage + stage.index, index)
        if stage.tp_degree > 1:
            shard = Shard(index, stage.tp_degree, group.all_reduce, group.gather)
    if plan.weight_dtype == INT8 and not is_int8_served():
        raise XgptError(f"run.weight_dtype: {INT8} needs a processor with VNNI, which this host "
                        "does not have: products of bytes would not be exact")
    start = time.perf_counter()
    spec = read_spec(plan.model_dir, plan.model_name)
    reader = open_weights(plan.model_dir, getattr(torch, plan.dtype))
    model: Model
    if pool.placement is not None:
        model = PlacedStage(
            spec, reader, stage, reader.dtype, open_tiers(
                pool.placement, stage.index, world.device, Path(plan.offload)),
            weights_key(plan, schedule)["model"], getattr(torch, plan.weight_dtype))
    else:
        model = load_stage(spec, reader, stage, shard, world.device,
                           getattr(torch, plan.weight_dtype), pool.role)
    reader.close()
    return Weights(model, time.perf_counter() - start, reader.bytes_read)


def _couriers(replica: Replica, pool: Pool, spec: ModelSpec,
              world: World) -> tuple[EntrySender | None, EntryReceiver | None]:
    """This rank's end of the handover between an encode and a decode pool."""
    if len(replica.pools) == 1:
        return None, None
    encode, decode = replica.own.encoding, replica.own.decoding
    comm, abort = world.duplicate(), partial(world.abort, 1)
    needed = transfers(encode.stages, decode.stages, spec)
    if pool.role == "encode":
        return EntrySender(comm, needed, abort=abort), None
    ranks = [rank for stage in decode.stages for rank in stage.ranks]
    return None, EntryReceiver(comm, needed, ranks, abort=abort)


def _report(executor: StageExecutor, weights: Weights, replica: Replica, pool: Pool,
            stage: StageAssignment, rank: int) -> RankReport:
    """Figures of this rank's run."""
    peak = peak_memory_bytes(executor.model.device)
    kv_bytes, kv_peak_bytes = executor.kv_bytes
    handed_bytes, handover_s = 0, 0.0
    if executor.sender is not None:
        handed_bytes, handover_s = executor.sender.num_bytes, executor.sender.seconds
    elif executor.receiver is not None:
        handed_bytes = executor.receiver.num_bytes
    return RankReport(rank=rank, replica=replica.number,
                      stage=replica.first_stage + stage.index, pool=pool.name,
                      role=pool.role, log=tuple(executor.log),
                      busy_s=executor.records.busy_s, load_s=weights.seconds,
                      bytes_read=weights.bytes_read,
                      rows_compacted=executor.rows_compacted, peak_memory_bytes=peak,
                      kv_bytes=kv_bytes, kv_peak_bytes=kv_peak_bytes,
                      handover_bytes=handed_bytes, handover_s=handover_s,
                      operators=operators_in_words(executor.model.device, executor.graphs_said),
                      offload=weights.model.report(executor.records.busy_s)
                      if isinstance(weights.model, PlacedStage) else None)


def operators_in_words(device: torch.device, graphs: str | None = None) -> str:
    """Which operators the device uses, and why not native ones, in a line. `graphs`: a line on
    captured steps."""
    said = native.describe() if device.type == "cpu" else cuda_modules.describe(device)
    return said if graphs is None else f"{said}; {graphs}"
