"""Decode steps captured before a run begins, each compared with the same step launched kernel by
kernel: on the rows that it was captured with, and on others, fewer ones, at other places, with the
longest query that there may be. The caches hold nothing yet: random entries stand in for it.

One step that differs is enough, and none of them serves. Steps are captured from the smallest,
which gain most, to the largest, until they have taken what they may of the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.units import format_bytes
from xrunner.engine.blocks import BlockCache
from xrunner.engine.graphs import Capture, CapturedStep, CaptureError, DecodeGraphs, why_not
from xrunner.engine.group import Model, StageGroup
from xrunner.engine.kv import KvCache
from xrunner.models.stage_model import StageModel
from xrunner.ops.contexts import BlockTable, DecodeContext, Places
from xrunner.ops.cuda_check import tolerance
from xrunner.rules.buckets import MOST_CAPTURED, bucket_of

_STEPS_OFF = 4  # tolerances of one operator that a step of many may be off
_TOKEN_STEP = 7919  # from one row's token to the next one's: a prime


class Tried(NamedTuple):
    """`graphs`: of each cache, in their order, None where nothing is captured; `said`: in a line,
    what is captured, or why nothing is."""

    graphs: list[DecodeGraphs | None]
    said: str


@torch.inference_mode()
def capture_steps(model: Model, groups: Sequence[StageGroup], slots: int, capture: Capture) -> str:
    """Gives the groups of a stage, of up to `slots` queries each, their captured steps, where
    there can be any. Returns what is captured, or why nothing is, in a line."""
    if (why := why_not(model)) is not None:
        return f"no CUDA graphs: {why}"
    assert isinstance(model, StageModel), f"{model.spec.family = }"
    tried = try_graphs(model, [group.cache for group in groups], slots, capture)
    for group, graphs in zip(groups, tried.graphs, strict=True):
        group.graphs = graphs
    return tried.said


def try_graphs(model: StageModel, caches: Sequence[KvCache | BlockCache], slots: int,
               capture: Capture) -> Tried:
    """Captures the decode steps of up to `slots` queries on these caches, those of groups, some of
    which may share their memory."""
    by_store: dict[int, DecodeGraphs] = {}
    for cache in caches:
        if cache.store.data_ptr() not in by_store:
            by_store[cache.store.data_ptr()] = _graphs_of(model, cache, capture)
    own = list(by_store.values())
    # more queries than there are entries are never there, and a trial's rows need one each
    room = min(graphs.num_entries for graphs in own)
    sizes = [size for size in sizes_up_to(slots) if size <= room]
    if not sizes:
        return Tried([None] * len(caches), "no CUDA graphs: the caches have no room for a query")
    fill = [_Entries(graphs) for graphs in own]
    done, why = 0, None
    try:
        for size in sizes:
            if capture.taken_bytes >= capture.limit_bytes:
                break
            for graphs in own:
                graphs.steps[size] = _tried(graphs, size)
            done = size
    except (CaptureError, _DifferError) as error:
        why = str(error)
    finally:
        for entries in fill:
            entries.clear()
    if why is not None or not done:
        why = why or f"they may take {format_bytes(capture.limit_bytes)} of memory"
        return Tried([None] * len(caches), f"no CUDA graphs: {why}")
    most = "" if done == sizes[-1] else (
        f" (more would take over {format_bytes(capture.limit_bytes)} of memory)")
    return Tried([by_store[cache.store.data_ptr()] for cache in caches],
                 f"decode steps of up to {done} queries in CUDA graphs{most}, each compared with "
                 "the step launched kernel by kernel")


def sizes_up_to(slots: int) -> list[int]:
    """Batch sizes that are captured for groups of up to so many queries, rising."""
    return sorted({size for count in range(1, min(slots, MOST_CAPTURED) + 1)
                   if (size := bucket_of(count)) is not None})


class _DifferError(Exception):
    """A captured step is not what was captured, in a line."""


def _graphs_of(model: StageModel, cache: KvCache | BlockCache, capture: Capture) -> DecodeGraphs:
    table: BlockTable | None = cache.room_for([])
    return DecodeGraphs(model, cache.layers, capture,
                        width=1 if table is None else table.blocks.shape[1],
                        in_blocks=table is not None)


def _tried(graphs: DecodeGraphs, size: int) -> CapturedStep:
    """Raises CaptureError, _DifferError."""
    first, second = (_Rows.of(graphs, size, is_second=second) for second in (False, True))
    graphs.work(first.inputs, first.step)  # kernels are loaded now, which must not be in a capture
    own = graphs.capture(size)
    for rows in (first, second):
        own.take(rows.inputs, rows.step)
        rows.forget(graphs)
        found = [own.replayed().clone(), rows.written(graphs)]
        rows.forget(graphs)
        expected = [graphs.work(rows.inputs, rows.step), rows.written(graphs)]
        off = apart(expected, found)
        if off > _STEPS_OFF * tolerance(graphs.model.dtype):
            raise _DifferError(f"a captured step of {len(rows.inputs)} queries differs by {off:.1%}"
                               " from the same launched kernel by kernel")
    return own


def apart(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference, relative to its value, or to its row's root mean square where that is
    larger; infinite where one is no number. What is small in a row was summed with what is large in
    it: layers round the sum of the two, and others may round it another way."""
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        own = one.float()
        scale = own.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1)
        off = ((own - other.float()).abs() / torch.maximum(own.abs(), scale)).max()
        worst = max(worst, float(off.nan_to_num(nan=torch.inf)))
    return worst


