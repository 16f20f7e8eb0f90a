"""Bytes of a rank's device, host and disk in a pool whose bytes lie on tiers: what the runner takes
of each (xrunner.offload), as whole tensors and requests or as linear functions of the shares."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray
from xgpt.core.placement import (
    DEVICE,
    DISK,
    GROUP,
    HEAD_TOKENS,
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
from xgpt.core.units import DTYPE_BYTES, WEIGHT_BYTES, activation_item_bytes
from xsimulator.memory import StageBytes, capacity_bytes, largest_rows
from xsimulator.placed_terms import HIDDEN, KV, WEIGHTS

STEP_PIECE = 2080  # rows of an encode step that a CPU computes at once (xrunner.models.stage_model)
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


class _Forms(NamedTuple):
    """Bytes of a request's entries in one layer on each tier; where attention reads them from
    below the device; and of its last block, on the host, by the tier of the others."""

    held: tuple[int, int, int]
    near: tuple[int, int, int]
    tails: tuple[int, int, int]


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
        self._pieces = cache(self._find_pieces)  # by stage and bits of weights

    def most_slots(self, options: Placement, capacity: int) -> int:
        """Most requests of `capacity` tokens whose entries all tiers of a rank could hold."""
        layers = max(stage.num_layers for stage in self._stages)
        return int(self.room.sum() / (layers * min(self._forms(options, capacity).held)))

    def rows(self, placement: Placement, slots: ArrayLike, capacity: int,
             groups: int | None = None) -> MemoryRows:
        """The linear rows of groups of `slots` [...] requests of at most `capacity` tokens, for
        the options of a placement, whatever its shares."""
        count, last = np.asarray(slots, float), len(self._stages)
        groups = groups or self._problem.fixed.value_of("decode_micro_batches") or last
        by_share, fixed = np.zeros((*count.shape, last, 3, 9)), np.zeros((*count.shape, last, 3))
        batch, hidden = np.minimum(placement.device_batch, count), self._hidden(count)
        forms = self._forms(placement, capacity)
        has_landing = self._is_far or placement.kv_bits == 4
        for stage, assigned in enumerate(self._stages):
            own, pieces = by_share[..., stage, :, :], self._pieces(stage, placement.weight_bits)
            entries = assigned.num_layers * groups * count
            own[..., DEVICE, WEIGHTS] = sum(one.whole for of in pieces for one in of)
            own[..., HOST, WEIGHTS + HOST] = sum(one.below for of in pieces for one in of)
            buffer, wide = _largest([one for of in pieces for one in of])
            for tier in (HOST, DISK):
                own[..., DEVICE, WEIGHTS + tier] = BUFFERS * buffer + (
                    wide if placement.weight_bits == 4 else 0)
            own[..., HOST, WEIGHTS + DISK] = BUFFERS * buffer * self._is_far
            for tier in range(3):
                own[..., HOST, KV + tier] = entries * forms.tails[tier]
                own[..., tier, KV + tier] += entries * forms.held[tier]
            own[..., DEVICE, HIDDEN] = hidden
            own[..., DEVICE if self._model.decoder.experts else HOST, HIDDEN + HOST] = hidden
            fixed[..., stage, DEVICE] = (self._vectors(stage) + self._activations(stage, batch)
                                         + BUFFERS * batch * max(forms.near[HOST:]))
            fixed[..., stage, HOST] = (BUFFERS * batch * forms.held[DISK] * has_landing
                                       + self._hidden(batch) * bool(self.room[HOST]))
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
        found, forms = np.zeros((len(self._stages), 3, 4)), self._forms(placement, capacity)
        ranges = queries_by_tier(slots, placement.kv)
        batch = [min(placement.device_batch, len(own)) for own in ranges]
        alone = min(placement.device_batch, slots)  # a device batch lies on one tier, as a whole
        hosted = len(queries_by_tier(slots, placement.hidden)[HOST])
        hidden = (slots, 0) if self._model.decoder.experts else (
            max(slots - hosted, alone), min(hosted + alone, slots) if hosted else 0)
        staged = BUFFERS * sectors(max(batch[tier] * forms.near[tier] for tier in (HOST, DISK)))
        landing = BUFFERS * sectors(batch[DISK] * forms.held[DISK]) * (
            self._is_far or placement.kv_bits == 4)
        for stage, assigned in enumerate(self._stages):
            own, layers = found[stage], assigned.num_layers
            self._add_weights(own, stage, placement)
            own[:, 1] = [groups * sectors(layers * len(part) * row)
                         for part, row in zip(ranges, forms.held, strict=True)]
            own[HOST, 1] += sum(groups * sectors(layers * len(part) * tail)
                                for part, tail in zip(ranges, forms.tails, strict=True))
            own[:HOST + 1, 2] = [self._hidden(count) for count in hidden]
            own[DEVICE, WORK] += staged + self._vectors(stage) + self._activations(
                stage, max(batch))
            own[HOST, WORK] += landing
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
        for tier, pieces in zip(tiers, self._pieces(stage, placement.weight_bits), strict=True):
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

    def _find_pieces(self, stage: int, bits: int) -> list[list[_Piece]]:
        """The pieces of each tensor of a stage, in order."""
        item, table = (sizes[own] for sizes, own in (
            (WEIGHT_BYTES, self._problem.weight_dtype), (DTYPE_BYTES, self._problem.dtype)))
        found, layer = list[list[_Piece]](), -1
        for tensor in self._tensors(stage):
            layer += tensor.name in ("qkv", "attention")  # the first of a layer
            if tensor.name == "embedding":
                found.append([_Piece(None, tensor.held_bytes(table), tensor.held_bytes(table))])
                continue
            is_head = tensor.name == "head"
            parts = range(0, tensor.outputs, HEAD_TOKENS if is_head else tensor.outputs)
            kind = tensor.name.rpartition(".")[0]
            found.append([_Piece(("head", first) if is_head else (layer, kind),
                                 own.held_bytes(item), own.held_bytes(item, bits))
                          for first in parts for own in [tensor._replace(
                              outputs=min(parts.step, tensor.outputs - first))]])
        return found

    def _vectors(self, stage: int) -> int:
        """Bytes of norms, biases, routers and positions, which stay on the device."""
        model, layers = self._model, self._stages[stage].num_layers
        count = layers * (model.decoder_layer_params - sum(
            own.elements for own in layer_tensors(model))) + 2 * model.hidden_size
        if stage == 0 and model.has_learned_positions:
            count += ((model.max_positions or 0) + 2) * model.hidden_size  # OPT has two more
        return max(count, 0) * DTYPE_BYTES[self._problem.dtype]

    def _activations(self, stage: int, batch: ArrayLike) -> FloatArray:
        """[...] bytes of a step of `batch` requests in one layer."""
        rows = largest_rows(self._problem.lengths.inputs, np.asarray(batch, float))
        if not self._is_far:
            rows = np.minimum(rows, STEP_PIECE)
        return np.asarray(self._of_step.step(rows, batch)[..., stage])

    def _hidden(self, count: ArrayLike) -> FloatArray:
        """[...] bytes of the hidden states of the `count` longest inputs while they are encoded."""
        problem = self._problem
        item = activation_item_bytes(problem.weight_dtype, problem.dtype, is_cpu=not self._is_far)
        return np.asarray(np.asarray(count, float) * problem.lengths.inputs.max
                          * self._model.hidden_size * item)

    def _forms(self, options: Placement, capacity: int) -> _Forms:
        """The bytes of a request of `capacity` tokens in one layer."""
        model, is_packed = self._model, options.kv_bits == 4
        token = model.kv_elements_per_token_layer * self._problem.kv_item_bytes
        blocks = -(-capacity // self._block)
        in_blocks = is_packed or (self._is_far and not options.host_attention)
        near = (capacity * token, (blocks * self._block if in_blocks else capacity) * token,
                blocks * self._block * token)
        tail = self._block * token
        packed = blocks * sectors(2 * model.kv_heads * self._block * -(-model.head_dim // GROUP)
                                  * (GROUP // 2 + 4))
        held = (near[DEVICE], packed, packed) if is_packed else near
        return _Forms(held, near, (0, tail if is_packed else 0, tail))


def _largest(pieces: Sequence[_Piece]) -> tuple[int, int]:
    """Bytes of the largest unit of these pieces below the device, and widened on it."""
    below, whole = defaultdict[object, int](int), defaultdict[object, int](int)
    for piece in pieces:
        if piece.unit is not None:
            below[piece.unit] += piece.below
            whole[piece.unit] += piece.whole
    return max(below.values(), default=0), max(whole.values(), default=0)
