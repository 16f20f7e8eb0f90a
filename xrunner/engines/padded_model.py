"""A Hugging Face model as a stage of its own: executes the steps of static batches, padded on the
left, with the cache that transformers keeps.

Rows that are done keep decoding until their batch is, as in any static batch; nothing is compacted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from xrunner.engines.decoder_only import DecoderOnly
from xrunner.ops.head import WholeScores
from xrunner.ops.sampling import sample
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord
from xrunner.transport.messages import StartMessage, StepMessage

LOG_LIMIT = 200_000  # steps kept for the report; a longer job keeps its last ones


@dataclass(slots=True)
class _PaddedRows:
    """One group's part of a batch; W: tokens of its longest input, and of its outputs so far."""

    phase: int
    cache: Any  # transformers' DynamicCache, of W entries a row
    mask: Tensor  # [rows, W] 0 where a row is padded
    positions: list[int]  # tokens of each row so far
    choices: list[Sampling]


class PaddedModel(DecoderOnly):
    """An Executor (xrunner.engine.pipeline) of a decoder-only model that every rank calls alike."""

    keeps_tokens = returns_early = False

    def __init__(self, model: Any, *, max_positions: int | None, gives_answers: bool = True,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`gives_answers`: whether this rank draws the tokens (the group's first does)."""
        self._model, self._max_positions = model, max_positions
        self._gives_answers, self._clock = gives_answers, clock
        self._groups: dict[int, _PaddedRows] = {}
        self.log: deque[StepRecord] = deque(maxlen=LOG_LIMIT)
        self.busy_s = 0.0

    def start(self, message: StartMessage) -> None:
        """transformers' caches grow by themselves: there is nothing to set up."""
        self._groups.clear()

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        """inputs: the joining queries' tokens one after the other [T], or the last token of each
        row [n]. Returns the next token of each, [n]; None on ranks that draw none."""
        start_s = self._clock()
        is_encode = message.kind is StepKind.ENCODE
        out = (self._encode if is_encode else self._decode)(message, inputs)
        queries = len(message.joined) if is_encode else len(inputs)
        end_s = self._clock()
        self.log.append(StepRecord(message.kind.value, message.group, message.phase,
                                   message.iteration, queries, len(inputs), start_s, end_s))
        self.busy_s += end_s - start_s
        return out

    def _encode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        lengths = [joined.input_tokens for joined in message.joined]
        choices = [joined.sampling for joined in message.joined]
        ids, mask = padded_left(inputs, lengths)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions,
                          use_cache=True, logits_to_keep=1)
        rows = _PaddedRows(message.phase, out.past_key_values, mask, lengths, choices)
        before = self._groups.get(message.group)
        if before is not None and before.phase == message.phase:
            rows = _together(before, rows)
        self._groups[message.group] = rows
        return self._sample(out.logits, choices, lengths)

    def _decode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        rows = self._groups[message.group]
        assert rows.phase == message.phase and len(inputs) == len(rows.positions), f"{message = }"
        rows.mask = pad(rows.mask, (0, 1), value=1)
        positions = torch.tensor(rows.positions)
        if self._max_positions is not None:
            # only a row that is done, in a batch that is not, gets this far
            positions = positions.clamp(max=self._max_positions - 1)
        out = self._model(input_ids=inputs[:, None], attention_mask=rows.mask,
                          position_ids=positions[:, None], past_key_values=rows.cache,
                          use_cache=True, logits_to_keep=1)
        rows.cache = out.past_key_values
        rows.positions = [position + 1 for position in rows.positions]
        return self._sample(out.logits, rows.choices, rows.positions)

    def _sample(self, logits: Tensor, choices: Sequence[Sampling],
                positions: Sequence[int]) -> Tensor | None:
        """logits [n, 1, V]"""
        return sample(
            WholeScores(logits[:, -1]), choices, positions) if self._gives_answers else None


def padded_left(inputs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Packed tokens [T] -> tokens and mask, both [rows, longest]."""
    width = max(lengths)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    end = 0
    for row, length in enumerate(lengths):
        begin, end = end, end + length
        ids[row, width - length:] = inputs[begin:end]
        mask[row, width - length:] = 1
    return ids, mask


def _together(first: _PaddedRows, second: _PaddedRows) -> _PaddedRows:
    """Parts of a group that were encoded one after the other, as one; the narrower is padded."""
    width = max(first.mask.shape[1], second.mask.shape[1])
    for mine, other in zip(first.cache.layers, second.cache.layers, strict=True):
        mine.keys = torch.cat([_wider(mine.keys, width), _wider(other.keys, width)])
        mine.values = torch.cat([_wider(mine.values, width), _wider(other.values, width)])
    masks = [pad(rows.mask, (width - rows.mask.shape[1], 0)) for rows in (first, second)]
    return _PaddedRows(first.phase, first.cache, torch.cat(masks),
                       first.positions + second.positions, first.choices + second.choices)


def _wider(entries: Tensor, width: int) -> Tensor:
    """[rows, heads, W, head_dim] with padding before, up to `width`."""
    return pad(entries, (0, 0, width - entries.shape[2], 0))
