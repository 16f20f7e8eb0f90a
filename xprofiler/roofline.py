"""The analytic roofline as a `TimingSource`, for planning on a laptop (paper section 3 measures
instead; docs/profile.md says what a sum of operators misses).

Also the least work of an operator, operations and bytes of memory traffic. With a device's Peaks it
gives a floor below which no kernel's time can lie (Williams et al., CACM 52(4), 2009); floor over
measured time is the share of the device that is reached. All of it is for one rank of a
tensor-parallel group, and for one layer of an operator of layers. Symbols of the docstrings, in
elements:

    H hidden size    A heads x head size    K key and value elements of a token    I MLP columns
    V vocabulary     t tensor-parallel degree    b bytes of an element

Weights are counted once, vectors (norms, biases) not at all, and nothing that a fused kernel could
keep on the chip: attention scores, the MLP's inner columns, logits. A multiply-add is two
operations. Data that stay in a cache between two calls can beat the floor; in a run's steps the
weights do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Device, Link
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, INT8
from xprofiler.constants import RooflineConstants, engine_constants, engine_errors
from xprofiler.kernels import AttentionKernels, Kernels, LinkTimes, RowKernels
from xprofiler.profile import Peaks
from xprofiler.source_errors import SourceErrors, with_products_of
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts


class Roofline:
    """Times of one model's operators on one device type, as `engine` takes them. `constants`: those
    of the engine on the device unless given. `weight_dtype`: as
    what the layers' weights are multiplied, `kv_dtype`: as what entries of the cache are held; "":
    as `dtype`."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str,
                 constants: RooflineConstants | None = None, *, engine: str = OWN_ENGINE,
                 weight_dtype: str = "", kv_dtype: str = "") -> None:
        assert dtype in DTYPE_BYTES, f"{dtype = }"
        self._of = (model, device, dtype)
        self._engine, self._held_as = engine, (weight_dtype, kv_dtype)
        self._kind = "analytic" if constants is None else "calibrated"
        self.constants = constants or engine_constants(device, engine)
        self.kernels = Kernels(device, dtype, self.constants, weight_dtype, kv_dtype)
        self.links = LinkTimes(self.kernels)
        rows, attention = RowKernels(model, self.kernels), AttentionKernels(model, self.kernels)
        self._rows: dict[Operator, Callable[[FloatArray, int], FloatArray]] = {
            Operator.LAYER_REST: rows.layer_rest_s, Operator.DECODE_REST: rows.layer_rest_s,
            Operator.ENCODER_REST: rows.block_s,
            Operator.CROSS_KV: rows.cross_kv_s, Operator.HEAD: rows.head_s,
            Operator.EMBED: rows.embed_s}
        self._attention: dict[Operator, Callable[[FloatArray, FloatArray, int], FloatArray]] = {
            Operator.ENCODE_ATTENTION: attention.encode_s,
            Operator.DECODE_ATTENTION: attention.cache_s,
            Operator.CROSS_ATTENTION: attention.cache_s,
            Operator.KV_COMPACTION: attention.compaction_s}
        # kernels read each query's own context; a device's rates are its share already
        self.facts = TimingFacts(step_overhead_s=self.constants.step_overhead_s, is_padded=False)

    def with_constants(self, constants: RooflineConstants) -> Roofline:
        """The same model on the same device, with other constants."""
        return Roofline(*self._of, constants, engine=self._engine,
                        weight_dtype=self._held_as[0], kv_dtype=self._held_as[1])

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        size, second = np.asarray(x, float), np.asarray(y, float)
        if operator in self._rows:
            if second.ndim and size.shape != second.shape:
                size, second = np.broadcast_arrays(size, second)
            seconds = self._rows[operator](size, tp_degree)
        else:
            seconds = self._attention[operator](size, second, tp_degree)
        return np.where(size > 0, seconds, 0.0)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        if kind is MessageKind.ALL_REDUCE:
            return (self.links.collective_s(num_bytes, tp_degree, link)
                    + self.links.synchronisation_s(tp_degree))
        if kind is MessageKind.TRANSFER:
            return self.links.transfer_s(num_bytes, link)
        return self.links.handover_s(num_bytes, link)

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """No measurements, so no limit to them."""
        return Reach(math.inf, math.inf)

    def errors(self) -> SourceErrors:
        """How far off these times are, by group of operators."""
        errors = engine_errors(self._of[1], self._engine)
        return with_products_of(INT8, errors) if self._held_as[0] == INT8 else errors

    def provenance(self) -> str:
        """One line for reports."""
        model, device, dtype = self._of
        of = "" if self._engine == OWN_ENGINE else f" as {self._engine} takes it"
        weights = f", weights {self._held_as[0]}" if self._held_as[0] in EIGHT_BITS else ""
        return f"{self._kind} roofline of {model.name} on {device.name}{of}, {dtype}{weights}"


class LeastWork(NamedTuple):
    """Operations and bytes, arrays of one shape; no work at x = 0."""

    flops: FloatArray
    num_bytes: FloatArray


def work(model: ModelSpec, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
         tp_degree: int, item_bytes: int) -> LeastWork:
    """Least work of `operator` at (x, y), broadcast; x and y as in `Operator`, `item_bytes` of an
    element of weights, activations and cache alike. ENCODE_ATTENTION is one query's share, so its
    y (queries together) does not change it."""
    assert tp_degree >= 1 and item_bytes >= 1, f"{tp_degree = } {item_bytes = }"
    xs, ys = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
    counted = _COUNTS[operator](model, xs, ys, tp_degree)
    return LeastWork(flops=np.where(xs > 0, counted.flops, 0.0),
                     num_bytes=np.where(xs > 0, counted.num_bytes * item_bytes, 0.0))


