"""One stage: executes the steps it is told, and nothing else. It decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.devices import settle
from xrunner.engine.kv import KvCache, cache_bytes
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.ops.attention import Span, cross_context, decode_context, decode_context_of
from xrunner.ops.sampling import sample_shards
from xrunner.query import Sampling
from xrunner.rules.compaction import apply_moves
from xrunner.rules.steps import StepKind
from xrunner.transport.courier import EntryReceiver, EntrySender
from xrunner.transport.messages import StartMessage, StepMessage

# Steps kept for the report; a longer job keeps its last ones.
_LOG_LIMIT = 200_000


class StepRecord(NamedTuple):
    """One executed step, times in seconds since the run's common start."""

    kind: str
    group: int
    phase: int
    iteration: int
    queries: int
    tokens: int
    start_s: float
    end_s: float


class _Pending(NamedTuple):
    """Inputs whose encoder output has not come yet, in slots from `first` on."""

    first: int
    lengths: list[int]
    message: StepMessage


class StageExecutor:
    """Applies steps to the stage's layers and caches; on the last stage, samples."""

    def __init__(self, model: StageModel | EncoderDecoderStage, *,
                 clock: Callable[[], float] = time.perf_counter, check: bool = False,
                 sender: EntrySender | None = None, receiver: EntryReceiver | None = None) -> None:
        """`check` verifies every cache after every step (tests). `sender`, `receiver`: of the
        entries that WAA's encode and decode pools hand over."""
        self.model, self._clock, self._check = model, clock, check
        self.sender, self.receiver = sender, receiver
        self.caches: list[KvCache] = []  # by group
        self.encoded: list[KvCache] = []  # by group, of the inputs: encoder-decoder models only
        self._pending: list[deque[_Pending]] = []  # by group
        self._sampling: list[list[Sampling]] = []  # by group, then slot
        self.log: deque[StepRecord] = deque(maxlen=_LOG_LIMIT)
        self.rows_compacted = 0
        self.busy_s = 0.0  # kept apart from the log, which forgets

    def start(self, message: StartMessage) -> None:
        """Sets up the groups' caches; before the first step."""
        is_resident = self._cache_bytes(message) <= message.spare_bytes
        groups = range(message.num_groups)
        self.caches = [self._cache(message, message.capacity, is_resident) for _ in groups]
        if self.model.spec.is_encoder_decoder:
            self.encoded = [self._cache(message, message.encoded_capacity, is_resident)
                            for _ in groups]
        self._pending = [deque() for _ in groups]
        self._sampling = [[] for _ in groups]
        settle(self.model.device)

    def adopt(self, group: int, choices: Sequence[Sampling]) -> None:
        """How the queries in the group's cache are sampled, by slot, where they were put there
        by other means than an encode step of this stage."""
        self._sampling[group] = list(choices)

    def close(self) -> None:
        """After the last step: returns when all that is to be handed over has been received."""
        for courier in (self.sender, self.receiver):
            if courier is not None:
                courier.close()

    def gives_tokens(self, message: StepMessage) -> bool:
        """Whether the step ends with a token of each query: an encoder's does not."""
        return message.kind is not StepKind.ENCODE or not self.model.spec.is_encoder_decoder

    def awaits_encoded(self, group: int | None = None) -> bool:
        """Whether inputs of `group` (None: of any) were encoded, and the encoder's output has not
        come yet."""
        return any(self._pending) if group is None else bool(self._pending[group])

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        """inputs: tokens [rows] on the first stage, hidden [rows, H] after it. Returns hidden
        [rows, H]; on the last stage the encoder's output, or the sampled tokens of the step's
        queries, [n] (None on all but the first rank of a tensor-parallel group)."""
        start_s = self._clock()
        inputs = inputs.to(self.model.device)
        self._remove(message)
        is_encode = message.kind is StepKind.ENCODE
        if message.parts or message.resting:
            queries, out = self._mix(message, inputs)
        else:
            out = (self._encode if is_encode else self._decode)(message, inputs)
            queries = len(message.joined) if is_encode else self.caches[message.group].num_active
        self._record(message.kind.value, message, queries, len(inputs), start_s)
        return out

    @torch.inference_mode()
    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """The encoder's output [T, H] of the group's oldest encode step still without."""
        start_s = self._clock()
        first, lengths, message = self._pending[group].popleft()
        assert isinstance(self.model, EncoderDecoderStage), f"{self.model.spec.family = }"
        self.model.store_encoded(encoded.to(self.model.device), self.encoded[group].store, first,
                                 lengths)
        self._record("cross_kv", message, len(lengths), len(encoded), start_s)

    def _record(self, kind: str, message: StepMessage, queries: int, tokens: int,
                start_s: float) -> None:
        settle(self.model.device)  # else the step would end before its work does
        self.log.append(StepRecord(kind, message.group, message.phase, message.iteration, queries,
                                   tokens, start_s, self._clock()))
        self.busy_s += self.log[-1].end_s - start_s
        if self._check:
            self._check_integrity(message.group)

    def _check_integrity(self, group: int) -> None:
        if not self.encoded:
            self.caches[group].check_integrity()
            return
        own, encoded = self.caches[group], self.encoded[group]
        own.check_integrity(least=0)  # an input leaves nothing there
        encoded.check_integrity()
        assert own.queries == encoded.queries, f"{own.queries = } {encoded.queries = }"

    def _remove(self, message: StepMessage) -> None:
        if not message.removed:
            return
        group = message.group
        assert not self._pending[group], f"{group = }: slots move that are still to be filled"
        self.rows_compacted += self.caches[group].free(message.removed)
        if self.encoded:
            self.encoded[group].free(message.removed)
        kept = apply_moves(list(range(len(self._sampling[group]))), message.removed)
        self._sampling[group] = [self._sampling[group][i] for i in kept]

    def _encode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        group, joined = message.group, message.joined
        queries, lengths = [j.query for j in joined], [j.input_tokens for j in joined]
        choices = [j.sampling for j in joined]
        self._sampling[group] += choices
        if isinstance(self.model, EncoderDecoderStage):
            return self._encode_apart(self.model, message, queries, lengths, inputs)
        cache = self.caches[group]
        first = cache.allocate(queries, lengths)
        hidden = self.model.encode(inputs, cache.store, first, lengths)
        if self.sender is not None:
            self.sender.hand_over(message, cache, first)
        if not self.model.is_last:
            return hidden
        # only an input's last token predicts the next
        ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        return self._sample(hidden[ends], choices, lengths)

    def _encode_apart(self, model: EncoderDecoderStage, message: StepMessage,
                      queries: list[int], lengths: list[int], inputs: Tensor) -> Tensor:
        group = message.group
        self.caches[group].allocate(queries, [0] * len(queries))
        first = self.encoded[group].allocate(queries, lengths)
        hidden = model.encode(inputs, lengths)
        if not model.layers:  # the decode pool's ranks look at the encoder's output
            if self.sender is not None and model.is_last:
                self.sender.hand_over_encoded(message, hidden)
        elif model.is_last:
            model.store_encoded(hidden, self.encoded[group].store, first, lengths)
        else:
            self._pending[group].append(_Pending(first, lengths, message))
        return hidden

    def _decode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        group, model = message.group, self.model
        cache = self.caches[group]
        if self.receiver is not None:
            self._take_over(self.receiver, message)
        step = decode_context(torch.tensor(cache.lengths, device=inputs.device), model.dtype)
        if isinstance(model, EncoderDecoderStage):
            assert not self._pending[group], f"{group = } decodes inputs that are not encoded"
            encoded = self.encoded[group]
            across = cross_context(torch.tensor(encoded.lengths, device=inputs.device),
                                   model.dtype)
            hidden = model.decode(inputs, cache.store, encoded.store, step, across)
        else:
            hidden = model.decode(inputs, cache.store, step)
        cache.extend()
        if not model.is_last:
            return hidden
        return self._sample(hidden, self._sampling[group], cache.lengths)

    def _mix(self, message: StepMessage, inputs: Tensor) -> tuple[int, Tensor | None]:
        """A step of continuous batching: who decodes, then what is encoded, in one pass. How many
        queries get a token, and what `execute` returns."""
        group, model, joined = message.group, self.model, message.joined
        assert not isinstance(model, EncoderDecoderStage), f"{message.kind = }: two passes"
        cache, choices = self.caches[group], self._sampling[group]
        taken = {*message.replaced, *message.resting}
        decoding = [] if message.kind is StepKind.ENCODE else [
            slot for slot in range(cache.num_active) if slot not in taken]
        cache.place([j.query for j in joined], message.replaced)
        for slot, j in zip(message.replaced, joined, strict=False):
            choices[slot] = j.sampling
        choices += [j.sampling for j in joined[len(message.replaced):]]
        step = decode_context_of(decoding, cache.lengths, model.dtype,
                                 inputs.device) if decoding else None
        hidden = model.mixed(inputs, cache.store, step, [Span(*p[:3]) for p in message.parts])
        for slot in decoding:
            cache.grow(slot)
        for part in message.parts:
            cache.grow(part.slot, part.tokens)
        given = decoding + [part.slot for part in message.parts if part.is_last]
        if not model.is_last:
            return len(given), hidden
        ends = torch.tensor([part.tokens for part in message.parts], dtype=torch.long).cumsum(0)
        ends = ends[[part.is_last for part in message.parts]] + len(decoding) - 1
        rows = torch.cat([torch.arange(len(decoding)), ends]).to(hidden.device)
        if not given:  # an input that is encoded in part gives no token
            return 0, None if model.shard.index else rows
        return len(given), self._sample(hidden[rows], [choices[slot] for slot in given],
                                        [cache.lengths[slot] for slot in given])

    def _take_over(self, receiver: EntryReceiver, message: StepMessage) -> None:
        """Those who join with a decode step, whose inputs another pool has encoded."""
        receiver.forget(message.ended)
        if not message.joined:
            return
        group, model = message.group, self.model
        queries = [joined.query for joined in message.joined]
        lengths = [joined.input_tokens for joined in message.joined]
        self._sampling[group] += [joined.sampling for joined in message.joined]
        if isinstance(model, EncoderDecoderStage):
            self.caches[group].allocate(queries, [0] * len(queries))
            first = self.encoded[group].allocate(queries, lengths)
            encoded = receiver.encoded(queries).to(model.device)
            model.store_encoded(encoded, self.encoded[group].store, first, lengths)
            return
        first = self.caches[group].allocate(queries, lengths)
        for slot, query in enumerate(queries, start=first):
            receiver.put_into(self.caches[group], slot, query)

    def _sample(self, hidden: Tensor, choices: Sequence[Sampling],
                positions: Sequence[int]) -> Tensor | None:
        model = self.model
        return sample_shards(model.logits(hidden), choices, positions, model.shard,
                             model.spec.vocab_size)

    def _cache(self, message: StartMessage, capacity: int, is_resident: bool) -> KvCache:
        model = self.model
        return KvCache(model.spec, len(model.layers), model.dtype, slots=message.slots,
                       capacity=capacity, kv_heads=model.kv_heads, is_resident=is_resident,
                       device=model.device)

    def _cache_bytes(self, message: StartMessage) -> int:
        """Of all groups' caches."""
        model = self.model
        return message.num_groups * cache_bytes(
            model.spec, len(model.layers), model.dtype, slots=message.slots,
            capacity=message.capacity + message.encoded_capacity, kv_heads=model.kv_heads)
