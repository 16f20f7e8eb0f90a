"""Devices, links and clusters as the planner sees them. A `Device` is a GPU or a CPU worker.

Peak rates are the vendor's dense figures; the timing source (xprofiler) knows the share reached.

Devices are joined by the link of an island (a pair with an NVLink bridge) that holds them all, else
by the node's link (a switch or a bus), else by the link between nodes. A group's all-reduce runs at
the pace of the slowest link that its ring must cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


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
    price_per_hour: float | None = None  # None: unknown; `price_source` says whose and when
    price_source: str = ""
    reserved_bytes: int = 0  # of its memory, kept by the engine for itself
    # of what weights and steps leave, for the KV cache; None: all, but of a share of the memory
    cache_share: float | None = None

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak FLOP/s for `dtype`; that of float32 if the device has no rate for it."""
        table = dict(self.flops_per_s)
        return table.get(dtype, table["float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A point-to-point link, one direction: seconds = latency_s + bytes / bandwidth."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""
    has_peer_access: bool = False  # whether cards read each other's memory over this bus
    # for a group over several nodes: the link between its `per_node` devices inside a node; None:
    # one device in each node
    inside: Link | None = None
    per_node: int = 1

    @property
    def speed(self) -> tuple[float, bool, float]:
        """Sort key, greater for the faster link: by rate, then peer access, then latency."""
        return self.bandwidth_bytes_per_s, self.has_peer_access, -self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Memory of a node below its devices, which share it: the host's, or a disk. `up`: the link
    towards the device (of a disk: to the host), `down`: back. `attention`: whether the host
    computes attention over entries that lie there."""

    name: Literal["host", "disk"]
    memory_bytes: int
    up: Link
    down: Link
    attention: bool = False


# Tokens of a KV block, by the kind of device (xrunner.engine.kv).
KV_BLOCK_TOKENS = {"gpu": 16, "cpu": 128}

# Default rates of loading weights. SSD: sequential read rate on data sheets of data-centre drives
# on PCIe 4.0 x4 (6.8 to 7.0 GB/s; the bus carries 7.88). DRAM: a rough constant for one process
# that copies pageable memory to its device through a pinned buffer, by one CPU thread. It lies in
# the range of the ExeGPT paper's Table 4 (4.1 to 5.4 GB/s per GPU); a device's bus carries 6 times
# that.
SSD_BYTES_PER_S = 7e9
HOST_BYTES_PER_S = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` equal nodes of `devices_per_node` equal devices, joined by `inter_link`. Weights
    are loaded from a node's SSD at `ssd_bytes_per_s` for all its devices together, or from its
    DRAM at `host_bytes_per_s` into every device at once.

    `island_link`, if set, joins each `island_size` neighbours of a node faster than `intra_link`
    does. `tiers`: a node's memories for what its devices cannot hold, the host before the disk."""

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    intra_link: Link
    inter_link: Link
    ssd_bytes_per_s: float = SSD_BYTES_PER_S
    host_bytes_per_s: float = HOST_BYTES_PER_S
    island_link: Link | None = None
    island_size: int = 1
    assumed: str = ""  # links that nobody stated, in words; "": all are
    tiers: tuple[Tier, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def tier(self, name: str) -> Tier | None:
        """The tier of that name; None if there is none."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def equal_part(self, devices: int) -> Cluster:
        """A cluster of so many devices of one node, which the node holds several times. An island
        counts only if every such part has it."""
        is_only = 2 * devices > self.devices_per_node
        size = self.island_size if is_only else math.gcd(self.island_size, devices)
        return replace(self, num_nodes=1, devices_per_node=devices, island_size=size,
                       island_link=self.island_link if size > 1 else None)

    def node_of(self, rank: int) -> int:
        """Index of the node that holds `rank`; ranks fill one node before the next."""
        assert 0 <= rank < self.num_devices, f"{rank = } of {self = }"
        return rank // self.devices_per_node

    def link_between(self, rank_a: int, rank_b: int) -> Link:
        """The link that a message between two ranks takes."""
        if self.node_of(rank_a) != self.node_of(rank_b):
            return self.inter_link
        first, second = (rank % self.devices_per_node // self.island_size
                         for rank in (rank_a, rank_b))
        return self.island_link if self.island_link and first == second else self.intra_link

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a ring through these ranks must cross."""
        if any(self.node_of(rank) != self.node_of(ranks[0]) for rank in ranks):
            return self.inter_link
        return min((self.link_between(ranks[0], rank) for rank in ranks[1:]),
                   key=lambda link: link.speed, default=self.intra_link)

    def link_of(self, group: Sequence[int]) -> Link:
        """The link of a tensor-parallel group's all-reduce: the slowest one of its ring. Over
        several nodes its `inside` is the link within a node."""
        if self.island_link is None and self.node_of(min(group)) == self.node_of(max(group)):
            return self.intra_link
        own = [rank for rank in group if self.node_of(rank) == self.node_of(group[0])]
        slowest = self.slowest_link(group)
        if len(own) in (1, len(group)):
            return slowest
        return replace(slowest, inside=self.slowest_link(own), per_node=len(own))
