"""One stage, which executes the steps it receives and decides nothing. The last stage returns a
token of each request with what was asked for beside it: log-likelihoods, scores of targets, or
embeddings."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from xrunner.comm.handover import EntryReceiver, EntrySender
from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.devices import Arriving, on_device, synchronize, to_host
from xrunner.engine.graphs import Capture, capture_steps
from xrunner.engine.group import LastTokens, Model, PendingInputs, StageGroup, make_groups
from xrunner.engine.pipeline import Executor
from xrunner.engine.step_log import StepLog
from xrunner.files.forms import Forms
from xrunner.files.heartbeat import Heartbeat
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.offload.placed_stage import PlacedStage
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.ops.likelihoods import likelihoods, packed, targets_of
from xrunner.ops.output_head import WholeScores
from xrunner.ops.sampling import NOT_FINITE, sample_shards, unless_finite, with_fixed
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind
from xrunner.step_record import NO_SIZES, StepRecord, StepSizes, decoded_sizes, equal_input_tokens


class StageExecutor(Executor):
    """Applies steps to the stage's layers and caches; on the last stage, samples."""

    def __init__(self, model: Model, *, clock: Callable[[], float] = time.perf_counter,
                 sender: EntrySender | None = None, receiver: EntryReceiver | None = None,
                 heartbeat: Heartbeat | None = None, capture: Capture | None = None,
                 forms: Forms | None = None) -> None:
        """`sender`, `receiver`: of the KV that WAA's pools hand over. `heartbeat`: progress file.
        `capture`: captures decode steps (None: nothing is captured). `forms`: of the model's
        answers (None: they have none)."""
        self.model = model
        self.records, self.heartbeat = StepLog(model.device, clock, heartbeat), heartbeat
        self.log = self.records.steps
        self._is_whole = model.is_first and model.is_last  # no other stage has a part in a step
        # only the first rank of a tensor-parallel group has the tokens
        self.keeps_tokens = self._is_whole and model.shard.degree == 1
        self.returns_early = model.device.type != "cpu"
        self.sender, self.receiver, self._capture = sender, receiver, capture
        self._forms = forms
        self.groups: list[StageGroup] = []
        self.graphs_said: str | None = None  # which steps are captured, or why none are, in a line
        self.rows_compacted = 0

    def start(self, message: StartMessage) -> None:
        self.groups = make_groups(self.model, message)
        for group in self.groups:
            group.history.forms = self._forms
        if self._capture is not None:
            graphs, self.graphs_said = capture_steps(
                self.model, [group.cache for group in self.groups], message.slots, self._capture)
            for group, own in zip(self.groups, graphs, strict=True):
                group.graphs = own
        if self.keeps_tokens:
            for group in self.groups:
                group.last_tokens = LastTokens(self.model.device, message.slots)
        synchronize(self.model.device)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes set aside for KV, and the sum of each group's peak, which need not coincide."""
        caches = [cache for group in self.groups for cache in group.caches]
        return sum(c.num_bytes for c in caches), sum(c.peak_bytes for c in caches)

    def close(self) -> None:
        """Waits, after the last step, until everything handed over has been received."""
        for courier in (self.sender, self.receiver):
            if courier is not None:
                courier.close()
        if isinstance(self.model, PlacedStage):
            self.model.end([group.cache for group in self.groups])
        self.records.close()

    def gives_tokens(self, message: StepMessage) -> bool:
        return message.kind is not StepKind.ENCODE or not self.model.spec.is_encoder_decoder

    def awaits_encoded(self, group: int | None = None) -> bool:
        groups = self.groups if group is None else [self.groups[group]]
        return any(own.pending for own in groups)

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | Arriving | None:
        """Executes a step; its input is tokens [rows] on the first stage, else hidden [rows, H].

        Returns hidden [rows, H] or, on the last stage, the encoder's output or sampled tokens [n].
        Tokens are None on all but the first rank of a tensor-parallel group. The result lies in
        host memory; tokens of a pool's only stage may be on their way."""
        self.records.begin(message)
        inputs, group = on_device(inputs, self.model.device), self.groups[message.group]
        for seat in message.freed:
            self.groups[seat.group].cache.give_up(seat.slot)
        group.cache.pool.release(message.released)
        if message.removed:
            self.rows_compacted += group.remove(message.removed)
        step = self._apart if isinstance(self.model, EncoderDecoderStage) else self._together
        queries, out, sizes = step(group, message, inputs)
        self._record(message.kind.value, message, queries, len(inputs), sizes)
        if out is not None and self._is_whole and self.model.is_last and self.gives_tokens(message):
            return Arriving(out, self.records.look)  # the head waits when it must
        if out is not None and not self._is_whole:
            out = to_host(out)  # others receive it
        self.records.wait()
        return out

    @torch.inference_mode()
    def take_encoded(self, group: int, encoded: Tensor) -> None:
        self.records.begin()
        own = self.groups[group]
        first, lengths, message = own.pending.popleft()
        assert isinstance(self.model, EncoderDecoderStage), f"{self.model.spec.family = }"
        self.model.store_encoded(on_device(encoded, self.model.device), own.encoded.layers,
                                 first, lengths)
        self._record("cross_kv", message, len(lengths), len(encoded))
        self.records.wait()

    def _record(self, kind: str, message: StepMessage, queries: int, tokens: int,
                sizes: StepSizes = NO_SIZES) -> None:
        self.records.end(StepRecord(kind, message.group, message.phase, message.iteration,
                                    queries, tokens, 0.0, 0.0, *sizes),
                         sum(len(own.slots.seats) for own in self.groups))

    def _together(self, group: StageGroup, message: StepMessage,
                  inputs: Tensor) -> tuple[int, Tensor | None, StepSizes]:
        """Executes a decoder-only model's step: decoding and encoding in one pass. Decoding rows
        come first. Returns the number of requests that get a token, the output of `execute`, and
        the step's sizes."""
        model, cache, first = self.model, group.cache, len(group.slots.seats)
        assert isinstance(model, StageModel), f"{model.spec.family = }"
        begun, is_encoding = _seat(group, message, self.receiver), message.kind is StepKind.ENCODE
        resting, spans = {*message.resting, *begun}, [*message.spans]
        if is_encoding and not spans:
            spans = whole_inputs([joined.input_tokens for joined in message.joined], first)
        decoding = [] if is_encoding else [
            slot for slot in range(len(group.slots.seats)) if slot not in resting]
        lengths = [cache.lengths[slot] + 1 for slot in decoding]
        table = cache.room_for([*lengths, *(span.first + span.tokens for span in spans)],
                               [*decoding, *(span.slot for span in spans)])
        # scored or embedded requests are encoded to their ends, and together
        choices = [group.slots.seats[span.slot].sampling for span in spans] if is_encoding else []
        pooled, tokens = choices[0].pooled if choices else "", [span.tokens for span in spans]
        tails = tokens if pooled == "mean" else [len(choice.targets) for choice in choices]
        step = decode_context(lengths, decoding if resting else None, inputs.device,
                              table) if decoding else None
        encoded = encode_context(spans, inputs.device, table,
                                 tails if any(tails) else ()) if spans else None
        if step is not None and group.last_tokens is not None:
            inputs = group.last_tokens.fed(inputs, step)
        if isinstance(model, PlacedStage):
            hidden = model.in_pieces(inputs, cache, spans, tails if any(tails) else ())
        elif step is not None and encoded is None and group.graphs is not None:
            hidden = group.graphs.decode(inputs, step)
        else:
            hidden = model.mixed(inputs, cache.layers, step, encoded, ends_only=model.is_last)
        for slot in decoding:
            cache.grow(slot)
        for span in spans:
            cache.grow(span.slot, span.tokens)
        if self.sender is not None:
            self.sender.hand_over(message, cache, first)
        sizes = decoded_sizes(lengths)._replace(
            input_tokens=equal_input_tokens([(span.first, span.tokens) for span in spans]))
        given = [*decoding, *(span.slot for span in spans if span.is_last)]
        out: Tensor | None = hidden
        if model.is_last and pooled:
            out = embeddings(model, hidden, pooled, tokens)
        elif model.is_last and any(tails):
            out = scored_tokens(model, hidden, choices)
        elif model.is_last and given:
            out = _sample(model, group, hidden, given, [cache.lengths[slot] for slot in given])
        elif model.is_last:  # a partly encoded input yields no token
            out = None if model.shard.index else torch.empty(0, dtype=torch.long)
        return len(given), out, sizes

    def _apart(self, group: StageGroup, message: StepMessage,
               inputs: Tensor) -> tuple[int, Tensor | None, StepSizes]:
        """Executes an encoder-decoder model's step, which encodes whole inputs or decodes. Returns
        the same as `_together`."""
        model, joined = self.model, message.joined
        assert isinstance(model, EncoderDecoderStage), f"{model.spec.family = }"
        assert not message.spans, f"{message.kind = }: two passes"
        if message.kind is StepKind.ENCODE:
            new = PendingInputs(*group.join(joined), message)
            return len(joined), self._encoded(model, group, new, inputs), StepSizes(
                input_tokens=equal_input_tokens([(0, tokens) for tokens in new.lengths]))
        if self.receiver is not None:  # another pool has encoded the inputs
            self.receiver.forget(message.ended)
            if joined:
                encoded = self.receiver.encoded([one.query for one in joined])
                model.store_encoded(on_device(encoded, model.device), group.encoded.layers,
                                    *group.join(joined))
        assert not group.pending, f"{message.group = } decodes inputs that are not encoded"
        lengths = [length + 1 for length in group.cache.lengths]
        step = decode_context(lengths, None, inputs.device)
        if group.last_tokens is not None:
            inputs = group.last_tokens.fed(inputs, step)
        across = decode_context(group.encoded.lengths, device=inputs.device)
        out: Tensor | None = model.decode(inputs, group.cache.layers, group.encoded.layers, step,
                                          across)
        for slot in range(len(lengths)):
            group.cache.grow(slot)
        if model.is_last and out is not None:
            out = _sample(model, group, out, range(len(lengths)), lengths)
        return len(lengths), out, decoded_sizes(lengths)

    def _encoded(self, model: EncoderDecoderStage, group: StageGroup, new: PendingInputs,
                 inputs: Tensor) -> Tensor:
        hidden = model.encode(inputs, new.lengths)
        if not model.layers:  # the decode pool's ranks read the encoder's output
            if self.sender is not None and model.is_last:
                self.sender.hand_over_encoded(new.message, hidden)
        elif model.is_last:
            model.store_encoded(hidden, group.encoded.layers, new.first, new.lengths)
        else:
            group.pending.append(new)
        return hidden


