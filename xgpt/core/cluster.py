"""Devices, links and clusters as the planner sees them. A `Device` is a GPU or a CPU worker.

Peak rates are the vendor's dense figures; what part of them is reached is the timing source's
business (xprofiler), not the cluster's.

What joins devices: the inner link of an island (a pair with an NVLink bridge) where one holds them
all, else the node's own link (a switch that joins all of them, or a bus), else the link between
nodes. A group's all-reduce goes at the pace of the slowest link that its ring must cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    reserved_bytes: int = 0  # of what may be planned: what the engine keeps for itself

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
    # Of groups over several nodes, what is crossed first: `per_node` devices in each, and the link
    # that joins those. None: one device in each part.
    inside: Link | None = None
    per_node: int = 1

    @property
    def speed(self) -> tuple[float, bool, float]:
        """Of two links the faster has the greater one: by its rate, then peer access, then
        latency."""
        return self.bandwidth_bytes_per_s, self.has_peer_access, -self.latency_s


# What weights are loaded at, where a cluster does not say. From the SSD: the sequential read rate
# on data sheets of data-centre drives on PCIe 4.0 x4 (6.8 to 7.0 GB/s; the bus carries 7.88). From
# the host's DRAM: a rough constant for one process that copies ordinary (pageable) memory into its
# device, through a pinned buffer by one CPU thread, in the range of the ExeGPT paper's Table 4 (4.1
# to 5.4 GB/s a GPU); the bus of a device carries six times that.
SSD_BYTES_PER_S = 7e9
HOST_BYTES_PER_S = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Devices of a node that a link joins faster than the node's own does: those at the places
    `first` to `first + size - 1`."""

    link: Link
    first: int
    size: int

    @property
    def places(self) -> range:
        return range(self.first, self.first + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` equal nodes of `devices_per_node` equal devices, joined by `inter_link`. Weights
    are loaded from a node's SSD at `ssd_bytes_per_s` for all its devices together, and from its
    DRAM at `host_bytes_per_s` into each device, into all at once.

    Ranks take a node's devices place by place. `islands` are disjoint, the fastest first, and
    `numbers` says which device, as the node numbers them, is at each place (() : as numbered)."""

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    intra_link: Link
    inter_link: Link
    ssd_bytes_per_s: float = SSD_BYTES_PER_S
    host_bytes_per_s: float = HOST_BYTES_PER_S
    islands: tuple[Island, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def with_nodes(self, **changes: Any) -> Cluster:
        """The same cluster with some fields changed. Of fewer devices in a node the first ones
        stay, with the links that they have."""
        most = changes.get("devices_per_node", self.devices_per_node)
        if self.islands and "islands" not in changes and most != self.devices_per_node:
            own = [replace(island, size=size) for island in self.islands
                   if (size := min(island.size, most - island.first)) > 1]
            changes |= {"islands": tuple(own), "numbers": self.numbers[:most]}
        return replace(self, **changes)

    def equal_part(self, devices: int) -> Cluster:
        """So many devices of one node, as the node has them several times beside each other: what
        joins two of them in one of the parts only does not count."""
        part = self.with_nodes(num_nodes=1, devices_per_node=devices)
        if not part.islands:
            return part
        begins = range(0, self.devices_per_node - devices + 1, devices)

        def link(place: int) -> Link | None:
            """What joins it to the next place, in every part."""
            links = [self._inner_link(begin + place, begin + place + 1) for begin in begins]
            return None if None in links else min(filter(None, links), key=lambda own: own.speed)

        islands, first = list[Island](), 0
        for place in range(devices):
            if place + 1 == devices or link(place) is None:
                if place > first and (own := link(first)) is not None:
                    islands.append(Island(link=own, first=first, size=place - first + 1))
                first = place + 1
        return part.with_nodes(islands=tuple(islands), numbers=())

    def node_of(self, rank: int) -> int:
        """Node that holds `rank`; ranks fill a node before the next."""
        assert 0 <= rank < self.num_devices, f"{rank = } of {self = }"
        return rank // self.devices_per_node

    def link_between(self, rank_a: int, rank_b: int) -> Link:
        """What a message between them goes over."""
        if self.node_of(rank_a) != self.node_of(rank_b):
            return self.inter_link
        if not self.islands:
            return self.intra_link
        places = rank_a % self.devices_per_node, rank_b % self.devices_per_node
        return self._inner_link(*places) or self.intra_link

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a ring through these ranks must cross."""
        if any(self.node_of(rank) != self.node_of(ranks[0]) for rank in ranks):
            return self.inter_link
        return min((self.link_between(ranks[0], rank) for rank in ranks[1:]),
                   key=lambda link: link.speed, default=self.intra_link)

    def link_of(self, group: Sequence[int]) -> Link:
        """What a tensor-parallel group sums over: the slowest link of its ring, which over several
        nodes says what joins the ranks inside one, too."""
        if not self.islands and self.node_of(min(group)) == self.node_of(max(group)):
            return self.intra_link
        own = [rank for rank in group if self.node_of(rank) == self.node_of(group[0])]
        slowest = self.slowest_link(group)
        if len(own) in (1, len(group)):
            return slowest
        return replace(slowest, inside=self.slowest_link(own), per_node=len(own))

    def fastest_group(self, size: int) -> tuple[int, ...]:
        """Neighbouring ranks that the fastest link joins of all such groups."""
        if not self.islands:
            return tuple(range(size))
        groups = [tuple(range(first, first + size)) for first in range(
            max(min(self.devices_per_node, self.num_devices) - size, 0) + 1)]
        return max(groups, key=lambda ranks: self.link_of(ranks).speed)

    def _inner_link(self, place_a: int, place_b: int) -> Link | None:
        """What joins two devices of a node besides the node's own link."""
        return next((island.link for island in self.islands
                     if place_a in island.places and place_b in island.places), None)


def places_of(devices_per_node: int, joined: Mapping[Link, Sequence[Sequence[int]]]
              ) -> dict[str, Any]:
    """`islands` and `numbers` of a Cluster. `joined`: the groups of devices that each link joins,
    as the node numbers them. The fastest and largest come first, so that groups and stages, which
    take ranks from the first on, are on the fast links."""
    groups = sorted(((link, sorted(devices)) for link, own in joined.items() for devices in own),
                    key=lambda one: ([-part for part in one[0].speed], -len(one[1]), one[1]))
    numbers = [device for _, devices in groups for device in devices]
    rest = [device for device in range(devices_per_node) if device not in numbers]
    islands, first = list[Island](), 0
    for link, devices in groups:
        islands.append(Island(link=link, first=first, size=len(devices)))
        first += len(devices)
    return {"islands": tuple(islands), "numbers": tuple(numbers + rest)}
