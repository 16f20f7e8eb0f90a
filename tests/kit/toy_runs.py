"""The whole runner on toy models: stages, pools and rules, and ranks that are threads of this
process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from integrity import CheckedExecutor
from toys import EOS, spec_of

from xgpt.core.controls import Admission, AdmissionRule
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.model import ModelSpec
from xgpt.core.placement import Placement
from xgpt.core.policies import Role
from xgpt.core.prefixes import Prefixes
from xrunner.checkpoint.reader import open_weights
from xrunner.comm.handover import EntryReceiver, EntrySender, Transfer, transfers
from xrunner.comm.point_to_point import Comm, local_comms
from xrunner.engine.head import Head, PoolLink, Sink, Supply
from xrunner.engine.pipeline import Neighbours, Route, await_start, routes, serve_stage
from xrunner.engine.pool_links import FromEncodePool, ToDecodePool
from xrunner.engine.pool_requests import Extent, Vocabulary
from xrunner.engine.stage import StageExecutor
from xrunner.files.forms import Forms
from xrunner.files.tokenizer import start_token
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.weights import WHOLE, Shard
from xrunner.offload.placed_stage import PlacedStage, open_tiers
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule
from xrunner.rules.waa import SystemLimits, WaaDecodeRule, WaaEncodeRule


class Collector:
    """A Sink that keeps what it is told; stops after `stop_after` results, if given."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.results: list[FinishedQuery] = []
        self.is_complete: bool | None = None  # what the head says at its end
        self._stop_after = stop_after

    def finished(self, result: FinishedQuery) -> None:
        self.results.append(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Nobody watches."""

    def should_stop(self) -> bool:
        return self._stop_after is not None and len(self.results) >= self._stop_after


def pool_of(stages: Sequence[StageAssignment], role: Role = "both") -> Pool:
    """A pool of that role and name."""
    return Pool(name=role, role=role, stages=tuple(stages), num_groups=1, kv_tokens=0)


def transfers_of(pools: Sequence[Pool], spec: ModelSpec) -> list[Transfer]:
    """What the ranks of an encode pool send to those of a decode pool."""
    encode, decode = pools
    return transfers(encode.stages, decode.stages, spec)


def ranks_of(pool: Pool) -> list[int]:
    return [rank for stage in pool.stages for rank in stage.ranks]


def split_stages(num_layers: int, num_stages: int, *, encoder_layers: int = 0,
                 degrees: Sequence[int] | None = None) -> list[StageAssignment]:
    """Layers spread evenly over stages of these tensor-parallel degrees (None: single ranks)."""
    degrees = degrees or [1] * num_stages
    cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
    encoder = [round(i * encoder_layers / num_stages) for i in range(num_stages + 1)]
    first = [sum(degrees[:s]) for s in range(num_stages)]
    return [StageAssignment(index=s, ranks=tuple(range(first[s], first[s] + degrees[s])),
                            first_layer=cuts[s], num_layers=cuts[s + 1] - cuts[s],
                            first_encoder_layer=encoder[s],
                            num_encoder_layers=encoder[s + 1] - encoder[s])
            for s in range(num_stages)]


def run_in_process(directory: Path, queries: Sequence[PreparedQuery], *, num_stages: int = 0,
                   num_groups: int = 1, encode_batch: int = 4, decode_iterations: int = 5,
                   max_active: int = 12, kv_tokens: int = 10_000, sink: Collector | None = None,
                   dtype: torch.dtype = torch.float32, degrees: Sequence[int] | None = None,
                   stages: Sequence[StageAssignment] | None = None,
                   rule: BatchingRule | None = None, device: torch.device | str = "cpu",
                   in_blocks: bool = False, prefixes: Prefixes | None = None,
                   placed: tuple[Placement, Path] | None = None,
                   executors: Sequence[StageExecutor] = (),
                   ) -> tuple[Collector, list[StageExecutor]]:
    """The whole runner on threads instead of MPI ranks: (what finished, every rank's executor).
    Stages: given, or of these tensor-parallel `degrees`, or `num_stages` single ranks.
    `placed`: as of `executor_of`. `executors`: of ranks alone, in place of those."""
    stages = stages or stages_of(directory, degrees or [1] * num_stages)
    executors = [*executors]
    for stage in stages if not executors else ():
        shards = Lockstep(stage.tp_degree).shards if stage.tp_degree > 1 else [WHOLE]
        executors += [executor_of(directory, stage, shard, dtype, device, placed=placed)
                      for shard in shards]
    comms, route = local_comms(len(executors)), routes([pool_of(stages)])
    rule = rule or RraRule(encode_batch=encode_batch, decode_iterations=decode_iterations,
                           num_groups=num_groups, max_active=max_active, kv_tokens=kv_tokens)
    set_prefixes(rule, prefixes)
    threads = [threading.Thread(target=serve, args=(comms[r], route[r], executors[r]), daemon=True)
               for r in range(1, len(executors))]
    for thread in threads:
        thread.start()
    sink = lead(directory, comms[0], route[0], executors[0], rule, queries, sink,
                in_blocks=in_blocks or prefixes is not None)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sink, executors


def run_waa_in_process(
        directory: Path, queries: Sequence[PreparedQuery], pools: Sequence[Pool],
        rules: tuple[WaaEncodeRule, WaaDecodeRule], *, sink: Collector | None = None,
        in_blocks: bool = False, supply: Supply | None = None,
        ) -> tuple[Collector, dict[int, StageExecutor]]:
    """Both of WAA's pools on threads: (what finished, every rank's executor). `supply`: of the
    queries, which are all there otherwise."""
    own, ranks = transfers_of(pools, spec_of(directory)), range(sum(p.num_devices for p in pools))
    comms, side = local_comms(len(ranks)), local_comms(len(ranks))
    route, decode_ranks = routes(pools), ranks_of(pools[1])
    executors: dict[int, StageExecutor] = {}
    for role, stage in ((pool.role, stage) for pool in pools for stage in pool.stages):
        shards = Lockstep(stage.tp_degree).shards if stage.tp_degree > 1 else [WHOLE]
        for rank, shard in zip(stage.ranks, shards, strict=True):
            executors[rank] = executor_of(directory, stage, shard, role=role, **couriers(
                role, side[rank], own, decode_ranks))

    def follow(rank: int) -> None:
        if rank == decode_ranks[0]:
            lead_decoding(directory, comms[rank], route[rank], executors[rank], rules[1])
        else:
            serve(comms[rank], route[rank], executors[rank])

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    sink = lead(directory, comms[0], route[0], executors[0], rules[0], queries, sink,
                link=ToDecodePool(comms[0], rules[1], decode_ranks[0], supply),
                in_blocks=in_blocks, is_supplied=supply is not None)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sink, executors


def couriers(role: Role, comm: Comm, own: Sequence[Transfer],
             decode_ranks: Sequence[int]) -> dict[str, Any]:
    """A rank's end of the handover, as StageExecutor takes it."""
    if role == "encode":
        return {"sender": EntrySender(comm, own)}
    return {"receiver": EntryReceiver(comm, own, decode_ranks)}


def waa_pools(directory: Path, encode: Sequence[int], decode: Sequence[int],
              encode_cuts: Sequence[int] | None = None,
              decode_cuts: Sequence[int] | None = None) -> list[Pool]:
    """Two pools with stages of these tensor-parallel degrees. Cuts: where the layers of one stage
    end and those of the next begin (None: even)."""
    spec = spec_of(directory)
    held = {"encode": spec.num_encoder_layers or spec.num_layers, "decode": spec.num_layers}
    found: list[Pool] = []
    first = 0
    roles: tuple[Role, Role] = ("encode", "decode")
    for role, degrees, cuts in zip(roles, (encode, decode), (encode_cuts, decode_cuts),
                                   strict=True):
        stages: list[StageAssignment] = []
        inner = cuts or [round(i * held[role] / len(degrees)) for i in range(1, len(degrees))]
        bounds = [0, *inner, held[role]]
        for place, degree in enumerate(degrees):
            layers = {"first_layer": bounds[place],
                      "num_layers": bounds[place + 1] - bounds[place]}
            if spec.is_encoder_decoder and role == "encode":
                layers = {"first_layer": 0, "num_layers": 0,
                          "first_encoder_layer": bounds[place],
                          "num_encoder_layers": bounds[place + 1] - bounds[place]}
            stages.append(StageAssignment(
                index=place + sum(len(pool.stages) for pool in found),
                ranks=tuple(range(first, first + degree)), **layers))
            first += degree
        found.append(pool_of(stages, role))
    return found


def toy_waa_rules(num_encode_stages: int, *, encode_batch: int = 3, num_groups: int = 1,
                  max_in_system: int = 8, kv_tokens: int = 10_000,
                  encode_kv_tokens: int = 10_000, encode_chunk: int = 0,
                  admission: AdmissionRule | None = None) -> tuple[WaaEncodeRule, WaaDecodeRule]:
    """`encode_chunk`: of the decode pool, which takes inputs as long as there is room."""
    limits = SystemLimits(encode_batch=encode_batch, max_in_system=max_in_system,
                          planned_active=max_in_system, stock_tokens=2 * encode_chunk)
    return (WaaEncodeRule(limits, num_groups=num_encode_stages + 2, kv_tokens=kv_tokens,
                          encode_kv_tokens=encode_kv_tokens,
                          sizer=BatchSizer(mean_input=10.0), admission=Admission(rule=admission)),
            WaaDecodeRule(num_groups=num_groups, kv_tokens=kv_tokens, encode_chunk=encode_chunk,
                          admission=Admission(rule=admission),
                          group_max_active=-(-max_in_system // num_groups)))


def stages_of(directory: Path, degrees: Sequence[int]) -> list[StageAssignment]:
    """The model's layers over stages of these tensor-parallel degrees."""
    spec = spec_of(directory)
    return split_stages(spec.num_layers, len(degrees), degrees=degrees,
                        encoder_layers=spec.num_encoder_layers)


def executor_of(directory: Path, stage: StageAssignment, shard: Shard = WHOLE,
                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
                role: Role = "both", placed: tuple[Placement, Path] | None = None,
                **couriers: Any) -> StageExecutor:
    """One rank's, which checks its caches after every step. `placed`: placement, and folder of its
    files."""
    reader = open_weights(directory, dtype)
    spec = spec_of(directory)
    model = load_stage(spec, reader, stage, shard, device, role=role) if placed is None else (
        PlacedStage(spec, reader, stage, dtype, open_tiers(
            placed[0], stage.index, torch.device(device), placed[1]), directory.as_posix()))
    return CheckedExecutor(model, forms=Forms(directory, spec.vocab_size), **couriers)


def lead(directory: Path, comm: Comm, route: Route, executor: StageExecutor, rule: BatchingRule,
         queries: Sequence[PreparedQuery], sink: Collector | None = None, *,
         link: PoolLink | None = None, in_blocks: bool = False,
         is_supplied: bool = False) -> Collector:
    """Work of the first rank. `in_blocks`: entries that are reserved lie so, too. `is_supplied`:
    the queries come while it runs."""
    sink = sink or Collector()
    head = head_of(directory, Neighbours(comm, route), executor, rule, sink, link)
    head.requests.in_blocks = in_blocks
    if is_supplied:
        head.requests.extent = extent_of(queries)
    for query in () if is_supplied else queries:
        assert head.submit(query)
    head.start()
    sink.is_complete = head.run()
    executor.close()
    return sink


def extent_of(queries: Sequence[PreparedQuery]) -> Extent:
    return Extent(queries=len(queries), longest=max(q.reserve_tokens for q in queries),
                  longest_input=max(len(q.input_ids) for q in queries),
                  longest_output=max(q.max_new_tokens for q in queries))


def lead_decoding(directory: Path, comm: Comm, route: Route, executor: StageExecutor,
                  rule: WaaDecodeRule) -> None:
    """What the first rank of WAA's decode pool does."""
    assert executor.receiver is not None
    link = FromEncodePool(comm, executor.receiver, encode_head=0)
    head = head_of(directory, Neighbours(comm, route), executor, rule, link, link)
    head.start()
    head.run()
    executor.close()


def head_of(directory: Path, neighbours: Neighbours, executor: StageExecutor, rule: BatchingRule,
            sink: Sink, link: PoolLink | None = None) -> Head:
    is_encoder_decoder = executor.model.spec.is_encoder_decoder
    return Head(rule=rule, executor=executor, neighbours=neighbours, sink=sink, link=link,
                vocabulary=Vocabulary(
                    eos_ids=frozenset([EOS]), decode_text=lambda ids: " ".join(map(str, ids)),
                    start_token=start_token(directory) if is_encoder_decoder else None))


def serve(comm: Comm, route: Route, executor: StageExecutor) -> None:
    """What every other rank does."""
    neighbours = Neighbours(comm, route)
    await_start(neighbours, executor)
    serve_stage(neighbours, executor)
    executor.close()


T = TypeVar("T")


class Lockstep:
    """All ranks of a tensor-parallel group as threads that meet at every sum and gather."""

    def __init__(self, degree: int) -> None:
        self._partials: list[torch.Tensor] = [torch.empty(0)] * degree
        self._barrier = threading.Barrier(degree, timeout=30)
        self.shards = [Shard(i, degree, partial(self._sum, i), partial(self._gather, i))
                       for i in range(degree)]

    def run(self, work: Callable[[Shard], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(work, self.shards))

    def _sum(self, index: int, partial: torch.Tensor) -> torch.Tensor:
        return self._all(index, partial).sum(0)

    def _gather(self, index: int, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._all(index, tensor)
        return parts if index == 0 else None

    def _all(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self._partials[index] = tensor
        self._barrier.wait()
        parts = torch.stack(self._partials)
        self._barrier.wait()  # nobody overwrites its own before all have taken them
        return parts