def _sample(model: Model, group: StageGroup, hidden: Tensor, slots: Sequence[int],
            positions: Sequence[int]) -> Tensor | None:
    """Next tokens of the requests in these slots, as `next_tokens` returns them."""
    tokens = tokens_of_slots(model, group, hidden, slots, positions)
    if tokens is not None and group.last_tokens is not None:
        group.last_tokens.keep(slots, tokens[:len(slots)])
    return tokens


def _seat(group: StageGroup, message: StepMessage, receiver: EntryReceiver | None) -> list[int]:
    """Seats joining requests and takes over KV handed over; returns the slots without tokens."""
    behind = len(group.slots.seats)
    group.seat(message.joined, message.replaced)
    slots = [*message.replaced, *range(behind, len(group.slots.seats))]
    if receiver is not None:
        receiver.forget(message.ended)
    begun = []
    for slot, joined in zip(slots, message.joined, strict=True):
        if not joined.is_handed:
            begun.append(slot)
            continue
        assert receiver is not None, f"{joined = }: from nobody"
        group.cache.room_for([joined.input_tokens], [slot])
        group.cache.grow(slot, joined.input_tokens)
        receiver.put_into(group.cache, slot, joined.query)
    return begun


def tokens_of_slots(model: Model, group: StageGroup, hidden: Tensor, slots: Sequence[int],
                    positions: Sequence[int]) -> Tensor | None:
    """Next tokens of the requests in these slots, as `next_tokens` returns them. `hidden`: [n, H],
    the row of each request that predicts its next token."""
    seats = [group.slots.seats[slot] for slot in slots]
    choices = [seat.sampling for seat in seats]
    if not any(choice.needs_history for choice in choices):
        return next_tokens(model, hidden, choices, positions)
    history = group.history
    tokens = next_tokens(model, hidden, history.with_history(seats, positions), positions)
    # each rank of a tensor-parallel group bars tokens of its share of the vocabulary
    chosen = targets_of(None if tokens is None else tokens[:len(seats)], len(seats),
                        model.shard, hidden.device)
    history.take(seats, chosen.long().tolist())
    history.keep(group.slots.seats)
    return tokens


