"""Measures messages between ranks, with the very calls that a run makes.

Pairs and groups lie within a node (the `near` link) or across nodes (`far`); all of one kind
measure at the same time, as in a run. A rank that is in none of them waits. Between GPUs a message
goes through both hosts' memory (MPI), and directly (NCCL) where every rank has a GPU of its own.

An all-reduce timed alone finds all ranks ready. In a step each rank has just executed half a layer,
which takes one a little longer than the other: an early rank waits, sleeps and is woken. So all
ranks of the group execute steps of a shard's layers, in turns with and without sums. The difference
is divided by the number of sums (docs/times.md)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xprofiler.measure.bench import (
    LEAST_LAYERS,
    LayerBench,
    contexts_of_mean,
    few_layers,
    layers_for,
    ordinary_inputs,
)
from xprofiler.measure.probe import StepParts, clock_of
from xprofiler.points import DECODE_ROWS_UP_TO, STEP_CONTEXT
from xprofiler.profile import ALL_REDUCE, HANDOVER, HANDOVER_DIRECT, TRANSFER, Sample, TableKey
from xrunner.comm.collective import MpiGroup, TorchGroup
from xrunner.comm.exchange import all_gather, broadcast
from xrunner.comm.handover import pack
from xrunner.comm.messages import TokensMessage
from xrunner.comm.point_to_point import MpiComm, wait_politely
from xrunner.devices import has_own_gpu_each
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.models.weights import Shard
from xrunner.ops.kv_entries import scatter

TRANSFER_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
ALL_REDUCE_ROWS = (1, 6, 36, 216, 1300)  # tokens whose hidden states are summed
HANDOVER_TOKENS = (20, 150, 600)
_ROUNDS, _WARM_UP = 21, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNodes:
    """Nodes of the ranks. `node_of` [ranks]: index of each rank's node."""

    node_of: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether the ranks lie on more than one node."""
        return len(set(self.node_of)) > 1

    def near_groups(self, size: int) -> list[tuple[int, ...]]:
        """Disjoint groups of `size` consecutive ranks, each within a node."""
        return [ranks[i:i + size] for _, ranks in sorted(self._ranks_of().items())
                for i in range(0, len(ranks) - size + 1, size)]

    def far_groups(self, size: int) -> list[tuple[int, ...]]:
        """One group of `size` ranks spread evenly over as many nodes as divide it; none where no
        number of nodes does."""
        nodes = list(self._ranks_of().values())
        for count in range(min(size, len(nodes)), 1, -1):
            each = size // count
            if size % count == 0 and all(len(ranks) >= each for ranks in nodes[:count]):
                return [tuple(rank for ranks in nodes[:count] for rank in ranks[:each])]
        return []

    def _ranks_of(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each node, nodes in the order of their first ranks."""
        return {node: tuple(r for r, n in enumerate(self.node_of) if n == node)
                for node in dict.fromkeys(self.node_of)}


def find_nodes(world: Any) -> RankNodes:
    """The nodes of the ranks of `world`: ranks that could share memory, by MPI, share a node."""
    from mpi4py import MPI

    shared = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = broadcast(shared, world.Get_rank(), int)
    shared.Free()
    leaders = all_gather(world, leader, int)
    order = sorted(set(leaders))
    return RankNodes(node_of=tuple(order.index(name) for name in leaders))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, dtype and device whose messages are measured: hidden states, keys and values."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    weight_dtype: torch.dtype  # that weights are multiplied in

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.spec.hidden_size * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.spec.kv_elements_per_token_layer * self.dtype.itemsize * self.spec.num_layers


