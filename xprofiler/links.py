"""Analytic times of collectives and messages, by the kind of link they go over."""

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xprofiler.constants import (
    BRIDGE_BYTES_PER_S,
    BRIDGE_LATENCY_S,
    FAST_LINK_BYTES_PER_S,
    NETWORK_LATENCY_S,
    LinkConstants,
    PerDegree,
)
from xprofiler.kernels import Kernels


def link_kind(link: Link) -> str:
    """Name of the RooflineConstants field that speaks of this link, by what a Link says of
    itself."""
    is_bridge = (link.bandwidth_bytes_per_s >= BRIDGE_BYTES_PER_S
                 and link.latency_s <= BRIDGE_LATENCY_S)
    if is_bridge or link.bandwidth_bytes_per_s >= FAST_LINK_BYTES_PER_S:
        return "nvlink"
    if link.latency_s >= NETWORK_LATENCY_S:
        return "network"
    return "pcie_peer" if link.has_peer_access else "pcie"


class LinkTimes:
    """Seconds of messages between the devices whose kernels these are."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._constants = kernels, kernels.constants

    def collective_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> FloatArray:
        """All-reduce between ranks that start together, what nccl-tests measures: a ring moves
        2 (t - 1) / t of the bytes; the quicker of two protocols, each latency plus bytes. Over
        nodes it is one inside each, and one between them, to which every device of a node brings
        its part of the bytes at once."""
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

    def synchronisation_s(self, tp_degree: int) -> float:
        """Skew of a group's ranks at one all-reduce (docs/profile.md)."""
        return 0.0 if tp_degree == 1 else _at_degree(self._constants.synchronisation_s, tp_degree)

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """One message between consecutive stages: latency plus bytes over bandwidth."""
        rate = link.bandwidth_bytes_per_s * self._of(link).transfer_share
        return link.latency_s + np.asarray(num_bytes, float) / rate

    def handover_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        """A transfer, and the copies that gather entries at one end and scatter them at the
        other (each reads and writes them once)."""
        return (self.transfer_s(num_bytes, link) + 2 * self._constants.elementwise_launch_s
                + self._kernels.copied_s(4 * np.asarray(num_bytes, float)))

    def _of(self, link: Link) -> LinkConstants:
        return getattr(self._constants, link_kind(link))  # type: ignore[no-any-return]


@cache
def _at_degree(values: PerDegree, tp_degree: int) -> float:
    """Linear in the degree's logarithm, constant beyond the ends."""
    degrees, of_degree = zip(*values, strict=True)
    return float(np.interp(np.log2(tp_degree), np.log2(degrees), of_degree))
