"""Devices, links and clusters as the planner sees them. A `Device` is a GPU or a CPU worker.

Peak rates are the vendor's dense figures; what part of them is reached is the timing source's
business (xprofiler), not the cluster's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU worker (a rank's share of a host)."""

    name: str
    kind: Literal["gpu", "cpu"]
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]  # (dtype, dense peak) pairs
    source: str = ""
    generation: str = ""  # of a GPU: ampere, hopper, ...
    price_per_hour: float | None = None  # None: not known; `price_source` says whose and when
    price_source: str = ""

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for `dtype`; falls back to float32 where the device has no faster unit."""
        table = dict(self.flops_per_s)
        return table.get(dtype, table["float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Point-to-point link, one direction: seconds = latency_s + bytes / bandwidth."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""
    has_peer_access: bool = False  # of a bus: cards read each other's memory over it


# What weights are loaded at, where a cluster does not say. From the SSD: the sequential read rate
# on data sheets of data-centre drives on PCIe 4.0 x4 (6.8 to 7.0 GB/s; the bus carries 7.88). From
# the host's DRAM: a rough constant for one process that copies ordinary (pageable) memory into its
# device, through a pinned buffer by one CPU thread, in the range of the ExeGPT paper's Table 4 (4.1
# to 5.4 GB/s a GPU); the bus of a device carries six times that.
SSD_BYTES_PER_S = 7e9
HOST_BYTES_PER_S = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """`num_nodes` equal nodes of `devices_per_node` equal devices. Weights are loaded from a node's
    SSD at `ssd_bytes_per_s` for all its devices together, and from its DRAM at `host_bytes_per_s`
    into each device, into all at once."""

    device: Device
    num_nodes: int
    devices_per_node: int
    intra_link: Link
    ssd_bytes_per_s: float = SSD_BYTES_PER_S
    host_bytes_per_s: float = HOST_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes, joined by `inter_link`. Planning takes clusters of one group so far; the
    properties below are of that group."""

    name: str
    groups: tuple[NodeGroup, ...]
    inter_link: Link

    @property
    def only(self) -> NodeGroup:
        """The group of a cluster whose nodes are all alike."""
        assert len(self.groups) == 1, f"{self.name} has {len(self.groups)} groups of nodes"
        return self.groups[0]

    @property
    def device(self) -> Device:
        return self.only.device

    @property
    def num_nodes(self) -> int:
        return self.only.num_nodes

    @property
    def devices_per_node(self) -> int:
        return self.only.devices_per_node

    @property
    def intra_link(self) -> Link:
        return self.only.intra_link

    @property
    def num_devices(self) -> int:
        return sum(group.num_nodes * group.devices_per_node for group in self.groups)

    def with_nodes(self, **changes: Any) -> Cluster:
        """The same cluster with some fields of its one group of nodes changed."""
        return replace(self, groups=(replace(self.only, **changes),))

    def node_of(self, rank: int) -> int:
        """Node that holds `rank`; ranks fill a node before the next."""
        assert 0 <= rank < self.num_devices, f"{rank = } of {self.num_devices = }"
        return rank // self.devices_per_node

    def link_between(self, rank_a: int, rank_b: int) -> Link:
        return self.intra_link if self.node_of(rank_a) == self.node_of(rank_b) else self.inter_link


def uniform_cluster(*, name: str, inter_link: Link, **group: Any) -> Cluster:
    """A cluster of equal nodes; `group` are the fields of NodeGroup."""
    return Cluster(name=name, groups=(NodeGroup(**group),), inter_link=inter_link)