def floor_s(work: LeastWork, peaks: Peaks) -> FloatArray:
    """Seconds that `work` takes at least: max(operations / peak, bytes / bandwidth)."""
    floor: FloatArray = np.maximum(*_limits_s(work, peaks))
    return floor


def bound_by(work: LeastWork, peaks: Peaks) -> NDArray[np.str_]:
    """"compute" or "memory", whichever of the two floors is the higher."""
    compute_s, memory_s = _limits_s(work, peaks)
    return np.where(compute_s > memory_s, "compute", "memory")


def _limits_s(work: LeastWork, peaks: Peaks) -> tuple[FloatArray, FloatArray]:
    return work.flops / peaks.flops_per_s, work.num_bytes / peaks.bandwidth_bytes_per_s


def _encode_attention(model: ModelSpec, x: FloatArray, _y: FloatArray, t: int) -> LeastWork:
    """Scores and their product with the values: 4 A / t operations a pair of tokens, x (x + 1) / 2
    pairs where attention is causal, x^2 in an encoder. Bytes: queries in, keys and values in,
    result out, b x (2 A + K) / t."""
    pairs = x * x if model.is_encoder_decoder else x * (x + 1) / 2
    moved = x * (2 * _heads_width(model) + model.kv_elements_per_token_layer) / t
    return LeastWork(flops=4 * pairs * _heads_width(model) / t, num_bytes=moved)


def _cached_attention(model: ModelSpec, x: FloatArray, y: FloatArray, t: int) -> LeastWork:
    """x queries of one token, y cached tokens each: 4 x y A / t operations; bytes of the cache's
    keys and values, of the queries and of the result, b x (y K + 2 A) / t."""
    width = _heads_width(model)
    moved = x * (y * model.kv_elements_per_token_layer + 2 * width) / t
    return LeastWork(flops=4 * x * y * width / t, num_bytes=moved)


def _layer_rest(model: ModelSpec, x: FloatArray, _y: FloatArray, t: int) -> LeastWork:
    """M = H (2 A + K) + (2 or, gated, 3) H I weights, with cross-attention 2 H A more: 2 x M / t
    operations. Bytes: weights b M / t; the residual stream in and out, 2 b x H on every rank;
    queries, keys and values out and attention's result in, b x (2 A + K) / t (with
    cross-attention, 2 A more). Of a mixture of experts a token's own are counted as operations,
    and as bytes those that x tokens go to in the mean."""
    return _layer(model, x, t, attentions=2 if model.is_encoder_decoder else 1)


def _encoder_rest(model: ModelSpec, x: FloatArray, _y: FloatArray, t: int) -> LeastWork:
    """An encoder layer: as LAYER_REST of a decoder-only model."""
    return _layer(model, x, t, attentions=1)


def _layer(model: ModelSpec, x: FloatArray, t: int, attentions: int) -> LeastWork:
    hidden = model.hidden_size
    passing = 2 * attentions * _heads_width(model) + model.kv_elements_per_token_layer
    matrices, experts = 3 if model.is_gated_mlp else 2, model.decoder.experts
    active = hidden * (passing + matrices * model.mlp_columns)
    read = active if experts is None else hidden * (
        passing + matrices * experts.inner * experts.hit(x))
    moved = read / t + x * (2 * hidden + passing / t)
    return LeastWork(flops=2 * x * active / t, num_bytes=moved)


def _cross_kv(model: ModelSpec, x: FloatArray, _y: FloatArray, t: int) -> LeastWork:
    """Keys and values of the encoder's output: 2 x H K / t operations; bytes of the weights, the
    input and the result, b (H K / t + x H + x K / t)."""
    kv, hidden = model.kv_elements_per_token_layer, model.hidden_size
    return LeastWork(flops=2 * x * hidden * kv / t,
                     num_bytes=hidden * kv / t + x * hidden + x * kv / t)


def _embed(model: ModelSpec, x: FloatArray, _y: FloatArray, _t: int) -> LeastWork:
    """One row of the table read and one written a token, a row of learned positions besides:
    b x H (2 or 3). Every rank holds the whole table. No operations (a sum of rows is not what a
    peak is made of)."""
    rows = 3 if model.has_learned_positions else 2
    return LeastWork(flops=np.zeros_like(x), num_bytes=x * model.hidden_size * rows)


def _head(model: ModelSpec, x: FloatArray, _y: FloatArray, t: int) -> LeastWork:
    """The shard with the most rows, ceil(V / t): 2 x H ceil(V / t) operations; bytes of those
    weights and of the hidden states, b H (ceil(V / t) + x)."""
    weights = model.hidden_size * -(-model.vocab_size // t)
    return LeastWork(flops=2 * x * weights, num_bytes=weights + x * model.hidden_size)


def _kv_compaction(model: ModelSpec, x: FloatArray, y: FloatArray, t: int) -> LeastWork:
    """x rows of y tokens read and written: 2 b x y K / t bytes, no operations."""
    return LeastWork(flops=np.zeros_like(x),
                     num_bytes=2 * x * y * model.kv_elements_per_token_layer / t)


def _heads_width(model: ModelSpec) -> int:
    return model.num_heads * model.head_dim


# Bytes are counted in elements here; `work` multiplies.
_COUNTS = {
    Operator.ENCODE_ATTENTION: _encode_attention, Operator.DECODE_ATTENTION: _cached_attention,
    Operator.CROSS_ATTENTION: _cached_attention, Operator.LAYER_REST: _layer_rest,
    Operator.DECODE_REST: _layer_rest,
    Operator.ENCODER_REST: _encoder_rest, Operator.CROSS_KV: _cross_kv, Operator.EMBED: _embed,
    Operator.HEAD: _head, Operator.KV_COMPACTION: _kv_compaction}
