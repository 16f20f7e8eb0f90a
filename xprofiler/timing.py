"""The seam between what is timed and what is simulated: `TimingSource`.

The measured profile and the analytic roofline are interchangeable behind it. All methods take
and return arrays (broadcast against each other), in elements, tokens, bytes and seconds; a time
is what one tensor-parallel group needs for its shard, without synchronisation.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Link


class Operator(Enum):
    """What is timed apart from the rest (paper section 3, XProfiler). Arguments `x`, `y`:"""

    # one query's share in one layer: x = its tokens, y = queries encoded with it (0: alone)
    ENCODE_ATTENTION = "encode_attention"
    # one layer: x = queries, y = context (tokens) of each, the one being decoded included
    DECODE_ATTENTION = "decode_attention"
    LAYER_REST = "layer_rest"  # one decoder layer without its attention kernels: x = tokens
    EMBED = "embed"  # x = tokens
    HEAD = "head"  # final norm, output head, sampling: x = queries
    KV_COMPACTION = "kv_compaction"  # one layer: x = cache rows moved, y = tokens in each
    # encoder-decoder models alone
    ENCODER_REST = "encoder_rest"  # one encoder layer without its attention kernel: x = tokens
    CROSS_KV = "cross_kv"  # one decoder layer's keys and values of encoder output: x = tokens
    CROSS_ATTENTION = "cross_attention"  # one decoder layer: x = queries, y = encoder tokens each


ENCODER_DECODER_ONLY = (Operator.ENCODER_REST, Operator.CROSS_KV, Operator.CROSS_ATTENTION)
# The other arguments of a call do not count: x alone decides.
ONE_DIMENSIONAL = (Operator.LAYER_REST, Operator.EMBED, Operator.HEAD, Operator.ENCODER_REST,
                   Operator.CROSS_KV)


class Reach(NamedTuple):
    """Largest sizes a source has measured; infinite where it computes them."""

    x: float
    y: float


class TimingSource(Protocol):
    """Seconds of each operator on one device type for one model and dtype.

    A size that the source refuses (a profile: beyond four times what it measured) takes infinite
    time, so that no schedule is built on it."""

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        """Seconds of `operator` at (x, y) on each rank of a group of `tp_degree`.

        x and y may be fractional (expected values). x = 0 costs 0."""
        ...

    def all_reduce_s(self, num_bytes: ArrayLike, tp_degree: int,
                     link: Link) -> NDArray[np.float64]:
        """Seconds of one all-reduce of `num_bytes` over a group, with its synchronisation cost."""
        ...

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> NDArray[np.float64]:
        """Seconds of one point-to-point message between consecutive stages."""
        ...

    def handover_s(self, num_bytes: ArrayLike, link: Link) -> NDArray[np.float64]:
        """Seconds from KV entries in one rank's cache to the same entries in another's."""
        ...

    def step_overhead_s(self) -> float:
        """Host's fixed cost of one micro-batch on one stage (launches, header, bookkeeping)."""
        ...

    def can_time(self, tp_degree: int) -> bool:
        """Whether this source answers for groups of `tp_degree`."""
        ...

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """Sizes up to which `operator_s` rests on measurements."""
        ...

    @property
    def is_padded(self) -> bool:
        """Whether decode attention costs every query of a micro-batch the longest context among
        them (kernels that read padded caches), not its own."""
        ...

    @property
    def sharing(self) -> float:
        """How many times longer operators take, in these answers, than where a rank has the cores
        it works on for itself: 1, or more where ranks outnumber the cores and all work at once."""
        ...

    def provenance(self) -> str:
        """One line for reports: where these times come from."""
        ...