def next_tokens(model: Model, hidden: Tensor, choices: Sequence[Sampling],
                positions: Sequence[int]) -> Tensor | None:
    """Samples tokens [n] int64 from hidden [n, H], a row of each request. Packed with
    log-likelihoods where these are asked for (xrunner.ops.likelihoods.packed). None on all but the
    first rank of a tensor-parallel group."""
    scores, shard, vocab_size = model.scores(hidden), model.shard, model.spec.vocab_size
    rows = [row for row, choice in enumerate(choices) if choice.top_logprobs is not None]
    if rows:
        scores = WholeScores(scores.of(range(len(hidden))))  # computed once for both uses
    tokens = sample_shards(scores, choices, positions, shard, vocab_size)
    if tokens is not None:
        tokens = unless_finite(with_fixed(tokens, choices, positions), hidden)
    if not rows:
        return tokens
    tops = [choices[row].top_logprobs or 0 for row in rows]
    most = max(tops)
    chosen = targets_of(tokens, len(choices), shard, hidden.device)
    values = likelihoods(scores, rows, chosen[on_device(rows, chosen.device)], most, shard,
                         vocab_size)
    if tokens is None or values is None:
        return None
    told: list[Tensor | None] = [None] * len(choices)
    for row, top, value in zip(rows, tops, values, strict=True):
        told[row] = torch.cat([value[:1 + top], value[1 + most:1 + most + top]])[None]
    return packed(tokens, told)


