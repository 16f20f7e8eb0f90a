"""Captured decode steps, each compared with the same step launched kernel by kernel: on the rows
that it was captured with, and on others, fewer ones, at other places, with the longest query that
there may be. The caches hold nothing: random entries stand in for it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec
from xrunner.engine.graphs import Capture, CapturedStep, DecodeGraphs
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.ops.contexts import DecodeContext, Places
from xrunner.rules.batch_sizer import MOST_CAPTURED

STEPS_OFF = 4  # tolerances of one operator (cuda_check) that a step of many may be off
_TOKEN_STEP = 7919  # from one row's token to the next one's: a prime
_TOY = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=256, num_heads=4,
                 num_kv_heads=2, vocab_size=512, intermediate_size=512, is_gated_mlp=True,
                 has_bias=False, max_positions=256)


def toy_graphs(dtype: torch.dtype, device: torch.device, capture: Capture) -> DecodeGraphs:
    """Of a toy model of random weights, and a cache of 32 queries of 64 tokens in rows."""
    whole = StageAssignment(index=0, ranks=(0,), num_layers=_TOY.num_layers, first_layer=0)
    model = StageModel(_TOY, RandomWeights(dtype), whole, dtype, device=device)
    cache = KvCache(kv_shape(_TOY, dtype, slots=32, capacity=64), device)
    return DecodeGraphs(model, cache.layers, capture, width=1)


@torch.inference_mode()
def tried(graphs: DecodeGraphs, size: int) -> tuple[CapturedStep, float]:
    """The step of `size` rows, captured, and how far it is from what was captured (`apart`). Raises
    CaptureError."""
    entries = _Entries(graphs)
    try:
        first, second = (_Rows.of(graphs, size, is_second=second) for second in (False, True))
        graphs.work(first.inputs, first.step)  # kernels are loaded now, which a capture cannot
        own, off = graphs.capture(size), 0.0
        for rows in (first, second):
            own.take(rows.inputs, rows.step)
            rows.forget(graphs)
            found = [own.replayed().clone(), rows.written(graphs)]
            rows.forget(graphs)
            expected = [graphs.work(rows.inputs, rows.step), rows.written(graphs)]
            off = max(off, apart(expected, found))
        return own, off
    finally:
        entries.clear()


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
    def of(cls, graphs: DecodeGraphs, size: int, *, is_second: bool) -> "_Rows":
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
            places=Places(on(where), on(within)), width=count))

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
