"""Step times of a pool whose bytes lie on tiers, as StepClock tabulates them: with whole tensors
and requests on each tier, and the device batches that the runner makes of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

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
from xsimulator.placed_terms import PlacedStep, Terms, layer_s
from xsimulator.stage_times import StageTimes

Grid = Callable[[FloatArray, FloatArray], FloatArray]
_WHOLE = np.eye(3)


def grids_of(times: StageTimes) -> tuple[list[Grid], list[Grid], list[int]]:
    """([grids] seconds of a layer's decode attention by requests and context, [grids] seconds of
    its compaction by rows and context, [stages] the grid of each stage). A degree has a grid; a
    placed stage has its own, with the whole step."""
    layers, degrees = times.layers, times.degrees
    if isinstance(times, PlacedTimes):
        stages = [*range(len(times.stages))]
        return ([partial(times.layer_decode_s, stage) for stage in stages],
                [partial(layers.compaction_s, degree=1)] * len(stages), stages)
    return ([partial(layers.decode_attention_s, degree=one) for one in degrees],
            [partial(layers.compaction_s, degree=one) for one in degrees],
            [degrees.index(stage.tp_degree) for stage in times.stages])


class PlacedTimes(PlacedSteps):
    """Seconds of each stage of a placed pool. A decode step's whole time is in the grids; an encode
    step's is in the rows, as of requests of mean length, but its head's, in the ends."""

    def __init__(self, problem: Problem, layers: LayerTimes, stages: Sequence[StageAssignment],
                 placement: Placement, slots: int) -> None:
        """slots: most requests of a group at a time, which decide whose entries lie where."""
        super().__init__(problem, layers, stages, placement)
        self._slots, model = slots, problem.model
        sizes = [tensor.elements for tensor in layer_tensors(model)]
        self._tiers = [stage_tiers(model, stage.num_layers, placement.weights,
                                   is_first=stage is stages[0], is_last=stage is stages[-1])
                       for stage in stages]
        # [stages] numbers of layers by their shares of weights
        self._kinds = [Counter(tuple(np.bincount(own, sizes, 3) / sum(sizes))
                               for own in tiers.layers) for tiers in self._tiers]

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
        kv, batches = self._by_tier(count, self._slots - count)
        return np.stack([self._total_s(stage, self.encode_step(
            stage, count, rows, batches)._replace(head=None), kv, rows)
            for stage in range(len(self.stages))], axis=-1)

    def ends_s(self, queries: ArrayLike) -> FloatArray:
        """Seconds of the head for the last tokens of `queries` inputs."""
        count, last = np.asarray(queries, float), len(self.stages) - 1
        kv, batches = self._by_tier(count, self._slots - count)
        head = self.encode_step(last, count, batches=batches).head
        return self._head_s(last, head, kv) if head is not None else np.zeros_like(count)

    def decode_s(self, queries: ArrayLike, context: ArrayLike, *, moved: ArrayLike = 0.0,
                 ) -> FloatArray:
        """[..., stages] seconds of a decode step, without the compaction of `moved` rows."""
        sizes = np.asarray(queries, float), np.asarray(context, float)
        return np.stack([self.layer_decode_s(stage, *sizes) * layers for stage, layers in enumerate(
            self.decoder_layers)], axis=-1)

    def layer_decode_s(self, stage: int, queries: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of a decode step of a stage, for each of its layers."""
        kv, batches = self._by_tier(queries, np.zeros_like(queries))
        step = self.decode_step(stage, queries, context, batches)
        return np.asarray(self._total_s(stage, step, kv, queries) / self.decoder_layers[stage])

    def _by_tier(self, count: FloatArray, first: FloatArray) -> tuple[FloatArray, FloatArray]:
        """([..., 3] share of `count` requests whose entries lie on each tier, [...] device batches)
        in slots from `first` on: decoded requests have the first slots, encoded ones the last."""
        starts, stops = np.array([(own.start, own.stop) for own in queries_by_tier(
            self._slots, self.placement.kv)], float).T
        first = np.maximum(first, 0.0)[..., None]
        held = np.maximum(np.minimum(stops, first + count[..., None])
                          - np.maximum(starts, first), 0.0)
        batches = np.ceil(held / self.placement.device_batch - 1e-9).sum(-1)
        return held / np.maximum(held.sum(-1, keepdims=True), 1e-9), batches

    def _total_s(self, stage: int, step: PlacedStep, kv: FloatArray,
                 rows: FloatArray) -> FloatArray:
        """[...] seconds of a step, each layer with its own tensors below the device."""
        total = step.other_s + self._looked_up_s(rows, self._tiers[stage].embedding)
        if step.head is not None:
            total = total + self._head_s(stage, step.head, kv)
        for weights, count in self._kinds[stage].items():
            total = total + count * self._layer_s(step.layer, np.array(weights), kv)
        return total

    def _head_s(self, stage: int, head: Terms, kv: FloatArray) -> FloatArray:
        return self._layer_s(head, _WHOLE[self._tiers[stage].head or 0], kv)

    def _layer_s(self, terms: Terms, weights: FloatArray, kv: FloatArray) -> FloatArray:
        shares = [np.broadcast_to(own, kv.shape) for own in (weights, kv, self.placement.hidden)]
        return layer_s(terms.at(np.concatenate(shares, axis=-1)), self.serial_share)

    def _looked_up_s(self, rows: FloatArray, tier: int | None) -> FloatArray | float:
        """Seconds to bring the embeddings of `rows` tokens, one by one, from below the device."""
        own = self._problem.cluster.tier({HOST: "host", DISK: "disk"}.get(tier or 0, ""))
        if own is None:
            return 0.0
        of_row = own.up.latency_s + sectors(self.layers.row_bytes) / own.up.bandwidth_bytes_per_s
        return np.minimum(rows, self._problem.model.vocab_size) * of_row
