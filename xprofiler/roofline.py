"""Analytic operator times: compute and memory at efficiencies that saturate, plus launches.

A `TimingSource` for planning on a laptop (paper section 3 measures instead; design.md 3.6 says
what a sum of operators misses). Times are for one rank's 1/tp shard. Every time grows with its
size, and the time per token never grows: the search relies on both. Waves and tiles therefore
enter as their smooth envelope, not as stairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Device, Link
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES
from xprofiler import constants as figures
from xprofiler.constants import LinkConstants, PerDegree, RooflineConstants
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts

FloatArray = NDArray[np.float64]


class Roofline:
    """Times of one model's operators on one device type. Encoder-decoder models: LAYER_REST is a
    decoder layer without the cross-attention's key and value projections (done once, at encode).
    `constants`: those of the device's kind unless given (xprofiler.calibrate fits them)."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str,
                 constants: RooflineConstants | None = None) -> None:
        assert dtype in DTYPE_BYTES, f"{dtype = }"
        self._model = model
        self._device = device
        self._dtype = dtype
        self._is_calibrated = constants is not None
        self.constants = constants or figures.BY_KIND[device.kind]
        # kernels read each query's own context; a device's rates are its share already
        self.facts = TimingFacts(step_overhead_s=self.constants.step_overhead_s, is_padded=False)

    def with_constants(self, constants: RooflineConstants) -> Roofline:
        """The same model on the same device, with other constants."""
        return Roofline(self._model, self._device, self._dtype, constants)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource: seconds at (x, y), broadcast; x = 0 costs 0."""
        size, second = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
        two_sizes: dict[Operator, Callable[[FloatArray, FloatArray, int], FloatArray]] = {
            Operator.ENCODE_ATTENTION: self._encode_attention,
            Operator.DECODE_ATTENTION: self._cache_attention,
            Operator.CROSS_ATTENTION: self._cache_attention,
            Operator.KV_COMPACTION: self._compaction}
        one_size: dict[Operator, Callable[[FloatArray, int], FloatArray]] = {
            Operator.LAYER_REST: self._layer_rest, Operator.ENCODER_REST: self._encoder_rest,
            Operator.CROSS_KV: self._cross_kv, Operator.HEAD: self._head,
            Operator.EMBED: self._embed}
        if operator in two_sizes:
            seconds = two_sizes[operator](size, second, tp_degree)
        else:
            seconds = one_size[operator](size, tp_degree)
        return np.where(size > 0, seconds, 0.0)

    def gemm_s(self, rows: ArrayLike, n: ArrayLike, k: ArrayLike) -> FloatArray:
        """One matrix product, [rows, k] x [k, n]. Compute and memory overlap but for a part: the
        p-norm of the two lies between their maximum and their sum."""
        c = self.constants
        m, n, k = np.broadcast_arrays(*(np.asarray(size, float) for size in (rows, n, k)))
        # rows / (rows / (rows + half)) = rows + half
        compute_s = 2 * n * k * (m + c.gemm_half_rows) / (self._peak * c.gemm_flops_share)
        moved_bytes = (n * k + m * (n + k)) * self._item_bytes
        memory_s = moved_bytes / self._bandwidth(c.gemm_bytes_share)
        longer, shorter = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
        total: FloatArray = longer * (1 + (shorter / longer) ** c.gemm_overlap) ** (
            1 / c.gemm_overlap)
        return total + c.gemm_launch_s

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource. An all-reduce is a collective and the skew of the ranks before it."""
        if kind is MessageKind.ALL_REDUCE:
            return (self.collective_s(num_bytes, tp_degree, link)
                    + self.synchronisation_s(tp_degree))
        return (self._transfer_s if kind is MessageKind.TRANSFER else self._handover_s)(
            num_bytes, link)

    def collective_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> FloatArray:
        """All-reduce between ranks that start together, what nccl-tests measures: a ring moves
        2 (t - 1) / t of the bytes; the quicker of two protocols, each latency plus bytes."""
        volume = np.asarray(num_bytes, float)
        if tp_degree == 1:
            return np.zeros_like(volume)
        c = self.link_constants(link)
        rate = link.bandwidth_bytes_per_s * _at_degree(c.all_reduce_shares, tp_degree)
        moved = 2 * (tp_degree - 1) / tp_degree * volume
        small_launch_s = c.launch_s + 2 * (tp_degree - 1) * c.hop_share * link.latency_s
        seconds: FloatArray = np.minimum(small_launch_s + moved / (rate * c.small_ratio),
                                         c.large_launch_s + moved / rate)
        return seconds

    def synchronisation_s(self, tp_degree: int) -> float:
        """Skew of a group's ranks at one all-reduce (design.md 3.6)."""
        return 0.0 if tp_degree == 1 else _at_degree(self.constants.synchronisation_s, tp_degree)

    def _transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """One message between consecutive stages: latency plus bytes over bandwidth."""
        rate = link.bandwidth_bytes_per_s * self.link_constants(link).transfer_share
        return link.latency_s + np.asarray(num_bytes, float) / rate

    def _handover_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """A transfer, and the copies that gather entries at one end and scatter them at the
        other (each reads and writes them once)."""
        copied = 4 * np.asarray(num_bytes, float)
        c = self.constants
        return (self._transfer_s(num_bytes, link) + 2 * c.elementwise_launch_s
                + copied / self._bandwidth(c.elementwise_bytes_share))

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """No measurements, so no limit to them."""
        return Reach(math.inf, math.inf)

    def provenance(self) -> str:
        """One line for reports."""
        kind = "calibrated" if self._is_calibrated else "analytic"
        return f"{kind} roofline of {self._model.name} on {self._device.name}, {self._dtype}"

    def link_constants(self, link: Link) -> LinkConstants:
        """Which kind of link this is, by what a Link says of itself."""
        return getattr(self.constants, link_kind(link))  # type: ignore[no-any-return]

    def _layer_rest(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        attentions = 2 if self._model.is_encoder_decoder else 1
        seconds = self._block_s(tokens, attentions, tp_degree)
        if self._model.is_encoder_decoder:  # cross-attention's query projection
            seconds = seconds + self.gemm_s(
                tokens, self._heads_width / tp_degree, self._model.hidden_size)
        return seconds

    def _encoder_rest(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        return self._block_s(tokens, 1, tp_degree)

    def _block_s(self, tokens: FloatArray, attentions: int, tp_degree: int) -> FloatArray:
        """One self-attention's projections, every attention's output projection, the MLP, and the
        elementwise kernels around them."""
        model, c = self._model, self.constants
        hidden, width = model.hidden_size, self._heads_width / tp_degree
        inner = model.intermediate_size / tp_degree
        qkv = width + model.kv_elements_per_token_layer / tp_degree
        products = (self.gemm_s(tokens, qkv, hidden)
                    + attentions * self.gemm_s(tokens, hidden, width)
                    + self.gemm_s(tokens, inner * (2 if model.is_gated_mlp else 1), hidden)
                    + self.gemm_s(tokens, hidden, inner))
        # elements touched per token: norms and residual adds on every rank, the rest sharded
        elements = 5 * hidden * (attentions + 1) + 4 * attentions * width + 3 * inner
        elementwise_s = tokens * elements * self._item_bytes / self._bandwidth(
            c.elementwise_bytes_share)
        kernels = 2 * (attentions + 1) + 3  # norm and add per block, rotary, activation, append
        return products + elementwise_s + kernels * c.elementwise_launch_s

    def _cross_kv(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        model = self._model
        return self.gemm_s(
            tokens, model.kv_elements_per_token_layer / tp_degree, model.hidden_size)

    def _head(self, queries: FloatArray, tp_degree: int) -> FloatArray:
        model, c = self._model, self.constants
        product = self.gemm_s(queries, model.vocab_size / tp_degree, model.hidden_size)
        return product + c.elementwise_launch_s + c.sampling_s

    def _embed(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        # a lookup on every rank: one row read and written per token (and its position's row)
        del tp_degree
        c = self.constants
        touched = 3 * self._model.hidden_size * self._item_bytes
        moved_s = tokens * touched / self._bandwidth(c.elementwise_bytes_share)
        return moved_s + c.elementwise_launch_s

    def _encode_attention(self, tokens: FloatArray, together: FloatArray,
                          tp_degree: int) -> FloatArray:
        """One query's share of a batch of `together`: its own work, and of what the batch does
        once (launch, the last tiles' pass over their keys) its part."""
        model, c = self._model, self.constants
        width = self._heads_width / tp_degree
        pairs = 1.0 if model.is_encoder_decoder else 0.5  # causal attention skips half of them
        # tokens^2 / (tokens / (tokens + half)) = tokens * (tokens + half): linear when short
        flops = 4 * pairs * width * tokens * (tokens + c.encode_attention_half_tokens)
        compute_s = flops / (self._peak * c.encode_attention_flops_share)
        elements = tokens * (2 * width + model.kv_elements_per_token_layer / tp_degree)
        memory_s = elements * self._item_bytes / self._bandwidth(c.gemm_bytes_share)
        once_s = c.encode_attention_launch_s + tokens * c.encode_attention_tail_s
        return np.maximum(compute_s, memory_s) + once_s / np.maximum(together, 1.0)

    def _cache_attention(self, queries: FloatArray, context: FloatArray,
                         tp_degree: int) -> FloatArray:
        """Queries of one token each against a cache of `context` tokens each."""
        model, c = self._model, self.constants
        pairs = queries * (context + c.decode_attention_extra_tokens) / tp_degree
        kv_bytes = pairs * model.kv_elements_per_token_layer * self._item_bytes
        memory_s = kv_bytes / self._bandwidth(c.decode_attention_bytes_share)
        compute_s = 4 * pairs * self._heads_width / (
            self._peak * c.encode_attention_flops_share)
        return np.maximum(memory_s, compute_s) + c.decode_attention_launch_s

    def _compaction(self, moved: FloatArray, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Cache rows copied within a rank: read and written once."""
        c = self.constants
        elements = moved * tokens * self._model.kv_elements_per_token_layer / tp_degree
        copy_s = 2 * elements * self._item_bytes / self._bandwidth(c.elementwise_bytes_share)
        return copy_s + c.elementwise_launch_s

    def _bandwidth(self, share: float) -> float:
        return self._device.bandwidth_bytes_per_s * share

    @property
    def _heads_width(self) -> int:
        return self._model.num_heads * self._model.head_dim

    @property
    def _peak(self) -> float:
        return self._device.peak_flops_per_s(self._dtype)

    @property
    def _item_bytes(self) -> int:
        return DTYPE_BYTES[self._dtype]


def link_kind(link: Link) -> str:
    """Name of the RooflineConstants field that speaks of this link."""
    if link.bandwidth_bytes_per_s >= figures.FAST_LINK_BYTES_PER_S:
        return "nvlink"
    return "network" if link.latency_s >= figures.NETWORK_LATENCY_S else "pcie"


def rest_params(model: ModelSpec) -> int:
    """Weights that LAYER_REST multiplies: a decoder layer's but for cross key and value ones."""
    return model.decoder_layer_params - cross_kv_params(model)


def cross_kv_params(model: ModelSpec) -> int:
    """Weights that project the encoder's output to one decoder layer's cross-attention cache."""
    if not model.is_encoder_decoder:
        return 0
    return model.hidden_size * model.kv_elements_per_token_layer


def _at_degree(values: PerDegree, tp_degree: int) -> float:
    """Linear in the degree's logarithm, constant beyond the ends."""
    degrees, of_degree = zip(*values, strict=True)
    return float(np.interp(np.log2(tp_degree), np.log2(degrees), of_degree))
