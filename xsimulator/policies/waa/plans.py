"""Which devices encode and which decode under WAA (paper section 4.1; design.md section 3.3).

The first devices encode, the others decode. Groups of `tp_degree` are formed in the decode pool
first, from the last device backwards, since every token of a query waits for that pool; what is
left of `tp_gpus` forms groups in the encode pool, from the first device on. A group lies within a
node, so only numbers of encode devices for which all groups find a place are allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xgpt.core.cluster import Cluster
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xgpt.core.schedule import StageAssignment
from xsimulator.allocation import pool_layers
from xsimulator.plans import Plan, PlanSource


@dataclass(frozen=True, kw_only=True, eq=False)
class WaaPlan:
    """A plan has both pools; the decode pool's stages are numbered after the encode pool's."""

    encode: Plan
    decode: Plan

    @cached_property
    def stages(self) -> tuple[StageAssignment, ...]:
        return self.encode.stages + self.decode.stages


class WaaPlans:
    """The plans of one (tp_degree, tp_gpus) are kept by number of encode devices."""

    def __init__(self, plans: PlanSource, tp_degree: int, tp_gpus: int) -> None:
        self._plans, self.tp_degree, self.tp_gpus = plans, tp_degree, tp_gpus
        self._known: dict[int, WaaPlan] = {}
        problem = plans.problem
        ranks_of = {}
        for count in range(1, problem.cluster.num_devices):
            ranks = pool_ranks(problem.cluster, count, tp_degree, tp_gpus)
            if ranks is not None and _holds(problem.model, *ranks):
                ranks_of[count] = ranks
        self._ranks = ranks_of

    @property
    def encode_devices(self) -> IntArray:
        """These numbers of encode devices can be; none if the model or cluster refuses all."""
        return np.array(sorted(self._ranks), np.int64)

    @cached_property
    def stage_counts(self) -> tuple[tuple[IntArray, IntArray], ...]:
        """So many (encode stages, decode stages) [counts of encode devices] are groups, then so
        many single devices; with degree 1 there are these alone."""
        ranks = [self._ranks[count] for count in self.encode_devices.tolist()]
        degrees = dict.fromkeys((self.tp_degree, 1))
        encode, decode = ([np.array([sum(len(group) == degree for group in pools[side])
                                     for pools in ranks], np.int64) for degree in degrees]
                          for side in (0, 1))
        return tuple(zip(encode, decode, strict=True))

    def plan(self, encode_devices: int) -> WaaPlan:
        if encode_devices not in self._known:
            encode, decode = self._ranks[encode_devices]
            self._known[encode_devices] = WaaPlan(
                encode=self._plans.pool(encode, "encode"),
                decode=self._plans.pool(decode, "decode", first_index=len(encode)))
        return self._known[encode_devices]

    def nearest(self, share: FloatArray) -> IntArray:
        """These numbers of encode devices are nearest to such shares of all devices (WAA-C)."""
        wanted = np.asarray(share)[..., None] * self._plans.problem.cluster.num_devices
        allowed = self.encode_devices
        nearest: IntArray = allowed[np.abs(wanted - allowed).argmin(axis=-1)]
        return nearest


def pool_ranks(cluster: Cluster, encode_devices: int, tp_degree: int, tp_gpus: int,
               ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """Each (encode, decode) stage has these ranks; None where `tp_gpus` in groups find no place."""
    devices = cluster.num_devices
    if tp_degree == 1 or tp_gpus == 0:
        if tp_degree != 1 or tp_gpus != 0:
            return None
        return ([(rank,) for rank in range(encode_devices)],
                [(rank,) for rank in range(encode_devices, devices)])
    left = tp_gpus // tp_degree
    if tp_gpus % tp_degree or left * tp_degree > devices:
        return None
    first, decode = devices, []
    while left and first - tp_degree >= encode_devices:
        group = tuple(range(first - tp_degree, first))
        if not _in_one_node(cluster, group):
            return None
        decode.append(group)
        first, left = first - tp_degree, left - 1
    end, encode = 0, []
    while left and end + tp_degree <= encode_devices:
        group = tuple(range(end, end + tp_degree))
        if not _in_one_node(cluster, group):
            return None
        encode.append(group)
        end, left = end + tp_degree, left - 1
    if left:
        return None
    return (encode + [(rank,) for rank in range(end, encode_devices)],
            [(rank,) for rank in range(encode_devices, first)] + decode[::-1])


def _in_one_node(cluster: Cluster, group: tuple[int, ...]) -> bool:
    return cluster.node_of(group[0]) == cluster.node_of(group[-1])


def _holds(model: ModelSpec, encode: list[tuple[int, ...]],
           decode: list[tuple[int, ...]]) -> bool:
    """No pool has more stages than layers, and the model splits to these degrees."""
    degrees = {len(group) for group in encode + decode}
    return (len(encode) <= max(pool_layers(model, "encode"))
            and len(decode) <= max(pool_layers(model, "decode"))
            and all(refuse_tp_degree(model, d) is None for d in degrees if d > 1))
