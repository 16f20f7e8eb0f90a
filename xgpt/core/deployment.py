"""Which layers of a model lie on which devices: stages, the pools that they form, and copies of the
model."""

from dataclasses import dataclass, replace

from xgpt.core.policies import Role
from xgpt.core.units import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Consecutive layers held by one tensor-parallel group.

    `first_layer`/`num_layers` count decoder layers; the encoder's are counted apart and are 0
    for a decoder-only model."""

    index: Count
    ranks: tuple[Count, ...]
    first_layer: Count
    num_layers: Count
    first_encoder_layer: Count = 0
    num_encoder_layers: Count = 0

    @property
    def tp_degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Stages that work one phase, or both, on queries split into `num_groups` groups.

    `kv_tokens`: KV entries (tokens) reserved at most, over the whole pool."""

    name: str
    role: Role
    stages: tuple[StageAssignment, ...]
    num_groups: Positive
    kv_tokens: Count

    @property
    def group_kv_tokens(self) -> int:
        return self.kv_tokens // self.num_groups

    @property
    def num_devices(self) -> int:
        return sum(stage.tp_degree for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Which layers lie where: `replicas` copies of the model that are all alike.

    Of each copy the first `tp_gpus` devices form groups of `tp_degree`, the others are single.
    `pools`, in the order of their ranks, are those of the first copy, with ranks 0 to m - 1, m
    being `devices_per_replica`; copy r has ranks r m to r m + m - 1."""

    pools: tuple[Pool, ...]
    tp_degree: Positive
    tp_gpus: Count
    replicas: Positive = 1

    @property
    def stages(self) -> tuple[StageAssignment, ...]:
        """The stages of all pools of the first copy, in the order of their ranks."""
        return tuple(stage for pool in self.pools for stage in pool.stages)

    @property
    def encoding(self) -> Pool:
        """The pool that encodes."""
        return next(pool for pool in self.pools if pool.role != "decode")

    @property
    def decoding(self) -> Pool:
        """The pool that decodes: the one that encodes as well, but for WAA."""
        return next(pool for pool in self.pools if pool.role != "encode")

    @property
    def num_groups(self) -> int:
        """Groups of the pool that decodes."""
        return self.decoding.num_groups

    @property
    def kv_tokens(self) -> int:
        """KV entries (tokens) of the pool that decodes."""
        return self.decoding.kv_tokens

    @property
    def group_kv_tokens(self) -> int:
        """KV entries (tokens) of each group of the pool that decodes."""
        return self.decoding.group_kv_tokens

    def pools_of(self, copy: int, *, first_rank: int = 0) -> tuple[Pool, ...]:
        """The pools of a copy (0 is the first), with the ranks that it has; `first_rank`: of the
        first copy, where others come before it."""
        first = first_rank + copy * self.devices_per_replica
        return tuple(replace(pool, stages=tuple(
            replace(stage, ranks=tuple(first + rank for rank in stage.ranks))
            for stage in pool.stages)) for pool in self.pools)

    @property
    def devices_per_replica(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Devices of all copies."""
        return self.replicas * self.devices_per_replica
