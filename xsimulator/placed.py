"""Seconds and bytes of steps whose weights, entries and hidden states lie partly on host or disk
(FlexGen, arXiv:2303.06865, appendix A.3; docs/offload.md).

A layer of a step has five terms: copies up (host to device) and down, reads and writes of the disk,
and computing. It takes T = (1 - c) max(terms) + c sum(terms), with c = TimingFacts.serial_share.
The terms are linear in the nine shares of a placement, so that replay, linear program and screens
have the same numbers. A link's latency is left out: copies are of many megabytes."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray
from xgpt.core.placement import DEVICE, DISK, HOST, Placement, layer_tensors
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES, WEIGHT_BYTES
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes
from xsimulator.placed_terms import (
    COMPUTE,
    DOWN,
    HIDDEN,
    KV,
    READ,
    UP,
    WEIGHTS,
    PlacedStep,
    Terms,
    TermsForm,
)
from xsimulator.stage_times import StageTimes

PACKED_BYTES = 4.5 / 8  # of an element in 4 bits, with its part of scale and minimum


class PlacedSteps(StageTimes):
    """Terms of the steps of a pool's stages, for the options of a placement (device batch, order,
    host attention, bits, overlap), whatever its shares and budgets."""

    def __init__(self, problem: Problem, layers: LayerTimes, stages: Sequence[StageAssignment],
                 placement: Placement, sharers: int | None = None) -> None:
        """sharers: ranks of a node that share its tiers' rates (None: one on each device)."""
        super().__init__(layers, problem.cluster, stages)
        assert all(stage.tp_degree == 1 for stage in stages), f"{stages = }"
        cluster = problem.cluster
        self.placement, self._problem = placement, problem
        self._sharers = sharers or cluster.devices_per_node * (
            problem.copies if cluster.num_nodes == 1 else 1)
        facts = layers.timing.facts
        self.serial_share = facts.serial_share if placement.overlap else 1.0
        model = problem.model
        self._entry_elements = model.kv_elements_per_token_layer
        self._entry_bytes = PACKED_BYTES * self._entry_elements if placement.kv_bits == 4 else (
            self._entry_elements * problem.kv_item_bytes)
        self._width_bytes = model.num_heads * model.head_dim * DTYPE_BYTES[problem.dtype]
        self._weight_bytes = PACKED_BYTES if placement.weight_bits == 4 else (
            WEIGHT_BYTES[problem.weight_dtype])
        self._head_elements = model.head_params if problem.has_head else 0

    def encode_step(self, stage: int, requests: ArrayLike, tokens: ArrayLike | None = None,
                    batches: ArrayLike | None = None) -> PlacedStep:
        """The step that encodes `requests` with `tokens` in all (None: of mean length), as device
        batches of equal size. batches: their number (None: as few as hold the requests)."""
        count = np.asarray(requests, float)
        rows = count * self._problem.lengths.inputs.mean if tokens is None else (
            np.asarray(tokens, float) + 0 * count)
        count = count + 0 * rows
        loads, parts = self._loads(count, batches)
        share = self._narrowed / max(self.decoder_layers[-1], 1) * (
            stage == len(self.stages) - 1)
        ends = count * self.layers.head_rows
        rest_s = (1 - share) * self.layers.encode_rest_s(rows / parts, 1)
        if share:
            rest_s = rest_s + share * self.layers.encode_rest_s(ends / parts, 1)
        compute = parts * rest_s + count * self.mean_attention_s(count / parts)[1]
        form = TermsForm(self, compute, "encode")
        self._add_weights(form, self._layer_elements(rows, loads) * loads)
        self._add_rows(form, rows)
        return PlacedStep(int(self.decoder_layers[stage]), form.terms,
                          self._head(stage, ends, parts, loads, "encode"),
                          self._other_s(stage, rows, ends))

    def decode_step(self, stage: int, requests: ArrayLike, context: ArrayLike,
                    batches: ArrayLike | None = None) -> PlacedStep:
        """The step that decodes a token of each of `requests`, with `context` tokens each, the
        decoded one included. batches: as of `encode_step`."""
        context = np.asarray(context, float)
        count = np.asarray(requests, float) + 0 * context
        loads, parts = self._loads(count, batches)
        rows = count / parts
        attention = parts * self.layers.decode_attention_s(rows, context, 1)
        rest_s = parts * self.layers.decode_rest_s(rows, 1)
        form = TermsForm(self, rest_s, "decode")
        self._add_weights(form, self._layer_elements(count, loads) * loads)
        self._add_rows(form, count)
        entries = count * np.maximum(context - 1, 0.0)
        if self.placement.host_attention:
            form.add(READ, KV, entries * self._entry_bytes, DISK)
            on_host = attention if self._problem.cluster.device.kind == "cpu" else (
                parts * self.below_s(Operator.HOST_ATTENTION, rows, context))
            form.compute(KV, attention, DEVICE)
            form.compute(KV, on_host, HOST, DISK)
            for way in (UP, DOWN):  # queries down, results up
                form.add(way, KV, count * self._width_bytes, HOST, DISK, what="hidden")
        else:
            form.terms.fixed[..., COMPUTE] += attention
            form.copy(KV, entries * self._entry_bytes,
                      self._unpack_s(self.placement.kv_bits, entries * self._entry_elements))
        return PlacedStep(int(self.decoder_layers[stage]), form.terms,
                          self._head(stage, count, parts, loads, "decode"),
                          self._other_s(stage, count, count))

    def seconds_per_byte(self, term: int, what: str, phase: str) -> float | None:
        """See Links. The source's rate if it has one (TimingFacts.copy_rates), else the tier's,
        divided among the node's ranks."""
        tier = self._problem.cluster.tier("host" if term in (UP, DOWN) else "disk")
        if tier is None:
            return None
        rates, way = self._timing.facts.copy_rates, "up" if term in (UP, READ) else "down"
        link = tier.up if way == "up" else tier.down
        rate = rates.get(f"{what}-{tier.name}-{way}", link.bandwidth_bytes_per_s)
        return self._sharers / rates.get(f"{what}-{tier.name}-{way}-{phase}", rate)

    def below_s(self, operator: Operator, x: FloatArray, y: ArrayLike = 0.0) -> FloatArray:
        """Seconds of an operator on bytes below the device; by the roofline where the source has
        not measured it."""
        try:
            self._timing.reach(operator, 1)
        except XgptError:
            return self._roofline.operator_s(operator, x, y)
        return self._timing.operator_s(operator, x, y)

    @cached_property
    def _roofline(self) -> Roofline:
        own = self._problem
        return Roofline(own.model, own.cluster.device, own.dtype, weight_dtype=own.weight_dtype,
                        kv_dtype=own.kv_dtype)

    def _loads(self, count: FloatArray, batches: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
        """(times that a step loads the weights, its device batches)."""
        least = np.ceil(count / self.placement.device_batch) if batches is None else batches
        parts = np.maximum(np.asarray(least, float) + 0 * count, 1.0)
        return (parts if self.placement.order == "row" else np.ones_like(parts)), parts

    def _layer_elements(self, rows: FloatArray, loads: FloatArray) -> FloatArray:
        """[...] elements of a layer's products that `rows` use, for each time they are loaded: of a
        mixture only the experts that are reached."""
        fixed, expert = self._elements
        experts = self._problem.model.decoder.experts
        return fixed + (0 if experts is None else expert * experts.hit(rows / loads)) + 0 * rows

    @cached_property
    def _elements(self) -> tuple[int, int]:
        """(elements of a layer's products without experts, those of one expert)."""
        tensors = layer_tensors(self._problem.model)
        of_experts = [own.elements for own in tensors if own.name.startswith("expert.")]
        each = 0 if not of_experts else of_experts[0] + of_experts[1]
        return sum(own.elements for own in tensors) - sum(of_experts), each

    def _head(self, stage: int, rows: FloatArray, parts: FloatArray, loads: FloatArray,
              phase: str) -> Terms | None:
        if stage != len(self.stages) - 1 or not self._head_elements:
            return None
        form = TermsForm(self, parts * self.layers.head_s(rows / parts, 1), phase)
        self._add_weights(form, self._head_elements * loads)
        return form.terms

    def _add_weights(self, form: TermsForm, elements: FloatArray) -> None:
        """Adds the copies of `elements` of weights."""
        form.copy(WEIGHTS, elements * self._weight_bytes,
                  self._unpack_s(self.placement.weight_bits, elements))

    def _add_rows(self, form: TermsForm, tokens: FloatArray) -> None:
        """Adds the new entries of `tokens`, and their hidden states up and down; in row order these
        stay where they are used."""
        form.store(KV, tokens * self._entry_bytes,
                   self._unpack_s(self.placement.kv_bits, tokens * self._entry_elements))
        if self.placement.order == "zigzag":
            for way in (UP, DOWN):
                form.add(way, HIDDEN, tokens * self.layers.row_bytes, HOST)

    def _unpack_s(self, bits: int, elements: FloatArray) -> FloatArray | float:
        """Seconds to widen (or, as quickly, pack) elements that have `bits` below the device."""
        return 0.0 if bits != 4 else self.below_s(Operator.UNPACK, elements)

    def _other_s(self, stage: int, rows: FloatArray, ends: FloatArray) -> FloatArray:
        """[...] seconds of embedding `rows`, messages of rows and tokens, and overhead."""
        none = np.zeros((*rows.shape, len(self.stages)))
        total: FloatArray = self._with_ends(none, rows)[..., stage]
        if stage == len(self.stages) - 1:
            total = total + self.first_tokens_s(ends) - self.layers.head_s(ends, 1)
        return total
