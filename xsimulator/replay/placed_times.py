"""Step times of a pool whose bytes lie on tiers, as StepClock tabulates them: with whole tensors
and requests on each tier, and the device batches that the runner makes of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray
from xgpt.core.placement import (
    DISK,
    HOST,
    Placement,
    layer_tensors,
    queries_by_tier,
    sectors,
    stage_tiers,
)
from xgpt.core.problem import Problem
from xsimulator.layer_times import LayerTimes
from xsimulator.placed import PlacedSteps
from xsimulator.placed_terms import READ, UP, PlacedStep, layer_s
from xsimulator.stage_times import StageTimes

_Seconds = Callable[[FloatArray, FloatArray], FloatArray]
Part = tuple[int, FloatArray]  # layers, and their shares of weights [3]


class Grids(NamedTuple):
    """Seconds of a layer's decode attention by requests and context, of its compaction by rows and
    context, and [stages] which of them each stage has."""

    decode: list[_Seconds]
    compaction: list[_Seconds]
    of_stages: list[int]


def grids_of(times: StageTimes) -> Grids:
    """The grids of a pool's step times, one for each degree or placed stage."""
    if isinstance(times, PlacedTimes):
        return times.grids
    layers, degrees = times.layers, times.degrees
    return Grids([partial(layers.decode_attention_s, degree=one) for one in degrees],
                 [partial(layers.compaction_s, degree=one) for one in degrees],
                 [degrees.index(stage.tp_degree) for stage in times.stages])


class PlacedTimes(PlacedSteps):
    """Seconds of each stage of a placed pool. A decode step's whole time, with the head, is in the
    grids; an encode step's is in the rows, as of requests of mean length, and its head in the
    ends."""

    def __init__(self, problem: Problem, layers: LayerTimes, stages: Sequence[StageAssignment],
                 placement: Placement, slots: int) -> None:
        """slots: most requests of a group at a time, which decide whose entries lie where."""
        super().__init__(problem, layers, stages, placement)
        self._ranges = queries_by_tier(slots, placement.kv)
        self._slots, tensors = slots, layer_tensors(problem.model)
        self._stage_parts: list[tuple[list[Part], FloatArray, int | None]] = []
        for stage in self.stages:
            tiers = stage_tiers(problem.model, stage.num_layers, placement.weights,
                                is_first=stage is self.stages[0],
                                is_last=stage is self.stages[-1])
            kinds = Counter(tuple(np.bincount(own, [tensor.elements for tensor in tensors], 3))
                            for own in tiers.layers)
            self._stage_parts.append((
                [(count, np.array(held) / sum(held)) for held, count in kinds.items()],
                np.eye(3)[tiers.head or 0], tiers.embedding))

    @property
    def grids(self) -> Grids:
        """One grid for each stage."""
        stages = range(len(self.stages))
        return Grids([partial(self._decode_s, stage) for stage in stages],
                     [partial(self.layers.compaction_s, degree=1)] * len(stages), [*stages])

    def encode_attention_s(self, lengths: ArrayLike, together: ArrayLike) -> dict[int, FloatArray]:
        """{stage: 0}: attention is counted in `encode_rows_s`."""
        return {stage: np.zeros(np.shape(lengths)) for stage in range(len(self.stages))}

    def decode_rows_s(self, rows: ArrayLike) -> FloatArray:
        """[..., stages] 0: a step's time is in the grids."""
        return np.zeros((*np.shape(rows), len(self.stages)))

    def first_tokens_s(self, queries: ArrayLike) -> FloatArray:
        """0: the head of a decode step is in the grids."""
        return np.zeros(np.shape(queries))

    def encode_rows_s(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] seconds to encode `tokens` of requests of mean length, without the head."""
        rows = np.asarray(tokens, float)
        count = rows / self._problem.lengths.inputs.mean
        kv, batches = self._by_tier(count, from_end=True)
        return np.stack([self._total_s(stage, self.encode_step(
            stage, count, rows, batches)._replace(head=None), kv, rows)
            for stage in range(len(self.stages))], axis=-1)

    def ends_s(self, queries: ArrayLike) -> FloatArray:
        """Seconds of the head for the last tokens of `queries` inputs."""
        count = np.asarray(queries, float)
        _, batches = self._by_tier(count, from_end=True)
        step = self.encode_step(len(self.stages) - 1, count, batches=batches)
        return self._head_s(step, self._stage_parts[-1][1])

    def _decode_s(self, stage: int, queries: FloatArray, context: FloatArray) -> FloatArray:
        kv, batches = self._by_tier(queries, from_end=False)
        step = self.decode_step(stage, queries, context, batches)
        return np.asarray(
            self._total_s(stage, step, kv, queries) / self.decoder_layers[stage])

    def _by_tier(self, count: FloatArray, *, from_end: bool) -> tuple[FloatArray, FloatArray]:
        """([..., 3] share of the requests whose entries lie on each tier, [...] device batches).
        Decoded requests have the first slots, encoded ones (from_end) the last."""
        first = np.maximum(self._slots - count, 0.0) if from_end else np.zeros_like(count)
        starts, stops = (np.array([getattr(own, end) for own in self._ranges], float)
                         for end in ("start", "stop"))
        held = np.maximum(np.minimum(stops, (first + count)[..., None])
                          - np.maximum(starts, first[..., None]), 0.0)
        batches = np.ceil(held / self.placement.device_batch - 1e-9).sum(-1)
        return held / np.maximum(held.sum(-1, keepdims=True), 1e-9), batches

    def _total_s(self, stage: int, step: PlacedStep, kv: FloatArray,
                 rows: FloatArray) -> FloatArray:
        """[...] seconds of a step, each layer with its own tensors below the device."""
        parts, head, embedding = self._stage_parts[stage]
        total = step.other_s + self._looked_up_s(rows, embedding) + self._head_s(step, head)
        for count, weights in parts:
            total = total + count * layer_s(step.layer.at(self._shares(weights, kv)),
                                            self.serial_share)
        return total

    def _looked_up_s(self, rows: FloatArray, tier: int | None) -> FloatArray | float:
        """Seconds to bring the embeddings of `rows` tokens, one by one."""
        if tier not in (HOST, DISK):
            return 0.0
        phase, looked_up = "decode", np.minimum(rows, self._problem.model.vocab_size)
        of_row = self.layers.row_bytes * (self.seconds_per_byte(UP, "weights", phase) or 0.0)
        if tier == DISK:
            of_row += sectors(self.layers.row_bytes) * (
                self.seconds_per_byte(READ, "weights", phase) or 0.0)
        return looked_up * of_row

    def _head_s(self, step: PlacedStep, weights: FloatArray) -> FloatArray:
        if step.head is None:
            return np.zeros_like(step.other_s)
        return layer_s(step.head.at(self._shares(weights, np.eye(3)[0])), self.serial_share)

    def _shares(self, weights: FloatArray, kv: FloatArray) -> FloatArray:
        """[..., 9] shares with `kv` [..., 3]."""
        own = np.broadcast_to(weights, kv.shape), np.broadcast_to(self.placement.hidden, kv.shape)
        return np.concatenate([own[0], kv, own[1]], axis=-1)
