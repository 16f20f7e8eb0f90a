"""What the sums of a tensor-parallel group add to a real step of its layers.

A sum timed alone finds ranks that come to it together. In a step each of them has just gone through
half a layer, which takes one a little longer than the other: whoever is early waits, sleeps and is
woken. So steps of a shard's layers are executed on all ranks of the group, with their sums and
without in turns, and what the sums add is divided among them (docs/profile.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xprofiler.measure.bench import LayerBench, around, ordinary_inputs
from xprofiler.measure.encoder_decoder import EncoderDecoderBench
from xprofiler.measure.probe import StepParts
from xprofiler.points import DECODE_ROWS_UP_TO, STEP_CONTEXT
from xrunner.comm.exchange import broadcast
from xrunner.models.weights import Shard

_ROW_LAYERS, _LEAST_LAYERS, _MOST_LAYERS = 4200, 2, 6  # rows times layers of a step; layers
_WEIGHT_BYTES = 2**26
_POINT_S = 0.4  # a size is measured for about so long, and never fewer times than
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 21


class GroupOfRanks(Protocol):
    """What sums (xrunner.comm.collective)."""

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class Sums:
    """Stands where a shard's products are summed: over the group that is there now, or not at
    all."""

    def __init__(self) -> None:
        self.group: GroupOfRanks | None = None
        self.count = 0  # of sums asked for

    def __call__(self, tensor: Tensor) -> Tensor:
        self.count += 1
        return tensor if self.group is None else self.group.all_reduce(tensor)


Bench = LayerBench | EncoderDecoderBench


def summing_bench(spec: ModelSpec, dtype: torch.dtype, degree: int, sums: Sums, *,
                  device: torch.device, weight_dtype: torch.dtype) -> Bench:
    """A shard of a few layers, which are more than a processor's caches keep."""
    most = max(_WEIGHT_BYTES // (spec.decoder_layer_params * dtype.itemsize // degree),
               _LEAST_LAYERS)
    few = replace(spec, num_layers=min(spec.num_layers, most),
                  num_encoder_layers=min(spec.num_encoder_layers, most))
    make = EncoderDecoderBench if spec.is_encoder_decoder else LayerBench
    return make(few, dtype, tp_degree=Shard(degree=degree, all_reduce=sums), device=device,
                weight_dtype=weight_dtype)


def seconds_of_sums(comm: Any, group: GroupOfRanks, bench: Bench, sums: Sums,
                    rows: int) -> list[float]:
    """Seconds that each sum of `rows` hidden states adds to a step, round by round; every rank of
    `comm`, whose `group` it is, calls it with a like bench."""
    step = _step(bench, rows)

    def timed(one: GroupOfRanks | None) -> float:
        sums.group, sums.count = one, 0
        comm.Barrier()
        return step().whole_s

    first_s = max(timed(None), timed(group))  # and its warm-up
    most = np.clip(_POINT_S / 2 / first_s, _LEAST_ROUNDS, _MOST_ROUNDS)  # rank 0's counts
    rounds = broadcast(comm, int(most), int)
    added = [timed(group) - timed(None) for _ in range(rounds)]
    return [max(s, 0.0) / sums.count for s in added]


def _step(bench: Bench, rows: int) -> Callable[[], StepParts]:
    """A step of so many rows: as usual few are decoded, many are of inputs."""
    layers = min(max(_ROW_LAYERS // rows, _LEAST_LAYERS), _MOST_LAYERS)
    most = bench.spec.max_positions
    context = STEP_CONTEXT if most is None else min(STEP_CONTEXT, most - 1)
    contexts = around(rows, context - 1) if rows <= DECODE_ROWS_UP_TO else []
    inputs = ordinary_inputs(rows, most)
    if isinstance(bench, LayerBench):
        return (bench.decode(contexts, most_layers=layers) if contexts
                else bench.encode(inputs, most_layers=layers))
    return (bench.decode(contexts, [n + 1 for n in contexts]) if contexts
            else bench.encode(inputs))
