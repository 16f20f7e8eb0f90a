"""The way of some rows of a step through the layers of a stage, one layer at a time."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from xrunner.models.decoder import DecoderEnds, DecoderLayer
from xrunner.ops.attention import decode_attention, encode_attention
from xrunner.ops.contexts import Cache, DecodeContext, EncodeContext, Places
from xrunner.ops.rows import Residual, Rotation, rotate_and_store

Across = Callable[[Literal["up", "down"], Tensor], Tensor]


class StageEnds(Protocol):
    """A stage as its passes see it (xrunner.models.stage_model.StageModel)."""

    is_first: bool
    is_last: bool
    narrows: bool
    ends: DecoderEnds
    dtype: torch.dtype
    work_dtype: torch.dtype

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor: ...


def residual(inputs: Tensor, dtype: torch.dtype, *, is_own: bool) -> Residual:
    """The residual stream of a step's input as `dtype`; a copy unless `is_own`. Within a process
    another rank may hold the tensor of a message too."""
    hidden = inputs.to(dtype)
    return Residual(hidden if is_own or hidden is not inputs else inputs.clone())


class Pass:
    """Rows of decoding requests and of spans of inputs, which go through every layer together. One
    product covers all rows, attention is computed apart (ORCA's selective batching)."""

    def __init__(self, model: StageEnds, inputs: Tensor, decoded: DecodeContext | None,
                 encoded: EncodeContext | None, *, ends_only: bool = False,
                 across: Across | None = None) -> None:
        """`inputs`, `decoded`, `encoded`, `ends_only`: as of StageModel.mixed. `across`: moves
        what attention reads to the memory of the entries, and its output back, where that is not
        the stage's device; the contexts lie with the entries."""
        self._model, self._decoded, self._encoded = model, decoded, encoded
        self._num_decoded = n = 0 if decoded is None else len(decoded.slots)
        self._kept = None  # rows that the last layer goes on with; None: all
        if ends_only and encoded is not None:
            self._kept = torch.cat([torch.arange(n, device=inputs.device), encoded.ends + n])
        positions, *where = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(
            *((step.positions, *step.places) for step in (decoded, encoded) if step is not None),
            strict=True))
        self._places, self._across = Places(*where), across
        here = positions.to(inputs.device)
        self.hidden = residual(model.embedded(inputs, here) if model.is_first else inputs,
                               model.work_dtype, is_own=model.is_first)
        self._rotations = [Rotation(*(part.to(positions.device) for part in own))
                           for own in model.ends.rotation(here)]

    def through(self, layer: DecoderLayer, entries: Cache, *, is_last: bool) -> None:
        """Computes one layer; the keys and values of the rows go into `entries`. `is_last`: of this
        stage."""
        attended = self.attended(layer, entries, is_last=is_last)
        layer.finish(self.hidden, attended)

    def attended(self, layer: DecoderLayer, entries: Cache, *, is_last: bool) -> Tensor:
        """Attention's output [T, h * d] in this layer, before its projection."""
        decoded, encoded, n = self._decoded, self._encoded, self._num_decoded
        joint = layer.qkv(self.hidden)
        if self._across is not None:
            joint = self._across("down", joint)
        rotation = None if layer.rotary is None else self._rotations[layer.rotary]
        query = rotate_and_store(joint, layer.heads, entries, self._places, rotation)
        found = []
        if decoded is not None:
            found.append(decode_attention(query if encoded is None else query[:n], entries,
                                          decoded, layer.scoring))
        if encoded is not None:
            found.append(encode_attention(query if decoded is None else query[n:], entries,
                                          encoded, layer.scoring))
        every = found[0] if len(found) == 1 else torch.cat(found)
        if self._across is not None:
            every = self._across("up", every)
        if self._kept is not None and is_last and self._model.narrows:
            kept, self._kept = self._kept, None
            self.hidden, every = Residual(self.hidden.total()[kept]), every[kept]
        return every

    def output(self) -> Tensor:
        """Hidden states [n + T, H] after the last layer, or those of the rows asked for."""
        model, total = self._model, self.hidden.total()
        if self._kept is not None:
            total = total[self._kept]
        return total if model.is_last else total.to(model.dtype)
