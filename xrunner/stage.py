"""One stage: executes the steps it is told, and nothing else. It decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.kv import KvCache, cache_bytes
from xrunner.messages import StartMessage, StepMessage
from xrunner.models.attention import decode_context
from xrunner.models.stage_model import StageModel
from xrunner.rules.compaction import apply_moves
from xrunner.rules.steps import StepKind
from xrunner.sampling import Sampling, sample

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


class StageExecutor:
    """Applies steps to the stage's layers and caches; on the last stage, samples."""

    def __init__(self, model: StageModel, *, clock: Callable[[], float] = time.perf_counter,
                 check: bool = False) -> None:
        """`check` verifies every cache after every step (tests)."""
        self.model, self._clock, self._check = model, clock, check
        self.caches: list[KvCache] = []  # by group
        self._sampling: list[list[Sampling]] = []  # by group, then slot
        self.log: deque[StepRecord] = deque(maxlen=_LOG_LIMIT)
        self.rows_compacted = 0
        self.busy_s = 0.0  # kept apart from the log, which forgets

    def start(self, message: StartMessage) -> None:
        """Sets up the groups' caches; before the first step."""
        model = self.model
        full_bytes = message.num_groups * cache_bytes(
            model.spec, len(model.layers), model.dtype, slots=message.slots,
            capacity=message.capacity, kv_heads=model.kv_heads)
        self.caches = [KvCache(model.spec, len(model.layers), model.dtype, slots=message.slots,
                               capacity=message.capacity, kv_heads=model.kv_heads,
                               is_resident=full_bytes <= message.spare_bytes,
                               device=model.device)
                       for _ in range(message.num_groups)]
        self._sampling = [[] for _ in range(message.num_groups)]

    def adopt(self, group: int, choices: Sequence[Sampling]) -> None:
        """How the queries in the group's cache are sampled, by slot, where they were put there
        by other means than an encode step of this stage."""
        self._sampling[group] = list(choices)

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor:
        """inputs: tokens [rows] on the first stage, hidden [rows, H] after it. Returns hidden
        [rows, H], or on the last stage the sampled tokens of the step's queries, [n]."""
        start_s = self._clock()
        self._remove(message)
        run = self._encode if message.kind is StepKind.ENCODE else self._decode
        out = run(message, inputs)
        cache = self.caches[message.group]
        queries = len(message.joined) if message.kind is StepKind.ENCODE else cache.num_active
        self.log.append(StepRecord(message.kind.value, message.group, message.phase,
                                   message.iteration, queries, len(inputs), start_s, self._clock()))
        self.busy_s += self.log[-1].end_s - start_s
        if self._check:
            cache.check_integrity()
        return out

    def _remove(self, message: StepMessage) -> None:
        if message.removed:
            self.rows_compacted += self.caches[message.group].free(message.removed)
            kept = apply_moves(list(range(len(self._sampling[message.group]))), message.removed)
            self._sampling[message.group] = [self._sampling[message.group][i] for i in kept]

    def _encode(self, message: StepMessage, inputs: Tensor) -> Tensor:
        cache, joined = self.caches[message.group], message.joined
        lengths = [j.input_tokens for j in joined]
        first = cache.allocate([j.query for j in joined], lengths)
        choices = [j.sampling for j in joined]
        self._sampling[message.group] += choices
        hidden = self.model.encode(inputs, cache.store, first, lengths)
        if not self.model.is_last:
            return hidden
        # only an input's last token predicts the next
        ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        return sample(self.model.logits(hidden[ends]), choices, lengths)

    def _decode(self, message: StepMessage, inputs: Tensor) -> Tensor:
        cache = self.caches[message.group]
        contexts = torch.tensor(cache.lengths, device=inputs.device)
        hidden = self.model.decode(inputs, cache.store, decode_context(contexts, self.model.dtype))
        cache.extend()
        if not self.model.is_last:
            return hidden
        return sample(self.model.logits(hidden), self._sampling[message.group], cache.lengths)
