"""Bytes of a rank's device, host and disk in a pool whose bytes lie on tiers: what the runner takes
of each (xrunner.offload), as whole tensors and requests or as linear functions of the shares."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray
from xgpt.core.placement import (
    DEVICE,
    DISK,
    HOST,
    Placement,
    WeightTensor,
    kv_block_tokens,
    layer_tensors,
    queries_by_tier,
    sectors,
    stage_tensors,
    tier_of_tensors,
)
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES, WEIGHT_BYTES
from xsimulator.memory import StageBytes, capacity_bytes, largest_rows
from xsimulator.placed import PACKED_BYTES
from xsimulator.placed_terms import HIDDEN, KV, WEIGHTS

# On a CPU as xrunner.ops.output_head cuts the head, and xrunner.models.stage_model an encode step
HEAD_PIECE, STEP_PIECE = 8192, 2080
BUFFERS = 2  # of weights, and of entries: one is computed with while the other is filled
WORK = 3  # place of buffers and activations beside weights, entries and hidden states


class MemoryRows(NamedTuple):
    """Memory of all stages and tiers: `by_share` [..., rows, 9] times the shares, plus `fixed`
    [..., rows], is at most `capacity` [rows]. `tiers` [rows]."""

    by_share: FloatArray
    fixed: FloatArray
    capacity: FloatArray
    tiers: tuple[int, ...]


class _Piece(NamedTuple):
    """A product, or a part of the head: bytes on the device, and below it. `unit`: what is brought
    together with it; None for the embedding, whose rows are read singly."""

    unit: object
    whole: int
    below: int


class PlacedMemory:
    """Bytes by tier of the stages of one replica. `room` [3]: bytes of each tier that a rank may
    have; 0 without the tier."""

    def __init__(self, problem: Problem, stages: Sequence[StageAssignment]) -> None:
        cluster, model = problem.cluster, problem.model
        self._problem, self._stages, self._model = problem, stages, model
        self._is_far = cluster.device.kind != "cpu"
        ranks = cluster.devices_per_node * (problem.copies if cluster.num_nodes == 1 else 1)
        below = (cluster.tier(name) for name in ("host", "disk"))
        self.room = np.array([capacity_bytes(cluster.device), *(
            0 if tier is None else tier.memory_bytes // ranks for tier in below)], float)
        self._of_step = StageBytes(problem, stages)
        self._block = kv_block_tokens(model.kv_heads, model.head_dim, problem.kv_item_bytes)

    def most_slots(self, options: Placement, capacity: int) -> int:
        """Most requests of `capacity` tokens whose entries all tiers of a rank could hold."""
        layers = max(stage.num_layers for stage in self._stages)
        return int(self.room.sum() / (layers * min(self._rows_of(options, capacity))))

    def rows(self, placement: Placement, slots: ArrayLike, capacity: int,
             groups: int | None = None) -> MemoryRows:
        """The linear rows of groups of `slots` [...] requests of at most `capacity` tokens, for
        the options of a placement, whatever its shares."""
        count, last = np.asarray(slots, float), len(self._stages)
        groups = groups or self._problem.fixed.value_of("decode_micro_batches") or last
        by_share, fixed = np.zeros((*count.shape, last, 3, 9)), np.zeros((*count.shape, last, 3))
        batch, hidden = np.minimum(placement.device_batch, count), self._hidden(count)
        rows, tail = self._rows_of(placement, capacity), self._tail_bytes
        for stage, assigned in enumerate(self._stages):
            own, pieces = by_share[..., stage, :, :], self._pieces(stage, placement)
            entries = assigned.num_layers * groups * count
            own[..., DEVICE, WEIGHTS] = sum(one.whole for of in pieces for one in of)
            own[..., HOST, WEIGHTS + HOST] = sum(one.below for of in pieces for one in of)
            buffer, wide = _largest([one for of in pieces for one in of])
            for tier in (HOST, DISK):
                own[..., DEVICE, WEIGHTS + tier] = BUFFERS * buffer + (
                    wide if placement.weight_bits == 4 else 0)
            own[..., HOST, WEIGHTS + DISK] = BUFFERS * buffer * self._is_far
            for tier in range(3):
                own[..., tier, KV + tier] = entries * rows[tier]
            own[..., HOST, KV + DISK] = entries * tail
            own[..., DEVICE, HIDDEN], own[..., HOST, HIDDEN + HOST] = hidden, hidden
            fixed[..., stage, DEVICE] = (self._vectors(stage) + self._activations(stage, batch)
                                         + BUFFERS * batch * max(rows[HOST:]))
            fixed[..., stage, HOST] = BUFFERS * batch * rows[DISK] * self._is_far
            fixed[..., stage, DISK] = sum(one.below for of in pieces for one in of)
        if not self.room[HOST]:  # the device holds what is kept of entries on disk
            by_share[..., DEVICE, :] += by_share[..., HOST, :]
            fixed[..., DEVICE] += fixed[..., HOST]
        there = [tier for tier in range(3) if self.room[tier]]
        return MemoryRows(
            by_share[..., there, :].reshape(*count.shape, last * len(there), 9),
            fixed[..., there].reshape(*count.shape, last * len(there)),
            np.tile(self.room[there], last), tuple(there) * last)

    def held(self, placement: Placement, slots: int, capacity: int, groups: int) -> FloatArray:
        """[stages, 3 tiers, 4] bytes of weights, entries, hidden states and work (buffers, norms,
        activations; on disk the rest of the file of weights), of whole tensors and requests."""
        found, rows = np.zeros((len(self._stages), 3, 4)), self._rows_of(placement, capacity)
        ranges = queries_by_tier(slots, placement.kv)
        batch = [min(placement.device_batch, len(own)) for own in ranges]
        hosted = len(queries_by_tier(slots, placement.hidden)[HOST])
        landing, staged = (sectors(batch[tier] * rows[tier]) for tier in (DISK, HOST))
        for stage, assigned in enumerate(self._stages):
            own, layers = found[stage], assigned.num_layers
            self._add_weights(own, stage, placement)
            own[:, 1] = [groups * sectors(layers * len(part) * row)
                         for part, row in zip(ranges, rows, strict=True)]
            own[HOST, 1] += groups * sectors(layers * len(ranges[DISK]) * self._tail_bytes)
            own[DEVICE, 2], own[HOST, 2] = self._hidden(slots - hosted), self._hidden(hosted)
            own[DEVICE, WORK] += (BUFFERS * max(staged, landing) + self._vectors(stage)
                                  + self._activations(stage, max(batch)))
            own[HOST, WORK] += BUFFERS * landing * self._is_far
        if not self.room[DISK]:
            found[:, DISK, WORK] = 0.0
        if not self._is_far and not any(shares[HOST] for shares in (
                placement.weights, placement.kv, placement.hidden)):
            found[:, DEVICE] += found[:, HOST]  # the runner has one arena for both
            found[:, HOST] = 0.0
        return found

    def _add_weights(self, held: FloatArray, stage: int, placement: Placement) -> None:
        """Adds a stage's weights and their buffers to `held` [3, 4]."""
        tiers = tier_of_tensors([own.elements for own in self._tensors(stage)], placement.weights)
        lent = dict[int, list[_Piece]]({HOST: [], DISK: []})
        for tier, pieces in zip(tiers, self._pieces(stage, placement), strict=True):
            held[tier, 0] += sum(own.below if tier else own.whole for own in pieces)
            held[DISK, WORK] += sum(own.below for own in pieces) * (tier != DISK)
            if tier:
                lent[tier] += pieces
        buffer, wide = _largest(lent[HOST] + lent[DISK])
        packed = placement.weight_bits == 4
        held[DEVICE, WORK] += BUFFERS * buffer + packed * wide
        held[HOST, WORK] += BUFFERS * _largest(lent[DISK])[0] * self._is_far

    def _tensors(self, stage: int) -> list[WeightTensor]:
        return stage_tensors(self._model, self._stages[stage].num_layers, is_first=stage == 0,
                             is_last=stage == len(self._stages) - 1)

    def _pieces(self, stage: int, placement: Placement) -> list[list[_Piece]]:
        """The pieces of each tensor of a stage, in order."""
        item, bits = WEIGHT_BYTES[self._problem.weight_dtype], placement.weight_bits
        each, found = len(layer_tensors(self._model)), list[list[_Piece]]()
        place = 0
        for tensor in self._tensors(stage):
            if tensor.name == "embedding":
                table = sectors(tensor.elements * DTYPE_BYTES[self._problem.dtype])
                found.append([_Piece(None, table, table)])
            elif tensor.name == "head":
                most = tensor.outputs if self._is_far else HEAD_PIECE
                parts = [tensor._replace(outputs=min(most, tensor.outputs - first))
                         for first in range(0, tensor.outputs, most)]
                found.append([_Piece(("head", first), part.held_bytes(item),
                                     part.held_bytes(item, bits))
                              for first, part in enumerate(parts)])
            else:
                kind = tensor.name.rpartition(".")[0]
                found.append([_Piece((place // each, kind), tensor.held_bytes(item),
                                     tensor.held_bytes(item, bits))])
                place += 1
        return found

    def _vectors(self, stage: int) -> int:
        """Bytes of norms, biases, routers and positions, which stay on the device."""
        model, layers = self._model, self._stages[stage].num_layers
        count = layers * (model.decoder_layer_params - sum(
            own.elements for own in layer_tensors(model))) + 2 * model.hidden_size
        if stage == 0:
            count += model.embedding_params - model.vocab_size * model.hidden_size
        return max(count, 0) * DTYPE_BYTES[self._problem.dtype]

    def _activations(self, stage: int, batch: ArrayLike) -> FloatArray:
        """[...] bytes of a step of `batch` requests in one layer."""
        rows = largest_rows(self._problem.lengths.inputs, np.asarray(batch, float))
        if not self._is_far:
            rows = np.minimum(rows, STEP_PIECE)
        return np.asarray(self._of_step.step(rows, batch)[..., stage])

    def _hidden(self, count: ArrayLike) -> FloatArray:
        """[...] bytes of the hidden states of `count` requests while they are encoded."""
        rows = largest_rows(self._problem.lengths.inputs, np.asarray(count, float))
        return np.asarray(rows * self._model.hidden_size * DTYPE_BYTES[self._problem.dtype])

    def _rows_of(self, options: Placement, capacity: int) -> tuple[int, int, int]:
        """Bytes of a request's entries in one layer on each tier."""
        blocks = -(-capacity // self._block) * self._block
        is_copied = self._is_far and not options.host_attention
        tokens = (capacity, blocks if is_copied else capacity, blocks)
        below = PACKED_BYTES if options.kv_bits == 4 else self._problem.kv_item_bytes
        items = (self._problem.kv_item_bytes, below, below)
        elements = self._model.kv_elements_per_token_layer
        on_device, on_host, on_disk = (
            int(own * elements * item) for own, item in zip(tokens, items, strict=True))
        return on_device, on_host, on_disk

    @property
    def _tail_bytes(self) -> int:
        """Bytes of a request's last block of entries on disk in one layer, which is in memory."""
        return (self._block * self._model.kv_elements_per_token_layer
                * self._problem.kv_item_bytes)


def _largest(pieces: Sequence[_Piece]) -> tuple[int, int]:
    """Bytes of the largest unit of these pieces below the device, and widened on it."""
    below, whole = defaultdict[object, int](int), defaultdict[object, int](int)
    for piece in pieces:
        if piece.unit is not None:
            below[piece.unit] += piece.below
            whole[piece.unit] += piece.whole
    return max(below.values(), default=0), max(whole.values(), default=0)
