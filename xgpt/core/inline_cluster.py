"""A cluster described in the job file itself instead of by a catalog name.

    cluster: {device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16}

    cluster: {device: A40, devices_per_node: 4, intra_link: pcie4-x16,
              links: {nvlink3-bridge: [[0, 1], [2, 3]]}}

The device and the links are catalog names, or mappings with the keys of xgpt.core.cluster's
classes. `intra_link` joins all devices of a node, `links` some of them faster: groups of devices as
the node numbers them, or a number of neighbours (`nvlink3-bridge: 2`), as often as a node has them.
`ssd_bytes_per_s` and `host_bytes_per_s` (how quickly weights are loaded) may be given too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core import catalog
from xgpt.core.cluster import (
    HOST_BYTES_PER_S,
    SSD_BYTES_PER_S,
    Cluster,
    Device,
    Link,
    places_of,
    uniform_cluster,
)
from xgpt.core.errors import nearest
from xgpt.core.sections import Section, typed
from xgpt.core.typed import (
    CONFIG,
    Flag,
    NameOr,
    Text,
    amount,
    any_keys,
    choice,
    is_one_of,
    number,
    whole,
)
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, parse_bytes, parse_seconds

ONE_KIND = ("one kind of device: a job is not planned for several. Give each kind a job of its "
            "own, with a share of the requests (by the queries/s that `xgpt schedule` predicts)")
_GROUPS = ("a number of neighbours (2: pairs), or groups of devices as a node numbers them, as "
           "[[0, 1], [2, 3]]: two and more in each, each device in one group at most")
Price = Annotated[float, number("what one device costs in an hour, a number > 0", gt=0)]
_Bandwidth = Annotated[float, amount(
    parse_bytes, lambda x: 1 <= x < math.inf, "bytes/s, or '25 GB'")]
_Rate = Annotated[float, number("FLOP/s > 0", gt=0)]
_Rates = make_dataclass("_Rates", [("float32", _Rate), *(
    (name, _Rate | None, None) for name in (*DTYPE_BYTES, *EIGHT_BITS) if name != "float32")])


@dataclass(frozen=True, kw_only=True)
class _OwnDevice:
    flops_per_s: Annotated[_Rates, Field(  # type: ignore[valid-type]
        description="{float32: ..., bfloat16: ...}, dense peak rates")]
    memory_bytes: Annotated[int, amount(parse_bytes, lambda x: 1 <= x < math.inf,
                                        "bytes, or '48 GiB'")]
    bandwidth_bytes_per_s: _Bandwidth
    name: Text = "custom"
    kind: Annotated[Literal["gpu", "cpu"], choice(("gpu", "cpu"))] = "gpu"
    price_per_hour: Price | None = None

    def built(self) -> Device:
        rates = {name: rate for name, rate in vars(self.flops_per_s).items() if rate is not None}
        return Device(**{**vars(self), "flops_per_s": tuple(rates.items()), "source": "job file"})


@dataclass(frozen=True, kw_only=True)
class _OwnLink:
    bandwidth_bytes_per_s: _Bandwidth
    latency_s: Annotated[float, amount(parse_seconds, lambda x: 0 <= x < math.inf,
                                       "seconds >= 0, or '10 us'")]
    name: Text = "custom"
    has_peer_access: Flag = False

    def built(self) -> Link:
        return Link(**vars(self), source="job file")


_Link = Annotated[Any, NameOr(_OwnLink, lambda: catalog.names("link"), catalog.link)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineCluster:
    """The mapping's keys."""

    __pydantic_config__ = CONFIG
    device: Annotated[Any, NameOr(_OwnDevice, lambda: catalog.names("device"), catalog.device,
                                  of_list=ONE_KIND)]
    num_nodes: Annotated[int, whole(1, 100_000)] = 1
    devices_per_node: Annotated[int, whole(1, 1024)]
    intra_link: _Link
    inter_link: _Link = None
    links: Annotated[Mapping[str, Any] | None, any_keys(
        "a mapping of links to groups of devices")] = None
    ssd_bytes_per_s: _Bandwidth = SSD_BYTES_PER_S
    host_bytes_per_s: _Bandwidth = HOST_BYTES_PER_S


def read_inline_cluster(top: Section) -> Cluster | str:
    """The cluster that is described; "" where it is wrong."""
    own: InlineCluster | None = typed(top, "cluster", InlineCluster)
    section = top.mapping("cluster")
    assert section is not None
    if own is None:
        return ""
    if own.inter_link is None and own.num_nodes > 1:
        section.reject("inter_link", f"required: {', '.join(catalog.names('link'))}, or a mapping")
    joined = _joined(section, own)
    return uniform_cluster(
        name="inline", device=own.device, num_nodes=own.num_nodes,
        devices_per_node=own.devices_per_node, intra_link=own.intra_link,
        inter_link=own.inter_link or own.intra_link, ssd_bytes_per_s=own.ssd_bytes_per_s,
        host_bytes_per_s=own.host_bytes_per_s,
        **(places_of(own.devices_per_node, joined) if joined else {}))


def _joined(section: Section, own: InlineCluster) -> dict[Link, list[list[int]]]:
    """Groups of devices by the link that joins them; {} where none is faster than the node's."""
    inner, known = section.mapping("links"), catalog.names("link")
    found, taken = dict[Link, list[list[int]]](), set[int]()
    for name, value in (own.links or {}).items():
        assert inner is not None
        if name not in known:
            inner.reject(name, f"unknown key; {nearest(name, known)}")
        elif (groups := _groups(value, own.devices_per_node)) is None:
            inner.reject(name, _GROUPS)
        else:
            devices = {device for group in groups for device in group}
            if taken & devices:
                inner.reject(name, "each device in one group at most: "
                             f"{min(taken & devices)} is in two")
            if catalog.link(name).speed <= own.intra_link.speed:
                inner.reject(name, "a link that is faster than intra_link, which joins all "
                             "devices of a node")
            taken |= devices
            found[catalog.link(name)] = groups
    return found


def _groups(value: Any, per_node: int) -> list[list[int]] | None:
    if is_one_of(value, int) and 2 <= value <= per_node:
        return [list(range(first, first + value))
                for first in range(0, per_node - value + 1, value)]
    if not isinstance(value, list) or not value:
        return None
    groups = [group if isinstance(group, list) else [] for group in value]
    devices = [device for group in groups for device in group]
    is_right = (all(is_one_of(device, int) for device in devices)
                and len(set(devices)) == len(devices) and set(devices) <= set(range(per_node))
                and min(map(len, groups)) > 1)
    return groups if is_right else None