def measure_network(world: Any, subject: Subject, *, degrees: tuple[int, ...], near: str,
                    far: str) -> dict[TableKey, tuple[Sample, ...]]:
    """Tables of samples (x: bytes) of every message that these ranks can measure. `near`, `far`:
    names of the links within a node and between nodes."""
    where, can_go_direct = find_nodes(world), has_own_gpu_each(world, subject.device)
    ways: dict[str, type[_Channel]] = {
        HANDOVER: _ThroughHosts, **({HANDOVER_DIRECT: _Directly} if can_go_direct else {})}
    tables: dict[TableKey, tuple[Sample, ...]] = {}
    for link, groups in _scopes(where, 2, near, far):
        tables[TableKey(TRANSFER, 1, link)] = tuple(
            _on_groups(world, groups, n, partial(_transfer, num_bytes=n, device=subject.device))
            for n in TRANSFER_BYTES)
        for name, way in ways.items():
            tables[TableKey(name, 1, link)] = tuple(
                _on_groups(world, groups, n * subject.kv_bytes,
                           partial(_handover, way=way, subject=subject, tokens=n))
                for n in HANDOVER_TOKENS)
    for degree in (d for d in degrees if d > 1):
        for link, groups in _scopes(where, degree, near, far):
            tables[TableKey(ALL_REDUCE, degree, link)] = tuple(
                _on_groups(world, groups, n * subject.row_bytes,
                           partial(_all_reduce, subject=subject, degree=degree, rows=n,
                                   is_direct=can_go_direct))
                for n in ALL_REDUCE_ROWS)
    return tables


def _scopes(where: RankNodes, size: int, near: str, far: str
            ) -> list[tuple[str, list[tuple[int, ...]]]]:
    scopes = [(near, where.near_groups(size))]
    if where.is_split and far != near:
        scopes.append((far, where.far_groups(size)))
    return [(link, groups) for link, groups in scopes if groups]


def _on_groups(world: Any, groups: list[tuple[int, ...]], num_bytes: int,
               measure: Callable[[Any], list[float]]) -> Sample:
    """Calls `measure` in all groups at once; a Sample of the seconds that their ranks return."""
    rank = world.Get_rank()
    mine = next((i for i, group in enumerate(groups) if rank in group), None)
    comm = world.Split(len(groups) if mine is None else mine, rank)
    world.Barrier()
    samples = measure(comm) if mine is not None else []
    request = world.Ibarrier()
    wait_politely(lambda: bool(request.Test()))
    comm.Free()
    gathered = [s for each in all_gather(world, samples, list[float]) for s in each]
    return Sample(x=num_bytes, samples_s=tuple(gathered))


class _ThroughHosts:
    """Blocks go from the device to this host's memory, over MPI, and to the other's device."""

    def __init__(self, comm: Any) -> None:
        self._comm = MpiComm(comm)
        self.rank = self._comm.rank

    def send(self, block: Tensor) -> None:
        self._comm.send(1 - self.rank, TokensMessage(group=0), block)

    def receive(self, like: Tensor) -> Tensor:
        _, block = self._comm.receive(1 - self.rank)
        assert block is not None
        return block.to(like.device)

    def close(self) -> None:
        self._comm.flush()


class _Directly:
    """Sends blocks between devices by NCCL; between CPUs, in tests, by gloo."""

    def __init__(self, comm: Any) -> None:
        self._group = TorchGroup(comm, "nccl" if torch.cuda.is_available() else "gloo")
        self.rank = self._group.rank

    def send(self, block: Tensor) -> None:
        self._group.send(1 - self.rank, block)

    def receive(self, like: Tensor) -> Tensor:
        block = torch.empty_like(like)
        self._group.receive(1 - self.rank, block)
        return block

    def close(self) -> None:
        self._group.close()


_Channel = _ThroughHosts | _Directly  # blocks of memory between ranks 0 and 1 of a communicator


def _transfer(comm: Any, num_bytes: int, device: torch.device) -> list[float]:
    """One-way seconds of a step's header and tensor, from device to device, by ping-pong."""
    channel, tensor = _ThroughHosts(comm), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return _ping_pong(channel.rank, lambda: channel.send(tensor), lambda: channel.receive(tensor),
                      channel.close)