class _Entries:
    """Random entries in as much of a cache as trials read, until it is cleared."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        device = graphs.model.device
        generator = torch.Generator(device).manual_seed(11)
        self._parts = [part[:max(MOST_CAPTURED, graphs.width)]
                       for layer in graphs.layers for part in layer]
        for part in self._parts:
            part.normal_(generator=generator)

    def clear(self) -> None:
        for part in self._parts:
            part.zero_()


class _Rows(NamedTuple):
    """A decode step of queries that are not there."""

    inputs: Tensor
    step: DecodeContext

    @classmethod
    def of(cls, graphs: DecodeGraphs, size: int, *, is_second: bool) -> _Rows:
        """Of `size` rows, each with some entries; or the second one: of one row less (but of one),
        elsewhere, the first with as many entries as a query may have."""
        model, (num_blocks, _, block_size, _) = graphs.model, graphs.layers[0][0].shape
        most = min(graphs.width * block_size, model.spec.max_positions or block_size * graphs.width)
        deep = -(-size // num_blocks)  # rows that write into one block: there are entries enough
        shift = deep if is_second and 2 * deep <= block_size else 0
        count = max(size - 1, 1) if is_second else size
        lines = [[row % num_blocks] + [0] * (graphs.width - 1) for row in range(count)]
        positions = [shift + row // num_blocks for row in range(count)]
        where = [line[0] for line in lines]
        within = list(positions)
        last, place = (most - 1) // block_size, (most - 1) % block_size
        if is_second and last < num_blocks and place >= shift + deep:  # which no other row writes
            lines[0], positions[0] = [*range(last + 1)] + [0] * (graphs.width - last - 1), most - 1
            where[0], within[0] = last, place

        def on(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=model.device)

        return cls(_inputs(model, count, is_second), DecodeContext(
            slots=on([*range(count)]), positions=on(positions), lengths=on(positions) + 1,
            blocks=torch.tensor(lines, device=model.device), longest=max(positions) + 1,
            places=Places(on(where), on(within)), width=count, in_blocks=graphs.in_blocks))

    def forget(self, graphs: DecodeGraphs) -> None:
        """What the step writes into the cache is not there yet."""
        slots, positions = self.step.places
        for part in (part for layer in graphs.layers for part in layer):
            part[slots, :, positions] = 0

    def written(self, graphs: DecodeGraphs) -> Tensor:
        """What it wrote there, [2 layers, n, k, d]."""
        slots, positions = self.step.places
        return torch.stack([part[slots, :, positions] for layer in graphs.layers
                            for part in layer])


def _inputs(model: StageModel, count: int, is_second: bool) -> Tensor:
    if model.is_first:
        at = torch.arange(count, device=model.device) + (count if is_second else 0)
        return (at + 1) * _TOKEN_STEP % model.spec.vocab_size
    generator = torch.Generator(model.device).manual_seed(13 + is_second)
    return torch.randn(count, model.spec.hidden_size, generator=generator,
                       device=model.device).to(model.dtype)
