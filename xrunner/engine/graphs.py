"""Decode steps captured as CUDA graphs, one for each batch size of xrunner.rules.batch_sizer.

A decode step of a small model is a few hundred kernels of microseconds each. The host takes longer
to launch them than the GPU to run them; a captured step is one launch. It reads tokens, blocks,
lengths and positions from fixed buffers, which each step fills first. Rows without a request have
slot NO_SLOT and length 0: the kernels of csrc/ write nothing for them. Only these kernels take all
sizes from the buffers, so nothing is captured where torch's attention is used.

Steps are captured before a run begins, from the smallest, which gain most, to the largest, until
their share of the device's memory is used. `xgpt doctor --gpu` and tests/gpu check that they equal
the same steps launched kernel by kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.units import format_bytes
from xrunner.engine.kv import KvCache
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.ops.contexts import Cache, DecodeContext, Places
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda.kernels import MAX_DIM
from xrunner.ops.cuda.launch import DTYPES
from xrunner.rules.batch_sizer import MOST_CAPTURED, bucket_of

NO_SLOT = -1
# chosen: share of a GPU's memory for captured steps, half of what plans leave free for the runtime
# (xsimulator.memory.USABLE_SHARE)
MEMORY_SHARE = 0.05


class Captured(NamedTuple):
    """A captured step: `replay` recomputes `out` from its input buffers."""

    replay: Callable[[], object]
    out: Tensor


class CaptureError(Exception):
    """A step cannot be captured; the message says why, in a line."""


class Capture(Protocol):
    """Captures steps. `limit_bytes`: device memory they may keep; `taken_bytes`: what they keep."""

    limit_bytes: int
    taken_bytes: int

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Captures `work` without computing it. Raises CaptureError."""


# the driver cannot wait for the whole GPU, as _free_bytes does, while any thread captures
_one_at_a_time = threading.Lock()


