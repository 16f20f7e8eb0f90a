"""The seam between what is timed and what is simulated: `TimingSource`.

The measured profile and the analytic roofline are interchangeable behind it. All methods take
and return arrays (broadcast against each other), in elements, tokens, bytes and seconds; a time
is what one tensor-parallel group needs for its shard, without synchronisation.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.cluster import Link


class Operator(Enum):
    """What is timed apart from the rest (paper section 3, XProfiler). Arguments `x`, `y`:"""

    ENCODE_ATTENTION = "encode_attention"  # one query in one layer: x = its tokens; y unused
    DECODE_ATTENTION = "decode_attention"  # one layer: x = queries, y = mean context (tokens)
    LAYER_REST = "layer_rest"  # one layer without its attention kernel: x = tokens; y unused
    EMBED = "embed"  # x = tokens; y unused
    HEAD = "head"  # final norm, output head, sampling: x = queries; y unused


class TimingSource(Protocol):
    """Seconds of each operator on one device type for one model and dtype."""

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

    def step_overhead_s(self) -> float:
        """Host's fixed cost of one micro-batch on one stage (launches, header, bookkeeping)."""
        ...

    def provenance(self) -> str:
        """One line for reports: where these times come from."""
        ...
