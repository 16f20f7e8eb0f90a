"""One group of queries on one stage: who sits in which slot, and the caches of their entries."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.units import format_bytes
from xrunner.comm.messages import Joined, StartMessage, StepMessage
from xrunner.devices import free_bytes, on_device
from xrunner.engine.graphs import DecodeGraphs
from xrunner.engine.kv import BlockPool, KvCache, KvShape, Room, block_tokens, kv_shape
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.ops.contexts import DecodeContext
from xrunner.query import Sampling
from xrunner.rules.slots import GroupSlots, Move


class Spoken:
    """The last stage's account of the tokens it has chosen, query by query, where the model's files
    bar a query from saying so many tokens in a row twice (`no_repeat_ngram_size`), or make what was
    said less likely (`repetition_penalty`)."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Joined, _Text]] = {}

    def minding(self, seats: Sequence[Joined], positions: Sequence[int]) -> list[Sampling]:
        """How the next token of each of these is chosen: its own way, without what would be said
        twice, and with all that was said."""
        return [self._minding(seat, position)
                for seat, position in zip(seats, positions, strict=True)]

    def _minding(self, seat: Joined, position: int) -> Sampling:
        own = seat.sampling
        if not own.needs_history:
            return own
        known = self._texts.get(seat.query)
        if known is None or known[0] is not seat:  # who was evicted brings what it had said
            known = self._texts[seat.query] = seat, _Text(own.unrepeated, own.said)
        text = known[1]
        if barred := text.barred:
            also = own.barred if own.is_barred(position) else ()
            own = replace(own, barred=(*also, *barred), barred_until=position + 1)
        return replace(own, said=tuple(text.different)) if own.is_penalised else own

    def take(self, seats: Sequence[Joined], tokens: Sequence[int]) -> None:
        """The token that each of these was given."""
        for seat, token in zip(seats, tokens, strict=True):
            if seat.query in self._texts:
                self._texts[seat.query][1].add(token)

    def keep(self, seats: Sequence[Joined]) -> None:
        """Forgets who sits in none of the group's seats."""
        if len(self._texts) > len(seats):
            here = {seat.query for seat in seats}
            self._texts = {query: own for query, own in self._texts.items() if query in here}


class _Text:
    """The tokens of one query, and what has followed each `size - 1` of them in a row."""

    def __init__(self, size: int, said: Sequence[int]) -> None:
        """`size` 0: what follows what is of no matter. `said`: the tokens that it begins with."""
        self._size, self._tokens = size, list[int]()
        self.different: dict[int, None] = {}  # each token once
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in said:
            self.add(token)

    def add(self, token: int) -> None:
        self.different[token] = None
        if not self._size:
            return
        if len(self._tokens) >= self._size - 1:
            self._followers.setdefault(self._last, []).append(token)
        self._tokens.append(token)

    @property
    def barred(self) -> Sequence[int]:
        return self._followers.get(self._last, ()) if self._size else ()

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(len(self._tokens) - self._size + 1, 0):])


FED_BACK = -1  # in an input token's place: it is the one that the query's last step gave


class LastTokens:
    """The last token of each query by slot, kept where it was chosen: on a stage that holds the
    whole model alone, the next decode step takes its inputs from there. A query whose token came
    from elsewhere (another pool, an encoder-decoder model's first) gets it from the head."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._tokens = torch.zeros(slots, dtype=torch.long, device=device)

    def fed(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """inputs [n + T], where those of the n queries that `step` decodes come first: the same
        with each FED_BACK replaced."""
        count = len(step.slots)
        if not count:
            return inputs
        told = inputs[:count]
        own = torch.where(told == FED_BACK, self._tokens[step.slots], told)
        return own if count == len(inputs) else torch.cat([own, inputs[count:]])

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """tokens [n] were given to the queries in these slots. Of one that has none, since its
        logits were no numbers, the row may be decoded on until the head hears of it."""
        tokens = tokens.long().clamp(min=0)
        first, end = slots[0], slots[0] + len(slots)
        if [*slots] == [*range(first, end)]:  # as most are
            self._tokens[first:end] = tokens
        else:
            self._tokens[on_device([*slots], tokens.device)] = tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Queries change their slots, none into one that another leaves."""
        if not moves:
            return
        sources, targets = on_device([[*side] for side in zip(*moves, strict=True)],
                                     self._tokens.device)
        self._tokens[targets] = self._tokens[sources]


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

    def adopt(self, joined: Sequence[Joined], encoded: Sequence[int] | None = None) -> None:
        """These queries, and no others, sit in the slots from now on, whole inputs cached; of an
        encoder-decoder model with so many tokens `encoded`."""
        self.slots.seats = list(joined)
        self.cache.adopt([j.input_tokens for j in joined])
        if self._encoded is not None:
            self._encoded.adopt(encoded or [])

    def join(self, joined: Sequence[Joined]) -> tuple[int, list[int]]:
        """Lets them sit down behind all, to be given their inputs' entries: the first slot, and
        how many tokens each has."""
        lengths = [j.input_tokens for j in joined]
        self.slots.fill(joined)
        if self._encoded is None:
            return self.cache.allocate(lengths), lengths
        self.cache.allocate([0] * len(lengths))
        return self._encoded.allocate(lengths), lengths

    def place(self, joined: Sequence[Joined], replaced: Sequence[int]) -> None:
        """Lets them sit down without tokens as yet, the first in the slots `replaced`."""
        self.slots.fill(joined, replaced)
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
    _check_room(model, stores * sum(shape.num_bytes for shape in shapes), what)
    groups = []
    for _ in range(stores):
        pools = [BlockPool(shape, model.device) for shape in shapes]
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