def scored_tokens(model: Model, hidden: Tensor, choices: Sequence[Sampling]) -> Tensor | None:
    """Log-likelihoods of the requests' targets, from hidden [T, H], a row of each target. Returns
    the likeliest token after each input, packed with each target's log-likelihood and the likeliest
    token in its place. None on all but the first rank of a tensor-parallel group."""
    counts = [len(choice.targets) for choice in choices]
    assert all(counts) and sum(counts) == len(hidden), f"{counts = } {hidden.shape = }"
    targets = torch.tensor([token for choice in choices for token in choice.targets])
    values = likelihoods(model.scores(hidden), range(len(targets)), targets, 1, model.shard,
                         model.spec.vocab_size)
    if values is None:
        return None
    ends = on_device([*accumulate(counts)], values.device) - 1
    # non-finite rows: up to each request's end, then among its own
    bad = on_device((~hidden.isfinite()).any(dim=1), values.device).cumsum(dim=0)[ends]
    is_none = bad.diff(prepend=bad.new_zeros(1)) > 0
    tokens = values[ends, 1].long().masked_fill(is_none, NOT_FINITE)
    return packed(tokens, torch.split(values, counts))


def embeddings(model: StageModel, hidden: Tensor, pooled: str,
               lengths: Sequence[int]) -> Tensor | None:
    """A placeholder token of each request, packed with its embedding [H]. `hidden`: with pooled
    "mean" all rows [T, H], `lengths` of each request; else the last rows [n, H]. None on all but
    the first rank of a tensor-parallel group."""
    if model.shard.index:
        return None
    rows = model.normed(hidden).float()
    if pooled == "mean":
        rows = torch.stack([own.mean(dim=0) for own in torch.split(rows, list(lengths))])
    tokens = unless_finite(torch.zeros(len(rows), dtype=torch.long, device=rows.device), rows)
    return packed(tokens, list(rows))
