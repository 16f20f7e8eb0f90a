"""The copies of a deployment: which ranks each has, what it executes, and in which of them a rank
is."""

from dataclasses import dataclass, replace

from xgpt.core.deployment import Deployment, Pool
from xgpt.core.schedule import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One whole copy: `estimate` is what it alone executes, on its ranks among all; `first_stage`
    the number of its first stage among all replicas' stages; `shape` that of its shape among those
    of the estimate that it is a copy of."""

    number: int
    estimate: Estimate
    first_stage: int
    shape: int = 0

    @property
    def own(self) -> Deployment:
        return self.estimate.deployment

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.own.pools

    @property
    def head(self) -> int:
        """The rank that decides on its first pool."""
        return self.pools[0].stages[0].ranks[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for pool in self.pools for stage in pool.stages for rank in stage.ranks)

    def world_stage(self, index: int) -> int:
        """The number, among all replicas' stages, of its stage `index`."""
        return self.first_stage + index


def replicas_of(estimate: Estimate) -> tuple[Replica, ...]:
    """All of them, in the order of their ranks."""
    found, first_rank, first_stage = list[Replica](), 0, 0
    for place, shape in enumerate(estimate.shapes):
        one, deployment = shape.one_copy, shape.deployment
        for copy in range(deployment.replicas):
            pools = deployment.pools_of(copy, first_rank=first_rank)
            found.append(Replica(
                number=len(found), first_stage=first_stage, shape=place, estimate=replace(
                    one, deployment=replace(one.deployment, pools=pools))))
            first_stage += len(deployment.stages)
        first_rank += deployment.num_devices
    return tuple(found)


def replica_of(estimate: Estimate, rank: int) -> Replica:
    """The one in which the rank is."""
    return next(replica for replica in replicas_of(estimate) if rank in replica.ranks)
