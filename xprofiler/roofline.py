"""Analytic operator times: max(compute, memory) with efficiencies that saturate, plus launches.

A `TimingSource` for planning on a laptop (paper section 3 measures instead; design.md 3.6 says
what a sum of operators misses). Times are for one rank's 1/tp shard. Every time grows with its
size, and the time per token never grows: the search relies on both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.cluster import Device, Link
from xgpt.model import ModelSpec
from xgpt.units import DTYPE_BYTES
from xprofiler import constants
from xprofiler.timing import Operator

FloatArray = NDArray[np.float64]


class Roofline:
    """Times of one model's operators on one device type. Encoder-decoder models: LAYER_REST is a
    decoder layer without the cross-attention's key and value projections (done once, at encode)."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str) -> None:
        assert dtype in DTYPE_BYTES, f"{dtype = }"
        self._model = model
        self._device = device
        self._dtype = dtype
        self._constants = constants.BY_KIND[device.kind]

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource: seconds at (x, y), broadcast; x = 0 costs 0."""
        size, context = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
        if operator is Operator.DECODE_ATTENTION:
            seconds = self._decode_attention(size, context, tp_degree)
        else:
            seconds = {Operator.LAYER_REST: self._layer_rest, Operator.HEAD: self._head,
                       Operator.ENCODE_ATTENTION: self._encode_attention,
                       Operator.EMBED: self._embed}[operator](size, tp_degree)
        return np.where(size > 0, seconds, 0.0)

    def all_reduce_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> FloatArray:
        """Ring bandwidth (2 (t - 1) / t of the bytes), tree latency (2 log2 t hops: small messages
        take that way), and the skew of the group's ranks."""
        volume = np.asarray(num_bytes, float)
        if tp_degree == 1:
            return np.zeros_like(volume)
        is_slow = link.bandwidth_bytes_per_s < constants.SLOW_LINK_BYTES_PER_S
        share = constants.SLOW_ALL_REDUCE_SHARE if is_slow else constants.ALL_REDUCE_SHARE
        moved = 2 * (tp_degree - 1) / tp_degree * volume
        hops = 2 * np.log2(tp_degree)
        seconds: FloatArray = (moved / (link.bandwidth_bytes_per_s * share)
                               + hops * link.latency_s + self._synchronisation_s(tp_degree))
        return seconds

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """One message between consecutive stages: latency plus bytes over bandwidth."""
        rate = link.bandwidth_bytes_per_s * constants.TRANSFER_SHARE
        return link.latency_s + np.asarray(num_bytes, float) / rate

    def step_overhead_s(self) -> float:
        """Host's fixed cost of one micro-batch on one stage."""
        return self._constants.step_overhead_s

    def provenance(self) -> str:
        """One line for reports."""
        return f"analytic roofline of {self._model.name} on {self._device.name}, {self._dtype}"

    def _layer_rest(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        model, c = self._model, self._constants
        weights = rest_params(model) / tp_degree
        blocks = 2 if model.is_encoder_decoder else 1
        width = model.num_heads * model.head_dim
        matrices = 2 * blocks + 2  # fused QKV and output of each attention; fused up (gate), down
        # elements touched per token: norms and residual adds on every rank, the rest sharded
        shared = model.hidden_size * (5 * (blocks + 1))
        sharded = 4 * blocks * width + 3 * model.intermediate_size
        elements = shared + sharded / tp_degree
        elementwise_s = tokens * elements * self._item_bytes / self._bandwidth(
            c.elementwise_bytes_share)
        kernels = 2 * (blocks + 1) + 3  # norm and add per block, rotary, activation, cache append
        return (self._product_s(tokens, weights) + matrices * c.gemm_launch_s
                + elementwise_s + kernels * c.elementwise_launch_s)

    def _head(self, queries: FloatArray, tp_degree: int) -> FloatArray:
        c = self._constants
        return (self._product_s(queries, self._model.head_params / tp_degree)
                + c.gemm_launch_s + c.elementwise_launch_s + c.sampling_s)

    def _embed(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        # a lookup on every rank: one row read and written per token (and its position's row)
        del tp_degree
        c = self._constants
        touched = 3 * self._model.hidden_size * self._item_bytes
        moved_s = tokens * touched / self._bandwidth(c.elementwise_bytes_share)
        return moved_s + c.elementwise_launch_s

    def _encode_attention(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        model, c = self._model, self._constants
        heads_width = model.num_heads * model.head_dim / tp_degree
        pairs = 1.0 if model.is_encoder_decoder else 0.5  # causal attention skips half of them
        # tokens^2 / (tokens / (tokens + half)) = tokens * (tokens + half): linear when short
        flops = 4 * pairs * heads_width * tokens * (tokens + c.encode_attention_half_tokens)
        compute_s = flops / (self._peak * c.encode_attention_flops_share)
        elements = tokens * (2 * heads_width + model.kv_elements_per_token_layer / tp_degree)
        memory_s = elements * self._item_bytes / self._bandwidth(c.gemm_bytes_share)
        return np.maximum(compute_s, memory_s) + c.attention_launch_s

    def _decode_attention(self, queries: FloatArray, context: FloatArray,
                          tp_degree: int) -> FloatArray:
        model, c = self._model, self._constants
        kv_bytes = queries * context * (
            model.kv_elements_per_token_layer * self._item_bytes / tp_degree)
        memory_s = (kv_bytes + c.decode_attention_half_bytes) / self._bandwidth(
            c.decode_attention_bytes_share)
        flops = 4 * queries * context * model.num_heads * model.head_dim / tp_degree
        compute_s = flops / (self._peak * c.encode_attention_flops_share)
        return np.maximum(memory_s, compute_s) + c.attention_launch_s

    def _product_s(self, rows: FloatArray, weights: float) -> FloatArray:
        """Matrix products of `weights` elements with `rows` rows."""
        c = self._constants
        # rows / (rows / (rows + half)) = rows + half
        compute_s = 2 * weights * (rows + c.gemm_half_rows) / (self._peak * c.gemm_flops_share)
        memory_s = weights * self._item_bytes / self._bandwidth(c.gemm_bytes_share)
        return np.maximum(compute_s, memory_s)

    def _synchronisation_s(self, tp_degree: int) -> float:
        degrees, seconds = zip(*self._constants.synchronisation_s, strict=True)
        return float(np.interp(np.log2(tp_degree), np.log2(degrees), seconds))

    def _bandwidth(self, share: float) -> float:
        return self._device.bandwidth_bytes_per_s * share

    @property
    def _peak(self) -> float:
        return self._device.peak_flops_per_s(self._dtype)

    @property
    def _item_bytes(self) -> int:
        return DTYPE_BYTES[self._dtype]


def rest_params(model: ModelSpec) -> int:
    """Weights that LAYER_REST multiplies: a decoder layer's but for cross key and value ones."""
    return model.decoder_layer_params - cross_kv_params(model)


def cross_kv_params(model: ModelSpec) -> int:
    """Weights that project the encoder's output to one decoder layer's cross-attention cache."""
    if not model.is_encoder_decoder:
        return 0
    return model.hidden_size * model.kv_elements_per_token_layer
