"""A group of requests on one stage: their slots, KV caches and, on the last stage, tokens."""

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
from xrunner.files.forms import Forms, Matcher
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.offload.placed_cache import placed_caches
from xrunner.offload.placed_stage import PlacedStage
from xrunner.ops.contexts import DecodeContext
from xrunner.query import Sampling
from xrunner.rules.slots import GroupSlots, Move


class TokenHistory:
    """Tokens that occurred in each request, for three sampling rules of the last stage. They are
    `no_repeat_ngram_size` and `repetition_penalty` of the model's files, and the form of an
    answer."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Joined, _History]] = {}
        self.forms: Forms | None = None  # of the model's answers

    def with_history(self, seats: Sequence[Joined], positions: Sequence[int]) -> list[Sampling]:
        """Sampling of each request's next token, by what occurred so far. Tokens that would repeat
        a sequence are barred, those that the form allows are in `allowed`, and with a repetition
        penalty `history` holds all that occurred."""
        return [self._with_history(seat, position)
                for seat, position in zip(seats, positions, strict=True)]

    def _with_history(self, seat: Joined, position: int) -> Sampling:
        own = seat.sampling
        if not own.needs_history:
            return own
        known = self._texts.get(seat.query)
        if known is None or known[0] is not seat:  # evicted requests bring their tokens
            known = self._texts[seat.query] = seat, _History(
                own.no_repeat_size, own.history, self._matcher_of(own))
        text = known[1]
        if text.matcher is not None:
            own = replace(own, allowed=text.matcher.allowed)
        if barred := text.barred:
            also = own.barred if own.is_barred(position) else ()
            own = replace(own, barred=(*also, *barred), barred_until=position + 1)
        return replace(own, history=tuple(text.different)) if own.is_penalised else own

    def _matcher_of(self, own: Sampling) -> Matcher | None:
        if not own.passed:
            return None
        assert self.forms is not None, f"{own.passed = } for a stage without a tokenizer"
        return self.forms.matcher(own.passed, own.written)

    def take(self, seats: Sequence[Joined], tokens: Sequence[int]) -> None:
        """Records the new token of each request."""
        for seat, token in zip(seats, tokens, strict=True):
            if seat.query in self._texts:
                self._texts[seat.query][1].add(token)

    def keep(self, seats: Sequence[Joined]) -> None:
        """Forgets requests that are not in the group's seats."""
        if len(self._texts) > len(seats):
            here = {seat.query for seat in seats}
            self._texts = {query: own for query, own in self._texts.items() if query in here}


class _History:
    """Tokens of one request, and which tokens followed each sequence of `size - 1` of them."""

    def __init__(self, size: int, history: Sequence[int], matcher: Matcher | None = None) -> None:
        """`size`: 0 if followers are not needed. `history`: tokens it starts with. `matcher`: of
        the answer's form, if any, after its output so far."""
        self._size, self._tokens = size, list[int]()
        self.matcher: Matcher | None = None
        self.different: dict[int, None] = {}  # each token once, in order
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in history:
            self.add(token)
        self.matcher = matcher  # which knows these tokens already

    def add(self, token: int) -> None:
        if self.matcher is not None and token >= 0:  # below 0: the logits were not finite
            self.matcher.add([token])
        self.different[token] = None
        if not self._size:
            return
        if len(self._tokens) >= self._size - 1:
            self._followers.setdefault(self._last, []).append(token)
        self._tokens.append(token)

    @property
    def barred(self) -> Sequence[int]:
        """Tokens that would repeat a sequence of `size` tokens."""
        return self._followers.get(self._last, ()) if self._size else ()

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(len(self._tokens) - self._size + 1, 0):])


FED_BACK = -1  # stands for an input token: the output of the request's last step


class LastTokens:
    """Each request's last token by slot, kept on the device for the next decode step. Used by a
    stage that holds the whole model alone. Where the token came from elsewhere (another pool, an
    encoder-decoder model's start), the head sends it."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._tokens = torch.zeros(slots, dtype=torch.long, device=device)

    def fed(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """Replaces each FED_BACK in `inputs` [n + T] by the last token of its request. The first n
        inputs are those of the requests that `step` decodes."""
        count = len(step.slots)
        if not count:
            return inputs
        told = inputs[:count]
        own = torch.where(told == FED_BACK, self._tokens[step.slots], told)
        return own if count == len(inputs) else torch.cat([own, inputs[count:]])

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Stores the new tokens [n] of the requests in these slots. A row without a finite token
        may be decoded on until the head hears of it; it gets token 0."""
        tokens = tokens.long().clamp(min=0)
        first, end = slots[0], slots[0] + len(slots)
        if [*slots] == [*range(first, end)]:  # the usual case: contiguous slots
            self._tokens[first:end] = tokens
        else:
            self._tokens[on_device([*slots], tokens.device)] = tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Moves tokens along with their requests' slots; no target is also a source."""
        if not moves:
            return
        sources, targets = on_device([[*side] for side in zip(*moves, strict=True)],
                                     self._tokens.device)
        self._tokens[targets] = self._tokens[sources]