class CudaCapture:
    """Captures steps on torch's current GPU, on a stream of its own. Torch's own capture stream is
    shared by all threads of a process. All graphs use one memory pool, since they never run at the
    same time."""

    def __init__(self, device: torch.device) -> None:
        self.limit_bytes = int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
        self.taken_bytes = 0
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._holder: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        with _one_at_a_time:
            if self._holder is None:
                # NOTE: torch refuses a pool whose graphs are all gone while one of their tensors
                # lives, so one graph is kept
                self._holder, _ = self._captured(lambda: torch.zeros(1, device=self._device))
            before = self._free_bytes()
            graph, out = self._captured(work)
            self.taken_bytes += max(before - self._free_bytes(), 0)
        return Captured(graph.replay, out)

    def _captured(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        try:
            # other threads may meanwhile query their events
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream,
                                  capture_error_mode="thread_local"):
                return graph, work()
        except (RuntimeError, XgptError) as error:  # no memory, or not capturable
            # NOTE: after an error torch leaves its capture stream the current one
            torch.cuda.set_stream(stream)
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(words[0]) from error

    def _free_bytes(self) -> int:
        """Free bytes by the driver; the graphs' pool does not count as free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # frees what torch caches for other work
        return int(torch.cuda.mem_get_info(self._device)[0])


def capture_obstacle(model: StageModel | EncoderDecoderStage) -> str | None:
    """Why the stage's decode steps cannot be captured; None if they can. They can on a GPU with our
    kernels if the rank is alone in its stage: sums over a tensor-parallel group go through the
    host."""
    if isinstance(model, EncoderDecoderStage):
        return "an encoder-decoder model's steps are not captured"
    if model.shard.degree > 1:
        return "a tensor-parallel group's steps are not captured"
    if not model.layers:
        return "this rank has no layers that decode"
    if model.work_dtype != model.dtype or model.dtype not in DTYPES:
        return f"weights are multiplied as {model.work_dtype}, the KV cache is {model.dtype}"
    if model.spec.head_dim > MAX_DIM:
        return f"attention with heads of {model.spec.head_dim} is left to torch"
    decoder = model.spec.decoder
    if decoder.experts is not None:
        return "the host needs the number of rows of each expert"
    if decoder.attention_cap is not None:
        return "torch computes attention with capped scores"
    gpu = cuda_modules.gpu_of(model.device)
    if gpu.ops is None:
        return f"torch's operators are used, which take sizes from the host ({gpu.reason})"
    return None


@torch.inference_mode()
def capture_steps(model: StageModel | EncoderDecoderStage, caches: Sequence[KvCache],
                  slots: int, capture: Capture) -> tuple[list[DecodeGraphs | None], str]:
    """Captured steps of each cache (None where nothing is captured), and a line about them.
    `slots`: most requests of a step. The line says what is captured, or why nothing is. Caches that
    share memory share their steps."""
    if (why := capture_obstacle(model)) is not None:
        return [None] * len(caches), f"no CUDA graphs: {why}"
    assert isinstance(model, StageModel), f"{model.spec.family = }"
    by_store: dict[int, DecodeGraphs] = {}
    for cache in caches:
        if cache.store.data_ptr() not in by_store:
            table = cache.room_for([])
            by_store[cache.store.data_ptr()] = DecodeGraphs(
                model, cache.layers, capture,
                width=1 if table is None else table.blocks.shape[1])
    try:
        said = _capture_all(list(by_store.values()), slots, capture)
    except CaptureError as error:
        return [None] * len(caches), f"no CUDA graphs: {error}"
    return [by_store[cache.store.data_ptr()] for cache in caches], said


def _capture_all(graphs: Sequence[DecodeGraphs], slots: int, capture: Capture) -> str:
    """Captures steps of all sizes and returns a line about them. Raises CaptureError where nothing
    fits."""
    # a cache holds at most as many requests as tokens
    sizes = sizes_up_to(min(slots, *(own.num_entries for own in graphs)))
    if not sizes:
        raise CaptureError("the caches have no room for a request")
    done = 0
    for size in sizes:
        if capture.taken_bytes >= capture.limit_bytes:
            break
        for own in graphs:
            empty = CapturedStep(size, own)
            own.work(empty.inputs, empty.context)  # loads kernels, which a capture cannot
            own.steps[size] = own.capture(size)
        done = size
    may_take = format_bytes(capture.limit_bytes)
    if not done:
        raise CaptureError(f"they may take {may_take} of memory")
    more = "" if done == sizes[-1] else f" (more would take over {may_take} of memory)"
    return f"decode steps of up to {done} requests in CUDA graphs{more}"


def sizes_up_to(slots: int) -> list[int]:
    """Batch sizes captured for groups of up to `slots` requests, rising."""
    return sorted({size for count in range(1, min(slots, MOST_CAPTURED) + 1)
                   if (size := bucket_of(count)) is not None})


class DecodeGraphs:
    """Captured decode steps of the groups that share a cache, whose memory never moves."""

    def __init__(self, model: StageModel, layers: list[Cache], capture: Capture, *,
                 width: int) -> None:
        """`layers`: each layer's keys and values, [blocks, k, size, d]. `width`: blocks of the
        longest request; 1 for a cache in rows."""
        self.model, self.layers, self._capture = model, layers, capture
        self.width = width
        self.steps: dict[int, CapturedStep] = {}

    @property
    def num_entries(self) -> int:
        """Number of tokens that the cache has room for."""
        num_blocks, _, size, _ = self.layers[0][0].shape
        return num_blocks * size

    def decode(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """Output of the step for its rows, as `StageModel.decode` returns it."""
        size = bucket_of(len(inputs))
        own = None if size is None else self.steps.get(size)
        if own is None:
            return self.model.decode(inputs, self.layers, step)
        own.take(inputs, step)
        return own.replayed().clone()  # the next step overwrites the buffer

    def capture(self, size: int) -> CapturedStep:
        """Captures a step of `size` rows; to be put into `steps`. Raises CaptureError."""
        own = CapturedStep(size, self)
        own.captured = self._capture(lambda: self.work(own.inputs, own.context))
        return own

    def work(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """Executes the step, launched kernel by kernel."""
        return self.model.decode(inputs, self.layers, step)


@dataclass(slots=True, init=False)
class CapturedStep:
    """A decode step of one size: its input buffers and its graph."""

    inputs: Tensor  # tokens [size], or hidden [size, H]
    context: DecodeContext
    captured: Captured | None
    count: int  # rows that hold a request: the first ones

    def __init__(self, size: int, graphs: DecodeGraphs) -> None:
        """Allocates buffers of `size` rows without requests."""
        model, device = graphs.model, graphs.model.device

        def none(*shape: int) -> Tensor:
            return torch.full(shape, NO_SLOT, dtype=torch.long, device=device)

        self.inputs = (torch.zeros(size, dtype=torch.long, device=device) if model.is_first else
                       torch.zeros(size, model.spec.hidden_size, dtype=model.dtype, device=device))
        zeros = torch.zeros(3, size, dtype=torch.long, device=device)
        self.context = DecodeContext(
            slots=none(size), blocks=none(size, graphs.width), positions=zeros[0],
            places=Places(none(size), zeros[1]), lengths=zeros[2],
            longest=graphs.layers[0][0].shape[2] * graphs.width, width=size,
            in_blocks=graphs.width > 1)
        self.captured, self.count = None, 0

    def take(self, inputs: Tensor, step: DecodeContext) -> None:
        """Copies a step's rows into the buffers; the rows behind them hold no request."""
        count, before, own = len(inputs), self.count, self.context
        for buffer, values, empty in ((self.inputs, inputs, 0), (own.slots, step.slots, NO_SLOT),
                                      (own.blocks, step.blocks, NO_SLOT),
                                      (own.positions, step.positions, 0),
                                      (own.places.slots, step.places.slots, NO_SLOT),
                                      (own.places.positions, step.places.positions, 0),
                                      (own.lengths, step.lengths, 0)):
            buffer[:count] = values
            if before > count:
                buffer[count:before] = empty
        self.count = count

    def replayed(self) -> Tensor:
        """Replays the step; returns its rows' output in a buffer that the next replay
        overwrites."""
        assert self.captured is not None, f"{self.count = }: not captured"
        self.captured.replay()
        return self.captured.out[:self.count]
