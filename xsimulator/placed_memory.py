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
    SECTOR,
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
        self._sizes = cache(self._find_sizes)  # by stage and bits of weights

    def most_slots(self, options: Placement, capacity: int) -> int:
        """Most requests of `capacity` tokens whose entries all tiers of a rank could hold."""
        layers = max(stage.num_layers for stage in self._stages)
        return int(self.room.sum() / (layers * min(self._forms(options, capacity).held)))

    def rows(self, placement: Placement, slots: ArrayLike, capacity: int,
             groups: int) -> MemoryRows:
        """The linear rows of `groups` of `slots` [...] requests of at most `capacity` tokens, for
        the options of a placement, whatever its shares."""
        count, last = np.asarray(slots, float), len(self._stages)
        lasting, buffers, fixed = self._parts(placement, count, capacity, groups)
        by_share = lasting + buffers
        if not self.room[HOST]:  # the device holds what is kept of entries on disk
            by_share[..., DEVICE, :] += by_share[..., HOST, :]
            fixed[..., DEVICE] += fixed[..., HOST]
        there = [tier for tier in range(3) if self.room[tier]]
        return MemoryRows(
            by_share[..., there, :].reshape(*count.shape, last * len(there), 9),
            fixed[..., there].reshape(*count.shape, last * len(there)),
            np.tile(self.room[there], last), tuple(there) * last)

    def held(self, placement: Placement, slots: int, capacity: int, groups: int) -> FloatArray:
        """[stages, 3 tiers, 4] bytes of weights (on disk the whole file), entries, hidden states
        and work (buffers, norms, activations), of whole tensors and requests."""
        found = np.zeros((len(self._stages), 3, 4))
        kv, hidden = ([len(part) / slots for part in queries_by_tier(slots, own)]
                      for own in (placement.kv, placement.hidden))
        for stage, (lasting, buffers, fixed) in enumerate(zip(*self._parts(
                placement, np.array(float(slots)), capacity, groups), strict=True)):
            shares, sizes = np.zeros(9), self._sizes(stage, placement.weight_bits)
            tiers = np.array(tier_of_tensors(
                [own.elements for own in self._tensors(stage)], placement.weights))
            shares[:KV] = [own[tiers == tier].sum() / own.sum() for tier, own in enumerate(sizes)]
            shares[KV:] = *kv, *hidden
            found[stage, :, :WORK] = (lasting * shares).reshape(3, 3, 3).sum(-1)
            needed = (buffers * (shares > 0)).reshape(3, 3, 3).max(-1).sum(-1)
            found[stage, :, WORK] = fixed + needed
        found[:, DISK] = found[:, DISK][:, [WORK, 1, 2, 0]] * bool(self.room[DISK])
        if not self._is_far and not any(shares[HOST] for shares in (
                placement.weights, placement.kv, placement.hidden)):
            found[:, DEVICE] += found[:, HOST]  # the runner has one arena for both
            found[:, HOST] = 0.0
        return found

    def _parts(self, placement: Placement, count: FloatArray, capacity: int,
               groups: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[..., stages, 3 tiers, 9] bytes that lie there, by share; as many of buffers, which are
        there with any share; and [..., stages, 3] others: norms, activations, the file of weights.
        A buffer of weights has room for the largest unit of all, wherever it lies."""
        shape, forms = (*count.shape, len(self._stages), 3), self._forms(placement, capacity)
        lasting, buffers, fixed = np.zeros((*shape, 9)), np.zeros((*shape, 9)), np.zeros(shape)
        batch, is_packed = np.minimum(placement.device_batch, count), placement.weight_bits == 4
        has_landing = self._is_far or placement.kv_bits == 4
        for stage, assigned in enumerate(self._stages):
            own, more = lasting[..., stage, :, :], buffers[..., stage, :, :]
            for tier, size in enumerate(self._sizes(stage, placement.weight_bits).sum(-1)):
                own[..., tier, WEIGHTS + tier] = size * (tier != DISK)
            whole, below = self._unit(placement.weight_bits)
            entries = assigned.num_layers * groups * count
            for tier in range(3):
                own[..., HOST, KV + tier] = entries * forms.tails[tier]
                own[..., tier, KV + tier] += entries * forms.held[tier]
            for tier in (HOST, DISK):
                more[..., DEVICE, WEIGHTS + tier] = BUFFERS * below + whole * is_packed
                more[..., DEVICE, KV + tier] = BUFFERS * batch * forms.near[tier]
            more[..., HOST, WEIGHTS + DISK] = BUFFERS * below * self._is_far
            more[..., HOST, KV + DISK] = BUFFERS * batch * forms.held[DISK] * has_landing
            own[..., DEVICE, HIDDEN] = self._hidden(count)
            own[..., DEVICE if self._model.decoder.experts else HOST,
                HIDDEN + HOST] = self._hidden(count)
            # a device batch lies on one tier, as a whole
            more[..., :DISK, HIDDEN + HOST] = self._hidden(batch)[..., None]
            fixed[..., stage, :DISK] = (2 * groups + BUFFERS) * SECTOR  # ends of sectors
            fixed[..., stage, DEVICE] += self._vectors(stage) + self._activations(stage, batch)
            fixed[..., stage, DISK] = self._sizes(stage, placement.weight_bits)[DISK].sum()
        return lasting, buffers, fixed

    def _tensors(self, stage: int) -> list[WeightTensor]:
        return stage_tensors(self._model, self._stages[stage].num_layers, is_first=stage == 0,
                             is_last=stage == len(self._stages) - 1)

    def _bytes(self, tensor: WeightTensor, bits: int) -> tuple[int, int]:
        """Bytes of a product on the device, and below it."""
        if tensor.name == "embedding":
            return (tensor.held_bytes(DTYPE_BYTES[self._problem.dtype]),) * 2
        item = WEIGHT_BYTES[self._problem.weight_dtype]
        return tensor.held_bytes(item), tensor.held_bytes(item, bits)

    def _find_sizes(self, stage: int, bits: int) -> FloatArray:
        """[3 tiers, tensors] bytes of each tensor of a stage, were it there."""
        sizes = np.array([self._bytes(own, bits) for own in self._tensors(stage)], float).T
        return sizes[[DEVICE, HOST, HOST]]

    def _unit(self, bits: int) -> FloatArray:
        """[2] bytes on the device, and below it, of the largest unit that is brought at once: the
        products of a layer or of an expert, or a piece of the head."""
        units = defaultdict[str, FloatArray](lambda: np.zeros(2))
        head = WeightTensor("head", min(self._model.vocab_size, HEAD_TOKENS),
                            self._model.hidden_size)
        for tensor in (*layer_tensors(self._model), *([head] if self._model.head_params else [])):
            units[tensor.name if tensor is head else tensor.name.rpartition(".")[0]] += (
                self._bytes(tensor, bits))
        return np.asarray(np.max([*units.values()], axis=0))

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
