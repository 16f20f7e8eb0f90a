"""The copies of a deployment: which ranks each has, and in which of them a rank is."""

from dataclasses import dataclass

from xgpt.core.schedule import Deployment, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One whole copy, with ranks of its own."""

    number: int
    pools: tuple[Pool, ...]

    @property
    def head(self) -> int:
        """The rank that decides on its first pool."""
        return self.pools[0].stages[0].ranks[0]

    @property
    def encoding(self) -> Pool:
        return next(pool for pool in self.pools if pool.role != "decode")

    @property
    def decoding(self) -> Pool:
        return next(pool for pool in self.pools if pool.role != "encode")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for pool in self.pools for stage in pool.stages for rank in stage.ranks)

    def world_stage(self, index: int) -> int:
        """The number, among all replicas' stages, of its stage `index`."""
        return self.number * sum(len(pool.stages) for pool in self.pools) + index


def replicas_of(deployment: Deployment) -> tuple[Replica, ...]:
    """All of them, in the order of their ranks."""
    return tuple(Replica(number=number, pools=deployment.pools_of(number))
                 for number in range(deployment.replicas))


def replica_of(deployment: Deployment, rank: int) -> Replica:
    """The one in which the rank is."""
    return next(replica for replica in replicas_of(deployment) if rank in replica.ranks)
