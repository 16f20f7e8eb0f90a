"""Placement of a model's layers on devices: stages, the pools that they form, and replicas."""

from dataclasses import dataclass, replace

from xgpt.core.placement import Placement
from xgpt.core.policies import Role
from xgpt.core.units import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Consecutive layers held by one tensor-parallel group. Decoder and encoder layers are counted
    apart."""

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
    """Stages that encode, decode or both, on requests split into `num_groups` micro-batches.
    `kv_tokens`: capacity of the pool's KV cache, in tokens. `placement`: where the bytes of each
    stage lie; None: all on its devices."""

    name: str
    role: Role
    stages: tuple[StageAssignment, ...]
    num_groups: Positive
    kv_tokens: Count
    placement: Placement | None = None

    @property
    def group_kv_tokens(self) -> int:
        return self.kv_tokens // self.num_groups

    @property
    def num_devices(self) -> int:
        return sum(stage.tp_degree for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Placement of `replicas` equal replicas of the model.

    The first `tp_gpus` devices of a replica form groups of `tp_degree`, the others are single.
    `pools`, in the order of their ranks, are those of the first replica. With m =
    `devices_per_replica`, replica r has ranks r m to r m + m - 1."""

    pools: tuple[Pool, ...]
    tp_degree: Positive
    tp_gpus: Count
    replicas: Positive = 1

    @property
    def stages(self) -> tuple[StageAssignment, ...]:
        """The stages of all pools of the first replica, in the order of their ranks."""
        return tuple(stage for pool in self.pools for stage in pool.stages)

    @property
    def encoding(self) -> Pool:
        """The pool that encodes."""
        return next(pool for pool in self.pools if pool.role != "decode")

    @property
    def decoding(self) -> Pool:
        """The pool that decodes; for all policies but WAA it also encodes."""
        return next(pool for pool in self.pools if pool.role != "encode")

    @property
    def num_groups(self) -> int:
        """Micro-batches of the pool that decodes."""
        return self.decoding.num_groups

    @property
    def kv_tokens(self) -> int:
        """KV cache capacity, in tokens, of the pool that decodes."""
        return self.decoding.kv_tokens

    @property
    def group_kv_tokens(self) -> int:
        """KV cache capacity, in tokens, of each micro-batch of the pool that decodes."""
        return self.decoding.group_kv_tokens

    def pools_of(self, copy: int, *, first_rank: int = 0) -> tuple[Pool, ...]:
        """The pools of replica `copy` (0 is the first) with its own ranks. `first_rank`: first rank
        of replica 0, if others come before it."""
        first = first_rank + copy * self.devices_per_replica
        return tuple(replace(pool, stages=tuple(
            replace(stage, ranks=tuple(first + rank for rank in stage.ranks))
            for stage in pool.stages)) for pool in self.pools)

    @property
    def devices_per_replica(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.devices_per_replica