def _handover(comm: Any, way: type[_Channel], subject: Subject, tokens: int) -> list[float]:
    """Seconds from one rank's KV cache to the other's: entries are packed, sent and unpacked."""
    channel, clock = way(comm), clock_of(subject.device)
    shape = kv_shape(subject.spec, subject.dtype, slots=2, capacity=tokens)
    source, target = (KvCache(shape, subject.device) for _ in range(2))
    source.allocate([tokens])
    like = pack(source, [0])

    def receive() -> None:
        block = channel.receive(like)
        target.adopt([tokens])
        scatter(target.store, *target.rows_of([0]), block)
        clock.settle()

    return _ping_pong(channel.rank, lambda: channel.send(pack(source, [0])), receive, channel.close)


def _ping_pong(rank: int, send: Callable[[], object], receive: Callable[[], object],
               end: Callable[[], object]) -> list[float]:
    """Seconds of each round on rank 0: half of there and back between ranks 0 and 1. Empty on
    rank 1."""
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for call in (send, receive) if rank == 0 else (receive, send):
            call()
        rounds.append((time.perf_counter() - begin) / 2)
    end()
    return rounds[_WARM_UP:] if rank == 0 else []


def _all_reduce(comm: Any, subject: Subject, degree: int, rows: int,
                is_direct: bool) -> list[float]:
    """Seconds that an all-reduce adds to a real step, round by round (see the module)."""
    group, sums = TorchGroup(comm, "nccl") if is_direct else MpiGroup(comm), Sums()
    bench = summing_bench(subject.spec, subject.dtype, degree, sums, device=subject.device,
                          weight_dtype=subject.weight_dtype)
    added = seconds_of_sums(comm, group, bench, sums, rows)
    if isinstance(group, TorchGroup):
        group.close()
    return added


_POINT_S = 0.4  # chosen: seconds of measuring a size, within these numbers of rounds
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 21  # chosen


class Sums:
    """Sums a shard's results over `group`, or leaves them where it is None; counts the calls."""

    def __init__(self) -> None:
        self.group: MpiGroup | TorchGroup | None = None
        self.count = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.count += 1
        return tensor if self.group is None else self.group.all_reduce(tensor)


def summing_bench(spec: ModelSpec, dtype: torch.dtype, degree: int, sums: Sums, *,
                  device: torch.device, weight_dtype: torch.dtype) -> LayerBench:
    """A LayerBench of one shard of a few layers, more than a processor's caches keep, whose results
    `sums` adds up."""
    return LayerBench(few_layers(spec, dtype, degree, least=LEAST_LAYERS), dtype,
                      tp_degree=Shard(degree=degree, all_reduce=sums), device=device,
                      weight_dtype=weight_dtype)


def seconds_of_sums(comm: Any, group: MpiGroup | TorchGroup, bench: LayerBench, sums: Sums,
                    rows: int) -> list[float]:
    """Seconds that each sum of `rows` hidden states adds to a step, round by round. Every rank of
    `comm` must call it with its own bench; `group` sums over the same ranks."""
    step = _step(bench, rows)

    def timed(one: MpiGroup | TorchGroup | None) -> float:
        sums.group, sums.count = one, 0
        comm.Barrier()
        return step().whole_s

    first_s = max(timed(None), timed(group))  # also warms up
    most = np.clip(_POINT_S / 2 / first_s, _LEAST_ROUNDS, _MOST_ROUNDS)  # rank 0's counts
    rounds = broadcast(comm, int(most), int)
    added = [timed(group) - timed(None) for _ in range(rounds)]
    return [max(s, 0.0) / sums.count for s in added]


def _step(bench: LayerBench, rows: int) -> Callable[[], StepParts]:
    """A function that executes and times a step of `rows` tokens: few are decoded, many are of
    inputs, as is usual."""
    layers, most = layers_for(rows), bench.spec.max_positions
    if rows > DECODE_ROWS_UP_TO:
        return bench.encode(ordinary_inputs(rows, most), most_layers=layers)
    context = STEP_CONTEXT if most is None else min(STEP_CONTEXT, most - 1)
    return bench.decode(contexts_of_mean(rows, context - 1), most_layers=layers)
