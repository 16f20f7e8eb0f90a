"""Seconds and bytes of steps whose weights, entries and hidden states lie partly on host or disk
(FlexGen, arXiv:2303.06865, appendix A.3; docs/offload.md).

A layer of a step has five terms: copies up (host to device) and down, reads and writes of the disk,
and computing. It takes T = (1 - c) max(terms) + c sum(terms), with c = TimingFacts.serial_share.
The terms are linear in the nine shares of a placement, so that replay, linear program and screens
have the same numbers. Entries on disk are read and written request by request, so that a link's
latency counts for each; weights and copies of memory come in large pieces."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray
from xgpt.core.placement import DISK, HOST, Placement, kv_block_tokens, layer_tensors
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES, WEIGHT_BYTES
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes, onward_s
from xsimulator.placed_terms import (
    COMPUTE,
    DOWN,
    HIDDEN,
    KV,
    READ,
    UP,
    WEIGHTS,
    WRITE,
    PlacedStep,
    Terms,
)
from xsimulator.stage_times import TOKEN_BYTES, StageTimes

PACKED_BYTES = 4.5 / 8  # of an element in 4 bits, with its part of scale and minimum
_TIERS = {UP: (HOST, DISK), DOWN: (HOST, DISK), READ: (DISK,), WRITE: (DISK,)}  # by the link


class _Copy(NamedTuple):
    """[...] bytes of a kind over the links of some terms, at the rate of `what`; seconds of
    widening or packing; how often a link's latency counts."""

    kind: int
    what: str
    num_bytes: FloatArray
    links: tuple[int, ...]
    packed_s: FloatArray | float = 0.0
    times: FloatArray | float = 0.0


