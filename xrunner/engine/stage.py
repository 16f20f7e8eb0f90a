"""One stage: executes the steps it is told, and nothing else. It decides nothing."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xrunner.devices import settle
from xrunner.engine.graphs import Capture, DecodeGraphs, is_capturable
from xrunner.engine.group import Model, Pending, StageGroup, make_groups
from xrunner.engine.last_stage import embeddings, next_tokens, scored_tokens
from xrunner.io.beat import Beat
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.ops.likelihoods import targets_of
from xrunner.rules.steps import StepKind
from xrunner.step_record import NO_SIZES, StepRecord, StepSizes, decoded_sizes, even_input
from xrunner.threads import Threads
from xrunner.transport.courier import EntryReceiver, EntrySender
from xrunner.transport.messages import Joined, StartMessage, StepMessage

# Steps kept for the report; a longer job keeps its last ones.
_LOG_LIMIT = 200_000


class StageExecutor:
    """Applies steps to the stage's layers and caches; on the last stage, samples."""

    def __init__(self, model: Model, *, clock: Callable[[], float] = time.perf_counter,
                 check: bool = False, sender: EntrySender | None = None,
                 receiver: EntryReceiver | None = None, beat: Beat | None = None,
                 capture: Capture | None = None) -> None:
        """`check` verifies every cache after every step (tests). `sender`, `receiver`: of the
        entries that WAA's encode and decode pools hand over. `beat`: is told of every step.
        `capture`: what captures decode steps where they can be."""
        self.model, self._clock, self._check = model, clock, check
        self.threads: Threads | None = None  # of a run on a CPU: looked after, step by step
        self.sender, self.receiver, self._beat, self._capture = sender, receiver, beat, capture
        self.groups: list[StageGroup] = []
        self.log: deque[StepRecord] = deque(maxlen=_LOG_LIMIT)
        self.rows_compacted = 0
        self.busy_s = 0.0  # kept apart from the log, which forgets

    def start(self, message: StartMessage) -> None:
        """Sets up the groups' caches; before the first step."""
        self.groups = make_groups(self.model, message)
        if self._capture is not None and is_capturable(self.model):
            for group in self.groups:
                group.graphs = DecodeGraphs(self.model, group.cache.store, self._capture)
        settle(self.model.device)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Set aside for KV entries, and the most that queries had of it: each group's most, of
        which all may be at another time."""
        caches = [cache for group in self.groups for cache in group.caches]
        return sum(c.num_bytes for c in caches), sum(c.peak_bytes for c in caches)

    def close(self) -> None:
        """Returns, after the last step, when all that is handed over has been received."""
        for courier in (self.sender, self.receiver):
            if courier is not None:
                courier.close()
        if self._beat is not None:
            self._beat.stop()

    def gives_tokens(self, message: StepMessage) -> bool:
        """Whether the step ends with a token of each query: an encoder's does not."""
        return message.kind is not StepKind.ENCODE or not self.model.spec.is_encoder_decoder

    def awaits_encoded(self, group: int | None = None) -> bool:
        """Whether inputs of `group` (None: of any) were encoded, and the encoder's output has not
        come yet."""
        groups = self.groups if group is None else [self.groups[group]]
        return any(own.pending for own in groups)

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        """inputs: tokens [rows] on the first stage, hidden [rows, H] after it. Returns hidden
        [rows, H]; on the last stage the encoder's output, or the sampled tokens of the step's
        queries, [n] (None on all but the first rank of a tensor-parallel group)."""
        if self._beat is not None:
            self._beat.begin(message)
        start_s = self._clock()
        inputs, group = inputs.to(self.model.device), self.groups[message.group]
        for seat in message.freed:
            self.groups[seat.group].give_up(seat.slot)
        if message.removed:
            self.rows_compacted += group.remove(message.removed)
        if message.spans or message.resting:
            queries, out, sizes = self._mix(group, message, inputs)
        elif message.kind is StepKind.ENCODE:
            queries, out = len(message.joined), self._encode(group, message, inputs)
            sizes = StepSizes(input_tokens=even_input(
                [(0, joined.input_tokens) for joined in message.joined]))
        else:
            out = self._decode(group, message, inputs)
            queries, sizes = len(group.slots.seats), decoded_sizes(group.cache.lengths)
        self._record(message.kind.value, message, queries, len(inputs), start_s, sizes)
        return out

    @torch.inference_mode()
    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """The encoder's output [T, H] of the group's oldest encode step still without."""
        start_s, own = self._clock(), self.groups[group]
        first, lengths, message = own.pending.popleft()
        assert isinstance(self.model, EncoderDecoderStage), f"{self.model.spec.family = }"
        self.model.store_encoded(encoded.to(self.model.device), own.encoded.store, first, lengths)
        self._record("cross_kv", message, len(lengths), len(encoded), start_s)

    def _record(self, kind: str, message: StepMessage, queries: int, tokens: int,
                start_s: float, sizes: StepSizes = NO_SIZES) -> None:
        settle(self.model.device)  # else the step would end before its work does
        record = StepRecord(kind, message.group, message.phase, message.iteration, queries,
                            tokens, start_s, self._clock(), *sizes)
        self.log.append(record)
        self.busy_s += record.seconds
        if self._beat is not None:
            self._beat(record.end_s, self.busy_s,
                       sum(len(own.slots.seats) for own in self.groups), record)
        if self.threads is not None:
            self.threads.look()
        if self._check:
            self.groups[message.group].check_integrity()

    def _encode(self, group: StageGroup, message: StepMessage, inputs: Tensor) -> Tensor | None:
        first, lengths = group.join(message.joined)
        if isinstance(self.model, EncoderDecoderStage):
            return self._encode_apart(self.model, group, Pending(first, lengths, message), inputs)
        choices = [j.sampling for j in message.joined]
        # of a query that is scored every row which predicts a target is asked for
        tails = [len(c.targets) for c in choices] if choices[0].targets else ()
        pooled = choices[0].pooled
        if pooled == "mean":
            tails = lengths
        step = encode_context(whole_inputs(lengths, first), inputs.device, group.cache.room_for([]),
                              tails)
        hidden = self.model.encode(inputs, group.cache.store, step, ends_only=self.model.is_last)
        if self.sender is not None:
            self.sender.hand_over(message, group.cache, first)
        if not self.model.is_last:
            return hidden
        if pooled:
            return embeddings(self.model, hidden, pooled, lengths)
        if tails:
            return scored_tokens(self.model, hidden, choices)
        return self._sample(group, hidden, message.joined, lengths)

    def _encode_apart(self, model: EncoderDecoderStage, group: StageGroup, new: Pending,
                      inputs: Tensor) -> Tensor:
        hidden = model.encode(inputs, new.lengths)
        if not model.layers:  # the decode pool's ranks look at the encoder's output
            if self.sender is not None and model.is_last:
                self.sender.hand_over_encoded(new.message, hidden)
        elif model.is_last:
            model.store_encoded(hidden, group.encoded.store, new.first, new.lengths)
        else:
            group.pending.append(new)
        return hidden

    def _decode(self, group: StageGroup, message: StepMessage, inputs: Tensor) -> Tensor | None:
        model, cache = self.model, group.cache
        if self.receiver is not None:
            self._take_over(self.receiver, group, message)
        lengths = [length + 1 for length in cache.lengths]
        step = decode_context(lengths, None, inputs.device, cache.room_for(lengths))
        if isinstance(model, EncoderDecoderStage):
            assert not group.pending, f"{message.group = } decodes inputs that are not encoded"
            encoded = group.encoded
            across = decode_context(encoded.lengths, device=inputs.device)
            hidden = model.decode(inputs, cache.store, encoded.store, step, across)
        elif group.graphs is not None:
            hidden = group.graphs.decode(inputs, step)
        else:
            hidden = model.decode(inputs, cache.store, step)
        cache.extend()
        if not model.is_last:
            return hidden
        return self._sample(group, hidden, group.slots.seats, cache.lengths)

    def _mix(self, group: StageGroup, message: StepMessage,
             inputs: Tensor) -> tuple[int, Tensor | None, StepSizes]:
        """A step of continuous batching: who decodes, then what is encoded, in one pass. How many
        queries get a token, what `execute` returns, and what the step's time depends on."""
        model, cache, spans = self.model, group.cache, message.spans
        assert not isinstance(model, EncoderDecoderStage), f"{message.kind = }: two passes"
        taken = {*message.replaced, *message.resting}
        decoding = [] if message.kind is StepKind.ENCODE else [
            slot for slot in range(len(group.slots.seats)) if slot not in taken]
        group.place(message.joined, message.replaced)
        lengths = [cache.lengths[slot] + 1 for slot in decoding]
        cache.room_for(lengths, decoding)
        table = cache.room_for([s.first + s.tokens for s in spans], [s.slot for s in spans])
        step = decode_context(lengths, decoding, inputs.device, table) if decoding else None
        hidden = model.mixed(inputs, cache.store, step,
                             encode_context(spans, inputs.device, table) if spans else None,
                             ends_only=model.is_last)
        for slot in decoding:
            cache.grow(slot)
        sizes = decoded_sizes([cache.lengths[slot] for slot in decoding])._replace(
            input_tokens=even_input([(span.first, span.tokens) for span in spans]))
        for span in spans:
            cache.grow(span.slot, span.tokens)
        given = decoding + [span.slot for span in spans if span.is_last]
        if not model.is_last:
            return len(given), hidden, sizes
        if not given:  # an input that is encoded in part gives no token
            nothing = None if model.shard.index else torch.empty(0, dtype=torch.long)
            return 0, nothing, sizes
        seats = group.slots.seats
        tokens = self._sample(group, hidden, [seats[slot] for slot in given],
                              [cache.lengths[slot] for slot in given])
        return len(given), tokens, sizes

    def _take_over(self, receiver: EntryReceiver, group: StageGroup, message: StepMessage) -> None:
        """Takes over those who join with a decode step: another pool has encoded their inputs."""
        receiver.forget(message.ended)
        if not message.joined:
            return
        queries = [joined.query for joined in message.joined]
        first, lengths = group.join(message.joined)
        if isinstance(self.model, EncoderDecoderStage):
            encoded = receiver.encoded(queries).to(self.model.device)
            self.model.store_encoded(encoded, group.encoded.store, first, lengths)
            return
        for slot, query in enumerate(queries, start=first):
            receiver.put_into(group.cache, slot, query)

    def _sample(self, group: StageGroup, hidden: Tensor, seats: Sequence[Joined],
                positions: Sequence[int]) -> Tensor | None:
        """The next token of each of these of the group's queries."""
        model, choices = self.model, [seat.sampling for seat in seats]
        if not any(choice.minds_said for choice in choices):
            return next_tokens(model, hidden, choices, positions)
        spoken = group.spoken
        tokens = next_tokens(model, hidden, spoken.minding(seats, positions), positions)
        # every rank of a tensor-parallel group minds the tokens of its share of the vocabulary
        chosen = targets_of(None if tokens is None else tokens[:len(seats)], len(seats),
                            model.shard, hidden.device)
        spoken.take(seats, chosen.tolist())
        spoken.keep(group.slots.seats)
        return tokens
