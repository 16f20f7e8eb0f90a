"""Decode steps captured as CUDA graphs, one for each batch size of xrunner.rules.buckets.

A decode step of a small model is a few hundred kernels of microseconds each, and launching them one
by one takes the host longer than the GPU works. A captured step is launched at once. It reads its
tokens, blocks, lengths and positions where it read them when it was captured; so a step writes them
there first, and rows that hold no query are in no slot and have no entries: the kernels of csrc/
write nothing for them and give them zeros. Only those kernels read no more than these numbers say
and take no size from the host: where torch's attention serves, nothing is captured.

No GPU has run this yet (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.ops import cuda_modules
from xrunner.ops.contexts import DecodeContext, Places
from xrunner.ops.cuda import MAX_DIM
from xrunner.ops.launch import DTYPES
from xrunner.rules.buckets import bucket_of

NO_SLOT = -1
_OPERATORS = {"decode_attention", "place"}  # of which torch's would take sizes from the host


class Captured(NamedTuple):
    """A step that can be taken again: `replay` computes `out` anew from where it read before."""

    replay: Callable[[], object]
    out: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class CudaCapture:
    """Captures on torch's current GPU. What the graphs need in between lies in one pool: they are
    never at work at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = work()
        return Captured(graph.replay, out)


def is_capturable(model: StageModel | EncoderDecoderStage) -> TypeGuard[StageModel]:
    """Whether the stage's decode steps are fit for it: our kernels serve, on a GPU, and the rank
    is alone in its stage (sums over a group go through the host)."""
    if isinstance(model, EncoderDecoderStage) or model.shard.degree > 1:
        return False
    if model.work_dtype != model.dtype or model.dtype not in DTYPES or (
            model.spec.head_dim > MAX_DIM):
        return False
    decoder = model.spec.decoder
    if decoder.experts is not None or not decoder.is_native or decoder.qk_norm == "all":
        return False  # they take sizes from the host
    gpu = cuda_modules.gpu_of(model.device)
    return gpu.ops is not None and not gpu.differing & _OPERATORS


class DecodeGraphs:
    """The decode steps of one group on one stage, whose cache stays where it is."""

    def __init__(self, model: StageModel, store: Tensor, capture: Capture) -> None:
        """store [layers, 2, slots, k, capacity, d]: the group's cache."""
        self._model, self._store, self._capture = model, store, capture
        self._steps: dict[int, _Step] = {}

    def decode(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """As StageModel.decode, of the group's cache."""
        size = bucket_of(len(inputs))
        if size is None:
            return self._model.decode(inputs, self._store, step)
        if size not in self._steps:
            self._steps[size] = _Step.of(size, inputs, step, block_size=self._store.shape[-2])
        own = self._steps[size]
        own.take(inputs, step)
        if own.captured is not None:
            own.captured.replay()
            return own.captured.out[:len(inputs)].clone()  # the next step writes there
        if own.is_known:
            own.captured = self._capture(lambda: self._work(own))  # which computes nothing yet
            own.captured.replay()
            return own.captured.out[:len(inputs)].clone()
        # kernels are loaded when they are first launched, which must not be during a capture
        own.is_known = True
        return self._work(own)[:len(inputs)]

    def _work(self, step: _Step) -> Tensor:
        return self._model.decode(step.inputs, self._store, step.context)


@dataclass(slots=True)
class _Step:
    """A decode step of one size: where it reads its inputs and the numbers of its rows."""

    inputs: Tensor  # tokens [size], or hidden [size, H]
    context: DecodeContext
    is_known: bool = False  # it has been taken once
    captured: Captured | None = None

    @classmethod
    def of(cls, size: int, inputs: Tensor, step: DecodeContext, *, block_size: int) -> _Step:
        """Of `size` rows; inputs and `step` are of one with fewer."""
        most = step.blocks.shape[1]
        slots, positions, where, within, lengths = (
            torch.zeros(size, dtype=torch.long, device=inputs.device) for _ in range(5))
        return cls(inputs.new_zeros(size, *inputs.shape[1:]), DecodeContext(
            slots=slots, blocks=step.blocks.new_zeros(size, most), positions=positions,
            places=Places(where, within), lengths=lengths, longest=block_size * most, width=size,
            in_blocks=step.in_blocks))

    def take(self, inputs: Tensor, step: DecodeContext) -> None:
        """The rows of a step, and behind them such that hold no query."""
        count, own = len(inputs), self.context
        for buffer, values, empty in ((self.inputs, inputs, 0), (own.slots, step.slots, NO_SLOT),
                                      (own.blocks, step.blocks, NO_SLOT),
                                      (own.positions, step.positions, 0),
                                      (own.places.slots, step.places.slots, NO_SLOT),
                                      (own.places.positions, step.places.positions, 0),
                                      (own.lengths, step.lengths, 0)):
            buffer[:count] = values
            buffer[count:] = empty
