"""One group of queries on one stage: who sits in which slot, and the caches of their entries."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from xgpt.core.errors import XgptError
from xgpt.core.units import format_bytes
from xrunner.devices import free_bytes
from xrunner.engine.graphs import DecodeGraphs
from xrunner.engine.kv import BlockPool, KvCache, KvShape, Room, block_tokens, kv_shape
from xrunner.engine.last_tokens import LastTokens
from xrunner.engine.spoken import Spoken
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.query import Sampling
from xrunner.rules.slots import GroupSlots
from xrunner.transport.messages import Joined, StartMessage, StepMessage

Model = StageModel | EncoderDecoderStage


class Pending(NamedTuple):
    """Inputs whose encoder output has not come yet, in slots from `first` on."""

    first: int
    lengths: list[int]
    message: StepMessage


class StageGroup:
    """`cache` holds the tokens so far; `encoded`, of an encoder-decoder model, the inputs.
    `graphs`: its decode steps, where they are captured; `last_tokens`: where the stage keeps
    them."""

    def __init__(self, cache: KvCache, encoded: KvCache | None = None) -> None:
        self.slots = GroupSlots[Joined]()
        self.cache, self._encoded = cache, encoded
        self.pending: deque[Pending] = deque()
        self.graphs: DecodeGraphs | None = None
        self.last_tokens: LastTokens | None = None
        self.spoken = Spoken()

    @property
    def encoded(self) -> KvCache:
        assert self._encoded is not None, "a decoder-only model has no encoder"
        return self._encoded

    @property
    def caches(self) -> list[KvCache]:
        return [self.cache] if self._encoded is None else [self.cache, self._encoded]

    @property
    def choices(self) -> list[Sampling]:
        """How each query is sampled, by slot."""
        return [seat.sampling for seat in self.slots.seats]

    def adopt(self, joined: Sequence[Joined]) -> None:
        """These queries, and no others, sit in the slots from now on, whole inputs cached."""
        self.slots.seats = list(joined)
        self.cache.adopt([j.input_tokens for j in joined])

    def join(self, joined: Sequence[Joined]) -> tuple[int, list[int]]:
        """Lets them sit down behind all, to be given their inputs' entries: the first slot, and
        how many tokens each has."""
        lengths = [j.input_tokens for j in joined]
        self.slots.place(joined)
        if self._encoded is None:
            return self.cache.allocate(lengths), lengths
        self.cache.allocate([0] * len(lengths))
        return self._encoded.allocate(lengths), lengths

    def place(self, joined: Sequence[Joined], replaced: Sequence[int]) -> None:
        """Lets them sit down without tokens as yet, the first in the slots `replaced`."""
        self.slots.place(joined, replaced)
        self.cache.place(len(joined), replaced)

    def remove(self, removed: Sequence[int]) -> int:
        """Takes these slots away and makes the others contiguous. Returns the rows copied."""
        assert not self.pending, f"{removed = }: slots move that are still to be filled"
        moves = self.slots.compact(removed)
        if self.last_tokens is not None:
            self.last_tokens.move(moves)
        if self._encoded is not None:
            self._encoded.free(removed)
        return self.cache.free(removed)

    def check_integrity(self) -> None:
        """Slots and caches agree."""
        seats = self.slots.seats
        assert len({seat.query for seat in seats}) == len(seats) == len(self.cache.lengths), (
            f"{seats = } {self.cache.lengths = }")
        if self._encoded is None:
            self.cache.check_integrity()
            return
        self.cache.check_integrity(least=0)  # an input leaves nothing there
        self._encoded.check_integrity()
        assert len(self._encoded.lengths) == len(seats), f"{seats = } {self._encoded.lengths = }"


def make_groups(model: Model, message: StartMessage) -> list[StageGroup]:
    """The groups of a stage, with caches of the sizes in `message`. Raises XgptError, before any
    memory is taken, where the device has too little left."""
    budget, is_encoder_decoder = message.budget, model.spec.is_encoder_decoder
    room, sharing = None, 1
    if budget is None:
        capacities = [message.capacity, *([message.encoded_capacity] if is_encoder_decoder else [])]
        shapes = [_shape_of(model, message.slots, capacity) for capacity in capacities]
        what = f"{message.num_groups * message.slots} queries of up to {sum(capacities)} tokens"
    else:
        assert not is_encoder_decoder, f"{message = }: an encoder's entries lie in rows"
        sharing = message.num_groups if budget.is_shared else 1
        room = Room(message.slots, message.capacity, budget.tokens, budget.unit, sharing)
        size = block_tokens(model.device)
        shapes = [_shape_of(model, room.num_blocks(size), size)]
        what = (f"{message.num_groups // sharing * shapes[0].slots} blocks of {size} tokens, as "
                "many as the schedule admits,")
    stores = message.num_groups // sharing
    num_bytes = stores * sum(shape.num_bytes for shape in shapes)
    _check_room(model, num_bytes, what)
    groups = []
    for _ in range(stores):
        pools = [BlockPool(shape, model.device, is_resident=num_bytes <= message.spare_bytes)
                 for shape in shapes]
        groups += [StageGroup(*(KvCache(pool.shape, room=room, pool=pool) for pool in pools))
                   for _ in range(sharing)]
    return groups


def _shape_of(model: Model, slots: int, capacity: int) -> KvShape:
    return kv_shape(model.spec, model.dtype, slots=slots, capacity=capacity,
                    num_layers=len(model.layers), kv_heads=model.kv_heads)


def _check_room(model: Model, num_bytes: int, what: str) -> None:
    free = free_bytes(model.device)
    if free is not None and num_bytes > free:
        raise XgptError(
            f"the KV cache of {what} takes {format_bytes(num_bytes)} of memory, and {model.device} "
            f"has {format_bytes(free)} left: {format_bytes(num_bytes - free)} are missing; shorten "
            "the longest requests (or their max_tokens), or give a smaller schedule")
