"""What must always hold of a stage's slots, caches and blocks."""

from typing import Any

from torch import Tensor

from xrunner.comm.messages import StepMessage
from xrunner.engine.group import StageGroup
from xrunner.engine.kv import KvCache
from xrunner.engine.stage import StageExecutor


class CheckedExecutor(StageExecutor):
    """Looks at every cache after every step."""

    def execute(self, message: StepMessage, inputs: Tensor) -> Any:
        out = super().execute(message, inputs)
        self.check()
        return out

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        super().take_encoded(group, encoded)
        self.check()

    def check(self) -> None:
        for group in self.groups:
            check_group(group)
        check_blocks(*(cache for group in self.groups for cache in group.caches))


def check_group(group: StageGroup) -> None:
    """Slots and caches agree."""
    seats, cache, *encoded = group.slots.seats, *group.caches
    assert len({seat.query for seat in seats}) == len(seats) == len(cache.lengths), (
        f"{seats = } {cache.lengths = }")
    check_slots(cache, least=0 if encoded else 1)  # an input leaves nothing there
    for one in encoded:
        check_slots(one)
        assert len(one.lengths) == len(seats), f"{seats = } {one.lengths = }"


def check_slots(cache: KvCache, least: int = 1) -> None:
    """Lengths, blocks and table agree; every query has `least` tokens or more, or has given up
    what it had."""
    size, held, lengths = cache.pool.shape.capacity, cache.held, cache.lengths
    assert len(lengths) == len(held), f"{lengths = } {held = }"
    assert all(least <= n <= len(own) * size or not (n or own)
               for n, own in zip(lengths, held, strict=True)), f"{lengths = } {held = }"
    table = cache.room_for([])
    assert all(own == ([slot] if table is None else table.blocks[slot, :len(own)].tolist())
               for slot, own in enumerate(held)), f"{table = } {held = }"


def check_blocks(*caches: KvCache) -> None:
    """Asserts for every pool that each block is free or held by caches and prefixes, and counted
    as often as it is held."""
    for pool in {id(cache.pool): cache.pool for cache in caches}.values():
        pool.check_integrity([blocks for cache in caches if cache.pool is pool
                              for blocks in cache.held])
