"""Which devices encode and which decode under WAA (paper section 4.1; docs/design.md).

The first devices encode, the others decode. Groups of `tp_degree` are formed in the decode pool
first, from the last device backwards, since every token of a query waits for that pool; what is
left of `tp_gpus` forms groups in the encode pool, from the first device on. A group lies within a
node, or on whole nodes, so only numbers of encode devices for which all groups find a place are
allowed."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.allocation import can_hold, pool_ranks
from xsimulator.plans import PlanSource, StagePlan


@dataclass(frozen=True, kw_only=True, eq=False)
class WaaPlan:
    """A plan has both pools; the decode pool's stages are numbered after the encode pool's."""

    encode: StagePlan
    decode: StagePlan


class WaaPlans:
    """The plans of one (tp_degree, tp_gpus) are kept by number of encode devices."""

    def __init__(self, plans: PlanSource, tp_degree: int, tp_gpus: int) -> None:
        self._plans, self.tp_degree, self.tp_gpus = plans, tp_degree, tp_gpus
        self.plan = cache(self._make_plan)  # by number of encode devices
        problem = plans.problem
        self._ranks = {
            count: ranks for count in range(1, problem.cluster.num_devices)
            if (ranks := pool_ranks(problem.cluster, count, tp_degree, tp_gpus)) is not None
            and can_hold(problem.model, *ranks)}
        # these numbers of encode devices can be; none if the model or cluster refuses all
        self.encode_devices: IntArray = np.array(list(self._ranks), np.int64)

    def _make_plan(self, encode_devices: int) -> WaaPlan:
        encode, decode = self._ranks[encode_devices]
        return WaaPlan(encode=self._plans.pool(encode, "encode"),
                       decode=self._plans.pool(decode, "decode", first_index=len(encode)))

    def nearest(self, share: FloatArray) -> IntArray:
        """These numbers of encode devices are nearest to such shares of all devices (WAA-C)."""
        wanted = np.asarray(share)[..., None] * self._plans.problem.cluster.num_devices
        nearest = np.abs(wanted - self.encode_devices).argmin(axis=-1)
        return np.asarray(self.encode_devices[nearest])
