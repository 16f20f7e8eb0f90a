"""The analytic roofline as a `TimingSource`, for planning on a laptop (paper section 3 measures
instead; docs/times.md says what a sum of operators misses).

Times of kernels, collectives and messages are seconds of one rank's 1 / tp_degree shard. Every
time grows with its size, and the time per token never grows: the search relies on both. Waves and
tiles therefore enter as their smooth envelope."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Device, Link
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec, Split, kv_elements_of_rank, kv_heads_of_rank
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, INT8, LOGIT_BYTES
from xprofiler.constants import (
    BRIDGE_BYTES_PER_S,
    BRIDGE_LATENCY_S,
    FAST_LINK_BYTES_PER_S,
    HOST_ATTENTION_BYTES_PER_S,
    NETWORK_LATENCY_S,
    LinkConstants,
    PerDegree,
    RooflineConstants,
    engine_constants,
)
from xprofiler.doubt import Cell, Doubt, doubt_of, shape_of
from xprofiler.experts import ExpertKernels
from xprofiler.kernels import Kernels
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts


class ModelKernels:
    """Seconds of one model's operators. Layers without attention, embedding and output head depend
    on rows (tokens); attention depends on requests and their context."""

    def __init__(self, model: ModelSpec, kernels: Kernels) -> None:
        self._model, self._kernels, self._constants = model, kernels, kernels.constants
        self._width = model.num_heads * model.head_dim
        self._flops_per_s = kernels.flops_per_s * self._constants.encode_attention_flops_share
        # asked for thousands of times
        self._held, self._latent = cache(partial(kv_elements_of_rank, model)), model.decoder.latent
        self._kv_heads = cache(partial(kv_heads_of_rank, model))
        experts = model.decoder.experts
        self._experts = None if experts is None else ExpertKernels(model, experts, kernels)

    def layer_rest_s(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of a decoder layer without its attention kernel. Cross-attention's key and value
        projections are left out (done once, at encode)."""
        if not self._model.is_encoder_decoder:
            return self.block_s(tokens, tp_degree)
        query_s = self._kernels.layer_product_s(tokens, self._width / tp_degree,
                                                self._model.hidden_size)
        return self.block_s(tokens, tp_degree, attentions=2) + query_s

    def block_s(self, tokens: FloatArray, tp_degree: int, attentions: int = 1) -> FloatArray:
        """Seconds of a layer without attention kernels and cross-attention's projections:
        self-attention's projections, each attention's output projection, the MLP, and the
        elementwise kernels around them. `attentions`: 1 for an encoder layer."""
        model, gemm_s = self._model, self._kernels.layer_product_s
        own, degree = self._of_part(tokens, tp_degree)
        hidden, width = model.hidden_size, self._width / degree
        inner = model.mlp_columns / tp_degree
        products = (self._inputs_s(own, degree) + attentions * gemm_s(own, hidden, width)
                    + (self._plain_s(tokens, inner) if self._experts is None else
                       self._experts.mlp_s(tokens, own, tp_degree)))
        # elements touched per token: norms and residual adds on every rank, the rest sharded
        elements = own * (5 * hidden * (attentions + 1) + 4 * attentions * width)
        elementwise_s = self._kernels.copied_s(
            (elements + tokens * 3 * inner) * self._kernels.item_bytes)
        launches = 2 * (attentions + 1) + 3  # norm and add per block, rotary, activation, append
        return products + elementwise_s + launches * self._constants.elementwise_launch_s

    def _inputs_s(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of the projections to queries, keys and values. Latent attention projects them
        down on every rank, and up to the rank's own heads."""
        model, gemm_s = self._model, self._kernels.layer_product_s
        hidden, latent = model.hidden_size, model.decoder.latent
        if latent is None:
            columns = self._width / tp_degree + self._held(tp_degree)
            return gemm_s(tokens, columns, hidden)
        heads = model.num_heads / tp_degree
        queries = heads * (latent.nope_dim + latent.rope_dim)
        down = model.kv_elements_per_token_layer + (latent.query_rank or 0)
        up_s = gemm_s(tokens, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
        return gemm_s(tokens, down, hidden) + up_s + gemm_s(
            tokens, queries, latent.query_rank or hidden)

    def _plain_s(self, tokens: FloatArray, inner: float) -> FloatArray:
        """Seconds of the products of an MLP with `inner` columns on a rank."""
        gemm_s, hidden = self._kernels.layer_product_s, self._model.hidden_size
        joint = 2 if self._model.is_gated_mlp else 1
        return gemm_s(tokens, inner * joint, hidden) + gemm_s(tokens, hidden, inner)

    def _of_part(self, size: FloatArray, tp_degree: int) -> tuple[FloatArray, int]:
        """(tokens or requests of the ranks that share one attention, number of these ranks)."""
        split = self._model.split
        if split.attention_dp == 1:
            return size, tp_degree
        own = np.maximum(size / split.attention_dp, np.minimum(size, 1.0))
        return own, split.attention_degree(tp_degree)

    def cross_kv_s(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds to project the encoder's output to one decoder layer's keys and values."""
        return self._kernels.gemm_s(tokens, self._held(tp_degree), self._model.hidden_size)

    def head_s(self, queries: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of final norm, output head and sampling, which writes and reads the logits of the
        whole vocabulary as float32 on every rank."""
        model, c = self._model, self._constants
        queries, tp_degree = self._of_part(queries, tp_degree)
        product = self._kernels.gemm_s(queries, model.vocab_size / tp_degree, model.hidden_size)
        logits_s = self._kernels.copied_s(2 * LOGIT_BYTES * queries * model.vocab_size)
        return product + logits_s + c.elementwise_launch_s + c.sampling_s

    def embed_s(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of the embedding, looked up on every rank: one row read and written per token
        (and its position's row)."""
        tokens, _ = self._of_part(tokens, tp_degree)
        touched = 3 * self._model.hidden_size * self._kernels.item_bytes
        return self._kernels.copied_s(tokens * touched) + self._constants.elementwise_launch_s

    def encode_s(self, tokens: FloatArray, together: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of prefill attention per request in a batch of `together`: its own work, and its
        part of the batch's fixed costs (launch, the last tiles' pass over their keys)."""
        model, c = self._model, self._constants
        together = np.maximum(together, 1.0)
        own, tp_degree = self._of_part(together, tp_degree)
        width, latent = self._width / tp_degree, self._latent
        pairs = 1.0 if model.is_encoder_decoder else 0.5  # causal attention skips half of them
        keys = width if latent is None else (
            model.num_heads * (latent.nope_dim + latent.rope_dim) / tp_degree)
        # tokens^2 / (tokens / (tokens + half)) = tokens * (tokens + half): linear when short
        flops = 2 * pairs * (keys + width) * tokens * (tokens + c.encode_attention_half_tokens)
        held = self._held(tp_degree) if latent is None else keys + width
        elements = tokens * (width + keys + held)
        memory_s = self._kernels.streamed_s(elements * self._kernels.item_bytes)
        once_s = c.encode_attention_launch_s + tokens * c.encode_attention_tail_s
        of_own = np.maximum(flops / self._flops_per_s, memory_s) + once_s / own
        return np.asarray(of_own * own / together)

    def cache_s(self, queries: FloatArray, context: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of decode attention: one new token for each of `queries` requests, against a KV
        cache of `context` tokens each. Every rank reads a latent cache whole; heads multiply its
        compressed vectors."""
        c, latent = self._constants, self._latent
        queries, tp_degree = self._of_part(queries, tp_degree)
        pairs = queries * context
        kv_bytes = pairs * self._held(tp_degree) * self._kernels.kv_item_bytes
        width, items = 2 * self._width, self._kv_heads(tp_degree)
        if latent is not None:
            width, items = self._model.num_heads * (2 * latent.kv_rank + latent.rope_dim), 1.0
        compute_s = 2 * pairs * width / tp_degree / self._flops_per_s
        read_s = kv_bytes / (self._kernels.bandwidth * c.decode_attention_bytes_share)
        return c.decode_attention_launch_s + np.hypot(
            c.decode_attention_item_s * queries * items, np.maximum(read_s, compute_s))

    def host_s(self, queries: FloatArray, context: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of decode attention by the host, which reads all entries from its memory."""
        entries = queries * context * self._held(tp_degree)
        return (self._constants.decode_attention_launch_s
                + entries * self._kernels.kv_item_bytes / HOST_ATTENTION_BYTES_PER_S)

    def unpack_s(self, elements: FloatArray, _: int) -> FloatArray:
        """Seconds to widen elements of 4 bits: 4.5 bits read, one element written."""
        moved = elements * (4.5 / 8 + self._kernels.item_bytes)
        return self._kernels.copied_s(moved) + self._constants.elementwise_launch_s

    def compaction_s(self, moved: FloatArray, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds to move `moved` rows of `tokens` each within a rank's KV cache: read and written
        once."""
        elements = moved * tokens * self._held(tp_degree)
        copy_s = self._kernels.copied_s(2 * elements * self._kernels.item_bytes)
        return copy_s + self._constants.elementwise_launch_s


def link_kind(link: Link) -> str:
    """Name of the RooflineConstants field for `link`, by its bandwidth, latency and peer access."""
    is_bridge = (link.bandwidth_bytes_per_s >= BRIDGE_BYTES_PER_S
                 and link.latency_s <= BRIDGE_LATENCY_S)
    if is_bridge or link.bandwidth_bytes_per_s >= FAST_LINK_BYTES_PER_S:
        return "nvlink"
    if link.latency_s >= NETWORK_LATENCY_S:
        return "network"
    return "pcie_peer" if link.has_peer_access else "pcie"


class LinkTimes:
    """Seconds of messages between devices; `kernels` supplies their copies and constants."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._constants = kernels, kernels.constants

    def collective_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> FloatArray:
        """Seconds of an all-reduce between ranks that start together, as nccl-tests measures.

        A ring moves 2 (t - 1) / t of the bytes, by the quicker of two protocols. Across nodes one
        all-reduce inside each node adds to one between nodes, to which every device of a node
        sends its part of the bytes at once."""
        volume = np.asarray(num_bytes, float)
        if tp_degree == 1:
            return np.zeros_like(volume)
        if link.inside is not None:
            assert tp_degree % link.per_node == 0, f"{tp_degree = } {link = }"
            return (self.collective_s(volume, link.per_node, link.inside) + self.collective_s(
                volume, tp_degree // link.per_node, replace(link, inside=None, per_node=1)))
        c = self._of(link)
        rate = link.bandwidth_bytes_per_s * _at_degree(c.all_reduce_shares, tp_degree)
        moved = 2 * (tp_degree - 1) / tp_degree * volume
        small_launch_s = c.launch_s + 2 * (tp_degree - 1) * c.hop_share * link.latency_s
        seconds: FloatArray = np.minimum(small_launch_s + moved / (rate * c.small_ratio),
                                         c.large_launch_s + moved / rate)
        return seconds

    def sum_s(self, num_bytes: FloatArray, tp_degree: int, link: Link) -> FloatArray:
        """Seconds of an all-reduce, with those that the ranks wait for each other."""
        return self.collective_s(num_bytes, tp_degree, link) + self.synchronisation_s(tp_degree)

    def synchronisation_s(self, tp_degree: int) -> float:
        """Seconds that a group's ranks wait for each other at one all-reduce (docs/times.md)."""
        return 0.0 if tp_degree == 1 else _at_degree(self._constants.synchronisation_s, tp_degree)

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """Seconds of a message between consecutive stages: latency plus bytes over bandwidth."""
        rate = link.bandwidth_bytes_per_s * self._of(link).transfer_share
        return link.latency_s + np.asarray(num_bytes, float) / rate

    def handover_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """Seconds of a KV cache handover: a transfer, and the copies that gather keys and values at
        one end and scatter them at the other (each reads and writes them once)."""
        return (self.transfer_s(num_bytes, link) + 2 * self._constants.elementwise_launch_s
                + self._kernels.copied_s(4 * np.asarray(num_bytes, float)))

    def _of(self, link: Link) -> LinkConstants:
        return getattr(self._constants, link_kind(link))  # type: ignore[no-any-return]


@cache
def _at_degree(values: PerDegree, tp_degree: int) -> float:
    """The value at a degree: linear in the degree's logarithm, constant beyond the ends."""
    degrees, of_degree = zip(*values, strict=True)
    return float(np.interp(np.log2(tp_degree), np.log2(degrees), of_degree))


class Roofline:
    """Times of one model's operators on one device type under `engine`.

    `constants`: default those of the engine on the device. `weight_dtype`: dtype that layers'
    weights are multiplied in; `kv_dtype`: dtype of the KV cache; "": `dtype`."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str,
                 constants: RooflineConstants | None = None, *, engine: str = OWN_ENGINE,
                 weight_dtype: str = "", kv_dtype: str = "") -> None:
        assert dtype in DTYPE_BYTES, f"{dtype = }"
        self._of = (model, device, dtype)
        self._engine, self._weight_dtype = engine, weight_dtype
        self._kind = "analytic" if constants is None else "calibrated"
        self.constants = constants or engine_constants(device, engine)
        self.kernels = Kernels(device, dtype, self.constants, weight_dtype, kv_dtype)
        self.links = LinkTimes(self.kernels)
        own = ModelKernels(model, self.kernels)
        self._rows: dict[Operator, Callable[[FloatArray, int], FloatArray]] = {
            Operator.LAYER_REST: own.layer_rest_s, Operator.DECODE_REST: own.layer_rest_s,
            Operator.ENCODER_REST: own.block_s,
            Operator.CROSS_KV: own.cross_kv_s, Operator.HEAD: own.head_s,
            Operator.EMBED: own.embed_s, Operator.UNPACK: own.unpack_s}
        self._attention: dict[Operator, Callable[[FloatArray, FloatArray, int], FloatArray]] = {
            Operator.ENCODE_ATTENTION: own.encode_s,
            Operator.DECODE_ATTENTION: own.cache_s,
            Operator.CROSS_ATTENTION: own.cache_s,
            Operator.HOST_ATTENTION: own.host_s,
            Operator.KV_COMPACTION: own.compaction_s}
        # kernels read each query's own context; a device's rates are its share already
        self.facts = TimingFacts(step_overhead_s=self.constants.step_overhead_s, is_padded=False)

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
            return self._reduce_s(np.asarray(num_bytes, float), tp_degree, link)
        if kind is MessageKind.TRANSFER:
            return self.links.transfer_s(num_bytes, link)
        return self.links.handover_s(num_bytes, link)

    def _reduce_s(self, num_bytes: FloatArray, tp_degree: int, link: Link) -> FloatArray:
        """Seconds of an all-reduce in a layer: the mean of its two exchanges. With parts that
        attend to requests of their own, one is a sum within each part. The other gathers the
        tokens of all parts for their experts, and scatters the sums: as many bytes as one sum."""
        split = self._of[0].split
        if split.attention_dp == 1:
            return self.links.sum_s(num_bytes, tp_degree, link)
        degree, near = split.attention_degree(tp_degree), link
        if link.inside is not None and degree <= link.per_node:
            near = link.inside
        return (self.links.sum_s(num_bytes / split.attention_dp, degree, near)
                + self.links.sum_s(num_bytes, tp_degree, link)) / 2

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """Infinite: times are computed at any size."""
        return Reach(math.inf, math.inf)

    def doubt(self, tp_degree: int = 1, stages: int = 1, link: Link | None = None,
              own: tuple[Cell, ...] = ()) -> Doubt:
        """The doubt about these times on a group of `tp_degree`, in a pipeline of `stages`. `link`:
        between the group's ranks, None for NVLink in a node, as all published runs had. `own`:
        cells that a user has measured."""
        is_other = tp_degree > 1 and link is not None and (
            link.inside is not None or link_kind(link) != "nvlink")
        unseen = "several stages or pools" if stages > 1 else (
            "expert parallelism" if self._of[0].split != Split() else
            "int8 weights" if self._weight_dtype == INT8 else
            "this link between ranks" if is_other and self.cell(tp_degree) not in own else "")
        return doubt_of(self.cell(tp_degree), unseen, own)

    def cell(self, tp_degree: int = 1) -> Cell:
        """The conditions that these times are of, on a group of `tp_degree`."""
        model, device, _ = self._of
        weights = self._weight_dtype if self._weight_dtype in EIGHT_BITS else ""
        return Cell(self._engine, device.name, shape_of(model), weights, tp_degree)

    def provenance(self) -> str:
        """One line for reports: model, device, engine and dtypes."""
        model, device, dtype = self._of
        of = "" if self._engine == OWN_ENGINE else f" as {self._engine} takes it"
        weights = f", weights {self._weight_dtype}" if self._weight_dtype in EIGHT_BITS else ""
        return f"{self._kind} roofline of {model.name} on {device.name}{of}, {dtype}{weights}"
