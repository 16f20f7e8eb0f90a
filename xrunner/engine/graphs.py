"""Decode steps captured as CUDA graphs, one for each batch size of xrunner.rules.batch_sizer.

A decode step of a small model is a few hundred kernels of microseconds each, and launching them one
by one takes the host longer than the GPU works. A captured step is launched at once. It reads its
tokens, blocks, lengths and positions where it read them when it was captured; so a step writes them
there first, and rows that hold no query are in no slot and have no entries: the kernels of csrc/
write nothing for them and give them zeros. Only those kernels read no more than these numbers say
and take no size from the host: where torch's attention serves, nothing is captured.

All are captured before a run begins, from the smallest, which gain most, to the largest, until they
have taken what they may of the device's memory. That they give what the same steps give kernel by
kernel is tested on a card by `xgpt doctor --gpu` and tests/gpu."""

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
# Of a GPU's memory, for what captured steps keep: half of what plans leave free
# (xsimulator.memory.USABLE_SHARE), which is there for the runtime.
MEMORY_SHARE = 0.05


class Captured(NamedTuple):
    """A step that can be taken again: `replay` computes `out` anew from where it read before."""

    replay: Callable[[], object]
    out: Tensor


class CaptureError(Exception):
    """A step cannot be captured, and why in a line."""


class Capture(Protocol):
    """What captures steps. `limit_bytes`: what these may keep of the device's memory;
    `taken_bytes`: what they do."""

    limit_bytes: int
    taken_bytes: int

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Computes nothing yet. Raises CaptureError."""


# The driver refuses to wait for the whole GPU while any thread captures: _free_bytes does.
_one_at_a_time = threading.Lock()


class CudaCapture:
    """Captures on torch's current GPU, on a stream of its own: torch's for captures is one for all
    threads of a process. What the graphs need in between lies in one pool: they are never at work
    at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.limit_bytes = int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
        self.taken_bytes = 0
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._holder: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        with _one_at_a_time:
            if self._holder is None:
                # NOTE: torch refuses a pool whose graphs are all gone while a tensor of theirs is
                # held: one graph stays
                self._holder, _ = self._captured(lambda: torch.zeros(1, device=self._device))
            before = self._free_bytes()
            graph, out = self._captured(work)
            self.taken_bytes += max(before - self._free_bytes(), 0)
        return Captured(graph.replay, out)

    def _captured(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        try:
            # threads that wait for messages may look at events of their own meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream,
                                  capture_error_mode="thread_local"):
                return graph, work()
        except (RuntimeError, XgptError) as error:  # of memory, of what may not be captured
            # NOTE: where a capture ends in an error, torch leaves its stream the current one
            torch.cuda.set_stream(stream)
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(words[0]) from error

    def _free_bytes(self) -> int:
        """What the driver has left: what the graphs' pool keeps between replays is not free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what torch keeps for other work is
        return int(torch.cuda.mem_get_info(self._device)[0])


def why_not(model: StageModel | EncoderDecoderStage) -> str | None:
    """Why the stage's decode steps cannot be captured; None where they can: our kernels serve, on a
    GPU, and the rank is alone in its stage (sums over a group go through the host)."""
    if isinstance(model, EncoderDecoderStage):
        return "an encoder-decoder model's steps are not captured"
    if model.shard.degree > 1:
        return "a tensor-parallel group's steps are not captured"
    if not model.layers:
        return "this rank has no layers that decode"
    if model.work_dtype != model.dtype or model.dtype not in DTYPES:
        return f"weights are multiplied as {model.work_dtype}, entries are {model.dtype}"
    if model.spec.head_dim > MAX_DIM:
        return f"heads of {model.spec.head_dim} are torch's"
    decoder = model.spec.decoder
    if decoder.experts is not None:
        return "experts are told by the host how many rows each has"
    if decoder.attention_cap is not None:
        return "attention of capped scores is torch's"
    gpu = cuda_modules.gpu_of(model.device)
    if gpu.ops is None:
        return f"torch's operators serve, which take sizes from the host ({gpu.reason})"
    return None


@torch.inference_mode()
def capture_steps(model: StageModel | EncoderDecoderStage, caches: Sequence[KvCache],
                  slots: int, capture: Capture) -> tuple[list[DecodeGraphs | None], str]:
    """The captured steps of up to `slots` queries on each of these caches, those of groups, some of
    which may share their memory (None where nothing is captured); and what is captured, or why
    nothing is, in a line."""
    if (why := why_not(model)) is not None:
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
    """What is captured, in a line. Raises CaptureError where nothing is."""
    # more queries than there are entries are never there
    sizes = sizes_up_to(min(slots, *(own.num_entries for own in graphs)))
    if not sizes:
        raise CaptureError("the caches have no room for a query")
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
    return f"decode steps of up to {done} queries in CUDA graphs{more}"


def sizes_up_to(slots: int) -> list[int]:
    """Batch sizes that are captured for groups of up to so many queries, rising."""
    return sorted({size for count in range(1, min(slots, MOST_CAPTURED) + 1)
                   if (size := bucket_of(count)) is not None})


class DecodeGraphs:
    """The decode steps of groups that share a cache, which stays where it is."""

    def __init__(self, model: StageModel, layers: list[Cache], capture: Capture, *,
                 width: int) -> None:
        """layers: keys and values [blocks, k, size, d] of each; `width`: blocks of the longest
        query, 1 of a cache in rows."""
        self.model, self.layers, self._capture = model, layers, capture
        self.width = width
        self.steps: dict[int, CapturedStep] = {}

    @property
    def num_entries(self) -> int:
        """Tokens that the cache has room for."""
        num_blocks, _, size, _ = self.layers[0][0].shape
        return num_blocks * size

    def decode(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """As StageModel.decode, of the groups' cache."""
        size = bucket_of(len(inputs))
        own = None if size is None else self.steps.get(size)
        if own is None:
            return self.model.decode(inputs, self.layers, step)
        own.take(inputs, step)
        return own.replayed().clone()  # the next step writes there

    def capture(self, size: int) -> CapturedStep:
        """A step of `size` rows, which serves from now on where it is put into `steps`. Raises
        CaptureError."""
        own = CapturedStep(size, self)
        own.captured = self._capture(lambda: self.work(own.inputs, own.context))
        return own

    def work(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """The step, launched kernel by kernel."""
        return self.model.decode(inputs, self.layers, step)


@dataclass(slots=True, init=False)
class CapturedStep:
    """A decode step of one size: where it reads its inputs and the numbers of its rows."""

    inputs: Tensor  # tokens [size], or hidden [size, H]
    context: DecodeContext
    captured: Captured | None
    count: int  # rows that hold a query: the first ones

    def __init__(self, size: int, graphs: DecodeGraphs) -> None:
        """No row holds a query."""
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
        """The rows of a step; behind them no row holds a query."""
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
        """What the step gives its rows, where the next one will write."""
        assert self.captured is not None, f"{self.count = }: not captured"
        self.captured.replay()
        return self.captured.out[:self.count]