Model = StageModel | EncoderDecoderStage


class PendingInputs(NamedTuple):
    """Inputs whose encoder output has not arrived, in slots from `first` on."""

    first: int
    lengths: list[int]
    message: StepMessage


class StageGroup:
    """A group's slots and caches on one stage. `cache`: KV of the tokens so far. `encoded`: KV of
    the inputs of an encoder-decoder model. `graphs`: captured decode steps, if any. `last_tokens`:
    set if the stage keeps them."""

    def __init__(self, cache: KvCache, encoded: KvCache | None = None) -> None:
        self.slots = GroupSlots[Joined]()
        self.cache, self._encoded = cache, encoded
        self.pending: deque[PendingInputs] = deque()
        self.graphs: DecodeGraphs | None = None
        self.last_tokens: LastTokens | None = None
        self.history = TokenHistory()

    @property
    def encoded(self) -> KvCache:
        assert self._encoded is not None, "a decoder-only model has no encoder"
        return self._encoded

    @property
    def caches(self) -> list[KvCache]:
        return [self.cache] if self._encoded is None else [self.cache, self._encoded]

    def adopt(self, joined: Sequence[Joined], encoded: Sequence[int] | None = None) -> None:
        """Replaces the group's requests by `joined`, whole inputs cached. `encoded`: input tokens
        of each, of an encoder-decoder model."""
        self.slots.seats = list(joined)
        self.cache.adopt([j.input_tokens for j in joined])
        if self._encoded is not None:
            self._encoded.adopt(encoded or [])

    def join(self, joined: Sequence[Joined]) -> tuple[int, list[int]]:
        """Appends requests and allocates their inputs' KV; returns (first slot, input tokens of
        each)."""
        lengths = [j.input_tokens for j in joined]
        self.slots.fill(joined)
        if self._encoded is None:
            return self.cache.allocate(lengths), lengths
        self.cache.allocate([0] * len(lengths))
        return self._encoded.allocate(lengths), lengths

    def seat(self, joined: Sequence[Joined], replaced: Sequence[int]) -> None:
        """Seats requests, the first of them in the slots `replaced`. No tokens are cached but those
        that they share."""
        behind = self.slots.fill(joined, replaced)
        self.cache.seat(len(joined), replaced)
        seated = [*replaced, *range(behind, len(self.slots.seats))]
        for slot, seat in zip(seated, joined, strict=True):
            if seat.start is not None:
                self.cache.share(slot, seat.start)

    def remove(self, removed: Sequence[int]) -> int:
        """Removes slots and makes the others contiguous; returns the number of cache rows
        copied."""
        assert not self.pending, f"{removed = }: slots move that are still to be filled"
        moves = self.slots.compact(removed)
        if self.last_tokens is not None:
            self.last_tokens.move(moves)
        if self._encoded is not None:
            self._encoded.free(removed)
        return self.cache.free(removed)


def make_groups(model: Model, message: StartMessage) -> list[StageGroup]:
    """Groups of a stage, with caches of the sizes in `message`. Raises XgptError, before any memory
    is taken, if the device has too little left."""
    budget, is_encoder_decoder = message.budget, model.spec.is_encoder_decoder
    if isinstance(model, PlacedStage):
        assert budget is None, f"{message = }: entries on tiers lie in rows"
        shape = _shape_of(model, message.slots, message.capacity)
        return [StageGroup(cache) for cache in placed_caches(message.num_groups, shape,
                                                             model.tiers)]
    room, sharing = None, 1
    if budget is None:
        capacities = [message.capacity, *([message.encoded_capacity] if is_encoder_decoder else [])]
        shapes = [_shape_of(model, message.slots, capacity) for capacity in capacities]
        what = f"{message.num_groups * message.slots} requests of up to {sum(capacities)} tokens"
    else:
        assert not is_encoder_decoder, f"{message = }: an encoder's entries lie in rows"
        sharing = message.num_groups if budget.is_shared else 1
        room = Room(message.slots, message.capacity, budget.tokens, budget.unit, sharing,
                    budget.prefixes)
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