class PlacedSteps(StageTimes):
    """Terms of the steps of a pool's stages, for the options of a placement (device batch, order,
    host attention, bits, overlap), whatever its shares and budgets."""

    def __init__(self, problem: Problem, layers: LayerTimes, stages: Sequence[StageAssignment],
                 placement: Placement, sharers: int | None = None) -> None:
        """sharers: ranks of a node that share its tiers' rates (None: one on each device)."""
        super().__init__(layers, problem.cluster, stages)
        assert all(stage.tp_degree == 1 for stage in stages), f"{stages = }"
        cluster, self.placement, self._problem = problem.cluster, placement, problem
        self._sharers = sharers or cluster.devices_per_node * (
            problem.copies if cluster.num_nodes == 1 else 1)
        self.serial_share = layers.timing.facts.serial_share if placement.overlap else 1.0
        self._block_tokens = kv_block_tokens(
            problem.model.kv_heads, problem.model.head_dim, problem.kv_item_bytes)
        self._width_bytes = (problem.model.num_heads * problem.model.head_dim
                             * DTYPE_BYTES[problem.dtype])

    def encode_step(self, stage: int, requests: ArrayLike, tokens: ArrayLike | None = None,
                    batches: ArrayLike | None = None) -> PlacedStep:
        """The step that encodes `requests` with `tokens` in all (None: of mean length), as device
        batches of equal size. batches: their number (None: as few as hold the requests)."""
        count = np.asarray(requests, float)
        rows = np.asarray(count * self._problem.lengths.inputs.mean if tokens is None else (
            np.asarray(tokens, float) + 0 * count))
        loads, parts = self._loads(count, batches)
        is_last = stage == len(self.stages) - 1
        share = is_last * self._narrowed / max(self.decoder_layers[-1], 1)
        ends = count * self.layers.head_rows
        rest_s = (1 - share) * self.layers.encode_rest_s(rows / parts, 1)
        if share:
            rest_s = rest_s + share * self.layers.encode_rest_s(ends / parts, 1)
        attention_s = count * self.mean_attention_s(count / parts)[1]
        layer = self._terms("encode", parts * rest_s + attention_s, [
            self._weights(self._layer_elements(rows, loads)), *self._written(rows, count)])
        return self._step(stage, layer, "encode", rows, ends, (loads, parts))

    def decode_step(self, stage: int, requests: ArrayLike, context: ArrayLike,
                    batches: ArrayLike | None = None) -> PlacedStep:
        """The step that decodes a token of each of `requests`, with `context` tokens each, the
        decoded one included. batches: as of `encode_step`."""
        context = np.asarray(context, float)
        count = np.asarray(np.asarray(requests, float) + 0 * context)
        loads, parts = self._loads(count, batches)
        rows, joint = count / parts, parts
        if self._problem.model.decoder.experts is not None and self.placement.order == "zigzag":
            joint = np.ones_like(parts)  # an expert is taken once for all device batches
        fixed = joint * self.layers.decode_rest_s(count / joint, 1)
        on_device = on_host = parts * self.layers.decode_attention_s(rows, context, 1)
        read = [self._entries(count * np.maximum(context - 1, 0.0), (UP, READ), count)]
        if self.placement.host_attention:
            if self._problem.cluster.device.kind != "cpu":
                on_host = parts * self._below_s(Operator.HOST_ATTENTION, rows, context)
            # entries are read, queries go down and results up
            read = [read[0]._replace(links=(READ,)),
                    _Copy(KV, "hidden", count * self._width_bytes, (UP, DOWN))]
        layer = self._terms("decode", fixed, [
            self._weights(self._layer_elements(count, loads)),
            *self._written(count, count / self._block_tokens), *read])
        for tier, attention in enumerate((on_device, on_host, on_host)):
            layer.by_share[..., COMPUTE, KV + tier] += attention
        return self._step(stage, layer, "decode", count, count, (loads, parts))

    def _terms(self, phase: str, compute_s: FloatArray, copies: Sequence[_Copy]) -> Terms:
        """The terms of a layer that computes for `compute_s` [...] and makes `copies`."""
        shape = compute_s.shape
        found = Terms(np.zeros((*shape, 5, 9)), np.zeros((*shape, 5)), np.zeros((*shape, 4, 9)))
        found.fixed[..., COMPUTE] = compute_s
        for own in copies:
            for tier in (HOST, DISK):
                found.by_share[..., COMPUTE, own.kind + tier] += own.packed_s
            for term in own.links:
                if (seconds := self._copy_s(term, phase, own)) is None:
                    continue
                for tier in _TIERS[term]:
                    found.moved[..., term, own.kind + tier] += own.num_bytes
                    found.by_share[..., term, own.kind + tier] += seconds
        return found

    def _copy_s(self, term: int, phase: str, own: _Copy) -> FloatArray | None:
        """[...] seconds of a copy over the link of `term`: at the source's rate if it has one
        (TimingFacts.copy_rates), else at the tier's, divided among the node's ranks. None: there
        is no such link."""
        tier = self._problem.cluster.tier("host" if term in (UP, DOWN) else "disk")
        if tier is None:
            return None
        rates, way = self._timing.facts.copy_rates, "up" if term in (UP, READ) else "down"
        link, name = tier.up if way == "up" else tier.down, f"{own.what}-{tier.name}-{way}"
        rate = rates.get(f"{name}-{phase}", rates.get(name, link.bandwidth_bytes_per_s))
        return np.asarray(own.num_bytes * (self._sharers / rate)
                          + own.times * link.latency_s * (term in (READ, WRITE)))

    def _step(self, stage: int, layer: Terms, phase: str, rows: FloatArray, ends: FloatArray,
              loads: tuple[FloatArray, FloatArray]) -> PlacedStep:
        """The step with its head, embedding, messages and overhead. loads: as of `_loads`."""
        head, times, parts = None, *loads
        none = np.zeros((*rows.shape, len(self.stages)))
        # of a device batch each: a profile knows no times of a whole block's rows
        other_s = np.asarray(self.overhead_s + parts * (
            self._with_ends(none, rows / parts)[..., stage] - self.overhead_s))
        if stage == len(self.stages) - 1:
            if len(self.stages) > 1:
                other_s = other_s + onward_s(self.layers, ends, TOKEN_BYTES, self._links[-1])
            if self._problem.has_head:
                head = self._terms(phase, parts * self.layers.head_s(ends / parts, 1),
                                   [self._weights(self._problem.model.head_params * times)])
        return PlacedStep(int(self.decoder_layers[stage]), layer, head, other_s)

    def _weights(self, elements: FloatArray) -> _Copy:
        num_bytes = elements * WEIGHT_BYTES[self._problem.weight_dtype]
        own = _Copy(WEIGHTS, "weights", num_bytes, (UP, READ))
        return own if self.placement.weight_bits != 4 else self._packed(own, elements)

    def _entries(self, tokens: FloatArray, links: tuple[int, int],
                 times: FloatArray) -> _Copy:
        """A copy of the entries of `tokens`, in so many parts."""
        elements = tokens * self._problem.model.kv_elements_per_token_layer
        own = _Copy(KV, "kv", elements * self._problem.kv_item_bytes, links, times=times)
        return own if self.placement.kv_bits != 4 else self._packed(own, elements)

    def _packed(self, own: _Copy, elements: FloatArray) -> _Copy:
        """The copy in 4 bits; packing is taken for as quick as widening."""
        return own._replace(num_bytes=elements * PACKED_BYTES,
                            packed_s=self._below_s(Operator.UNPACK, elements))

    def _written(self, tokens: FloatArray, parts: FloatArray) -> list[_Copy]:
        """The new entries of `tokens`, and their hidden states up and down; in row order these
        stay where they are used."""
        hidden = _Copy(HIDDEN, "hidden", tokens * self.layers.row_bytes, (UP, DOWN))
        return [self._entries(tokens, (DOWN, WRITE), parts),
                *([hidden] if self.placement.order == "zigzag" else [])]

    def _below_s(self, operator: Operator, x: FloatArray, y: ArrayLike = 0.0) -> FloatArray:
        """Seconds of an operator on bytes below the device; by the roofline where the source has
        not measured it."""
        try:
            self._timing.reach(operator, 1)
        except XgptError:
            own = self._problem
            return Roofline(own.model, own.cluster.device, own.dtype, kv_dtype=own.kv_dtype
                            ).operator_s(operator, x, y)
        return self._timing.operator_s(operator, x, y)

    def _loads(self, count: FloatArray, batches: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
        """(times that a step loads the weights, its device batches)."""
        least = np.ceil(count / self.placement.device_batch) if batches is None else batches
        parts = np.maximum(np.asarray(least, float) + 0 * count, 1.0)
        return (parts if self.placement.order == "row" else np.ones_like(parts)), parts

    def _layer_elements(self, rows: FloatArray, loads: FloatArray) -> FloatArray:
        """[...] elements of a layer's products that `rows` use in all `loads`: of a mixture only
        the experts that are reached."""
        experts, tensors = self._problem.model.decoder.experts, layer_tensors(self._problem.model)
        routed = sum(own.elements for own in tensors if own.name.startswith("expert."))
        share = 1.0 if experts is None else experts.hit(rows / loads) / experts.count
        return (sum(own.elements for own in tensors) - routed * (1 - share)) * loads
