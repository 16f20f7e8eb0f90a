"""Stage plans: the layers of each stage under each tensor plan of a problem, with times and
weights.

The split of layers is balanced for a reference workload of ordinary batch sizes, with the problem's
ratio of encoding to decoding. It depends on the tensor plan, not on the batch sizes searched."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.cluster import Link
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import head_params_of_rank
from xgpt.core.policies import Role
from xgpt.core.problem import Problem
from xgpt.core.units import WEIGHT_BYTES
from xprofiler.timing import Operator, TimingSource, of_role
from xsimulator import memory
from xsimulator.allocation import (
    StageCost,
    allocate,
    can_hold,
    pool_layers,
    pool_ranks,
    refuse_plan,
    stage_ranks,
)
from xsimulator.convex_steps import ConvexSteps
from xsimulator.layer_times import LayerTimes
from xsimulator.stage_times import StageKinds, StageTimes, least_times, stage_kinds

REFERENCE_QUERIES = 32  # chosen: of an encode and of a decode step
DIVISIONS = 32  # chosen: divisions of a cluster into two pools, at most about so many


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePlan:
    """The stages of one pool with their step times and weights."""

    stages: tuple[StageAssignment, ...]
    times: StageTimes
    weight_bytes: FloatArray  # [stages] on each rank

    @cached_property
    def kinds(self) -> StageKinds:
        """The stages grouped by equal step times."""
        return stage_kinds(self.times)

    @cached_property
    def convex_steps(self) -> ConvexSteps:
        """Convex lower bounds on the mean seconds of steps of mixed sizes."""
        times = least_times(self.times)
        return ConvexSteps(self.kinds if times is self.times else stage_kinds(times))


class PlanSource(Protocol):
    """Source of stage plans for the rough formulas. `StagePlans` balances layers; other sources
    take the stages of a schedule."""

    problem: Problem

    def both(self, tp_degree: int, tp_gpus: int) -> StagePlan:
        """The stage plan of all devices for both phases. Raises InputError if impossible."""

    def pool(self, ranks: Sequence[tuple[int, ...]], role: Role, first_index: int = 0) -> StagePlan:
        """The stage plan of a pool on these ranks. first_index: index of its first stage."""

    def of_stages(self, stages: tuple[StageAssignment, ...], role: Role) -> StagePlan:
        """The stage plan of a pool of these stages."""

    def pairs(self, tp_degree: int, tp_gpus: int) -> PoolPairs:
        """All divisions of the devices into an encode pool and a decode pool."""


class _DegreeCost(NamedTuple):
    """Reference costs of a group: of a middle stage, and seconds of embedding and head."""

    middle: StageCost
    embed_s: float
    head_s: float


class PlanCache:
    """Stage plans of several problems with the same times, such as parts of a cluster. Layer times
    are shared, since they do not depend on the number of devices."""

    def __init__(self, timing: TimingSource) -> None:
        self.timing = timing
        self._layers: dict[Hashable, LayerTimes] = {}
        self._of: dict[int, StagePlans] = {}

    def of(self, problem: Problem) -> StagePlans:
        """The StagePlans of a problem, made once."""
        if id(problem) not in self._of:
            self._of[id(problem)] = StagePlans(problem, self.timing, self)
        return self._of[id(problem)]

    def layers(self, problem: Problem, timing: TimingSource) -> LayerTimes:
        """The LayerTimes of a problem by `timing`, made once."""
        inputs = problem.lengths.inputs  # kept alive by the layers, so that ids stay unique
        key = (id(timing), id(inputs), problem.model, problem.cluster.intra_link, problem.dtype,
               problem.head_rows, problem.has_head)
        if key not in self._layers:
            self._layers[key] = LayerTimes.of(problem, timing)
        return self._layers[key]


class StagePlans:
    """Stage plans of one problem, each made once."""

    def __init__(self, problem: Problem, timing: TimingSource,
                 shared: PlanCache | None = None) -> None:
        """shared: plans of other problems with the same times."""
        self.problem, self.timing = problem, timing
        self._shared = shared or PlanCache(timing)
        self.layers = self._shared.layers(problem, timing)
        fewer = 0 if problem.model.is_encoder_decoder else 1
        # at least one: the split needs some decoding to balance
        self._iterations = max(problem.lengths.outputs.mean - fewer, 1.0)
        self._known: dict[object, StagePlan] = {}
        self._cost = cache(self._find_cost)

    def both(self, tp_degree: int, tp_gpus: int) -> StagePlan:
        """The stage plan of all devices for both phases, the first `tp_gpus` in groups of
        `tp_degree`. Raises InputError for a plan that the model or the cluster refuses."""
        key = (tp_degree, tp_gpus)
        if key not in self._known:
            problem = self.problem
            reason = refuse_plan(problem.model, problem.cluster, tp_degree, tp_gpus)
            if reason is not None:
                raise wrong("schedule", "tp_degree, tp_gpus", key, reason)
            ranks = stage_ranks(problem.cluster.num_devices, tp_degree, tp_gpus)
            self._known[key] = self.pool(ranks, "both")
        return self._known[key]

    def pool(self, ranks: Sequence[tuple[int, ...]], role: Role, first_index: int = 0) -> StagePlan:
        """The stage plan of a pool on these ranks, for one phase or both."""
        key = (tuple(ranks), role, first_index)
        if key not in self._known:
            self._known[key] = self.of_stages(allocate(
                self.problem.model, ranks, self._costs(ranks, role), role,
                first_index=first_index), role)
        return self._known[key]

    def pairs(self, tp_degree: int, tp_gpus: int) -> PoolPairs:
        """All divisions into an encode pool and a decode pool. On many devices only every second or
        fourth division is taken, and so on."""
        cluster, model = self.problem.cluster, self.problem.model
        return PoolPairs(self, (tp_degree, tp_gpus), {
            count: ranks for count in range(1, cluster.num_devices)
            if count % max(cluster.num_devices // DIVISIONS, 1) == 0
            if (ranks := pool_ranks(cluster, count, tp_degree, tp_gpus)) is not None
            and can_hold(model, *ranks)})

    def of_stages(self, stages: tuple[StageAssignment, ...], role: Role) -> StagePlan:
        """The stage plan of a pool of these stages."""
        key = (stages, role)
        if key not in self._known:
            self._known[key] = self._of_stages(stages, role)
        return self._known[key]

    def _of_stages(self, stages: tuple[StageAssignment, ...], role: Role) -> StagePlan:
        problem, model = self.problem, self.problem.model
        own, layers = of_role(self.timing, role), self.layers
        if own is not self.timing:
            layers = self._shared.layers(problem, own)
        weights = memory.weight_bytes(model, stages, problem.dtype, problem.weight_dtype)
        if pool_layers(model, role)[0] == 0:  # no decoder, so no output head
            weights[-1] -= (head_params_of_rank(model, stages[-1].tp_degree)
                            * WEIGHT_BYTES[problem.weight_dtype])
        return StagePlan(stages=stages, weight_bytes=weights,
                         times=StageTimes(layers, problem.cluster, stages))

    def _costs(self, ranks: Sequence[tuple[int, ...]], role: Role) -> list[StageCost]:
        cluster = self.problem.cluster
        found = [self._cost(len(group), None if len(group) == 1 else cluster.link_of(group), role)
                 for group in ranks]
        costs = [cost.middle for cost in found]
        first, last = found[0], found[-1]
        costs[0] = replace(costs[0], fixed_s=costs[0].fixed_s + first.embed_s)
        costs[-1] = replace(costs[-1], fixed_s=costs[-1].fixed_s + last.head_s)
        return costs

    def _find_cost(self, degree: int, link: Link | None, role: Role) -> _DegreeCost:
        encodes, decodes = role != "decode", role != "encode"
        timing, layers, inputs = self.timing, self.layers, self.problem.lengths.inputs.mean
        # at most the sizes measured: beyond them all times are infinite
        rest, encoding, decoding = (timing.reach(operator, degree) for operator in (
            Operator.LAYER_REST, Operator.ENCODE_ATTENTION, Operator.DECODE_ATTENTION))
        tokens = min(REFERENCE_QUERIES * inputs, rest.x)  # of an encode step
        queries = min(REFERENCE_QUERIES, rest.x, decoding.x)  # of a decode step
        context = min(inputs + self._iterations / 2, decoding.y)
        rounds = self._iterations  # decode steps for each encode step
        encode = float(layers.encode_rest_s(tokens, degree, link) + REFERENCE_QUERIES
                       * layers.encode_attention_s(min(inputs, encoding.x),
                                                   REFERENCE_QUERIES, degree))
        decode = rounds * float(layers.decode_rest_s(queries, degree, link)
                                + layers.decode_attention_s(queries, context, degree))

        def total(operator: Operator, rows: tuple[float, float]) -> float:
            reach = timing.reach(operator, degree).x
            once = timing.operator_s(operator, np.minimum(rows, reach), tp_degree=degree)
            # no product with 0: an unknown time is infinite
            return float((once[0] if encodes else 0.0) + (rounds * once[1] if decodes else 0.0))

        if self.problem.model.is_encoder_decoder:
            cross = float(timing.operator_s(Operator.CROSS_KV, tokens, tp_degree=degree))
            middle = StageCost(layer_s=(decode + cross) * decodes, fixed_s=0.0,
                               encoder_layer_s=encode * encodes)
        else:
            middle = StageCost(layer_s=encode * encodes + decode * decodes, fixed_s=0.0)
        return _DegreeCost(middle=middle, embed_s=total(Operator.EMBED, (tokens, queries)),
                           head_s=total(Operator.HEAD, (REFERENCE_QUERIES, queries)))


Ranks = Sequence[tuple[int, ...]]


class PoolPairs:
    """The divisions of the devices into an encode pool and a decode pool under WAA (paper section
    4.1), by the number of encode devices.

    The first devices encode, the others decode. Groups of `tp_degree` are formed in the decode pool
    first, from the last device backwards, since every token of a request waits for that pool. The
    rest of `tp_gpus` forms groups in the encode pool, from the first device on. A number of encode
    devices is allowed only if every group then lies within a node or on whole nodes."""

    def __init__(self, plans: PlanSource, plan: tuple[int, int],
                 ranks: Mapping[int, tuple[Ranks, Ranks]]) -> None:
        """ranks: {encode devices: (ranks of each encode stage, of each decode stage)}."""
        self._plans, self._ranks, self.tp_degree = plans, ranks, plan[0]
        self.encode_devices: IntArray = np.array(list(ranks), np.int64)
        self.pair = cache(self._pair)

    def _pair(self, encode_devices: int) -> tuple[StagePlan, StagePlan]:
        """(encode pool, decode pool); decode stages are numbered after encode stages."""
        encode, decode = self._ranks[encode_devices]
        return (self._plans.pool(encode, "encode"),
                self._plans.pool(decode, "decode", first_index=len(encode)))

    def nearest(self, share: FloatArray) -> IntArray:
        """The allowed numbers of encode devices nearest to these shares of all devices (WAA-C)."""
        wanted = np.asarray(share)[..., None] * self._plans.problem.cluster.num_devices
        nearest = np.abs(wanted - self.encode_devices).argmin(axis=-1)
        return np.asarray(self.encode_devices[nearest])

