"""The copies of a deployment: which ranks each has, and in which of them a rank is."""

from dataclasses import dataclass, replace

from xgpt.core.schedule import Deployment, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One whole copy: `own` is the deployment of it alone, on its ranks among all."""

    number: int
    own: Deployment

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
        return self.number * sum(len(pool.stages) for pool in self.pools) + index


def replicas_of(deployment: Deployment) -> tuple[Replica, ...]:
    """All of them, in the order of their ranks."""
    return tuple(Replica(number=number, own=replace(
        deployment, pools=deployment.pools_of(number), replicas=1))
                 for number in range(deployment.replicas))


def replica_of(deployment: Deployment, rank: int) -> Replica:
    """The one in which the rank is."""
    return next(replica for replica in replicas_of(deployment) if rank in replica.ranks)
