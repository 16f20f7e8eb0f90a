"""A cluster described in the job file itself instead of by a catalog name.

    cluster: {device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16}

    cluster: {device: A40, devices_per_node: 4, intra_link: pcie4-x16,
              links: {nvlink3-bridge: [[0, 1], [2, 3]]}}

The device and the links are catalog names, or mappings with the keys of xgpt.core.cluster's
classes. `intra_link` joins all devices of a node, `links` some of them faster: groups of devices as
the node numbers them, or a number of neighbours (`nvlink3-bridge: 2`), as often as a node has them.
`ssd_bytes_per_s` and `host_bytes_per_s` (how quickly weights are loaded) may be given too."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from functools import partial
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
)
from xgpt.core.errors import nearest
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, parse_bytes, parse_seconds
from xgpt.job import typed
from xgpt.job.job import LOCAL_CLUSTER

ONE_KIND = ("one kind of device: a job is not planned for several. Give each kind a job of its "
            "own, with a share of the requests (by the queries/s that `xgpt schedule` predicts)")
_GROUPS = ("a number of neighbours (2: pairs), or groups of devices as a node numbers them, as "
           "[[0, 1], [2, 3]]: two and more in each, each device in one group at most")
Price = Annotated[float, typed.number("what one device costs in an hour, a number > 0", gt=0)]
_Bandwidth = Annotated[float, typed.amount(
    parse_bytes, lambda x: 1 <= x < math.inf, "bytes/s, or '25 GB'")]
_Rate = Annotated[float, typed.number("FLOP/s > 0", gt=0)]
_Rates = make_dataclass("_Rates", [("float32", _Rate), *(
    (name, _Rate | None, None) for name in (*DTYPE_BYTES, *EIGHT_BITS) if name != "float32")])


@dataclass(frozen=True, kw_only=True)
class _OwnDevice:
    flops_per_s: Annotated[_Rates, Field(  # type: ignore[valid-type]
        description="{float32: ..., bfloat16: ...}, dense peak rates")]
    memory_bytes: Annotated[int, typed.amount(parse_bytes, lambda x: 1 <= x < math.inf,
                                        "bytes, or '48 GiB'")]
    bandwidth_bytes_per_s: _Bandwidth
    name: typed.Text = "custom"
    kind: Annotated[Literal["gpu", "cpu"], typed.choice(("gpu", "cpu"))] = "gpu"
    price_per_hour: Price | None = None

    def built(self) -> Device:
        rates = {name: rate for name, rate in vars(self.flops_per_s).items() if rate is not None}
        return Device(**{**vars(self), "flops_per_s": tuple(rates.items()), "source": "job file"})


@dataclass(frozen=True, kw_only=True)
class _OwnLink:
    bandwidth_bytes_per_s: _Bandwidth
    latency_s: Annotated[float, typed.amount(parse_seconds, lambda x: 0 <= x < math.inf,
                                       "seconds >= 0, or '10 us'")]
    name: typed.Text = "custom"
    has_peer_access: typed.Flag = False

    def built(self) -> Link:
        return Link(**vars(self), source="job file")


def _row(kind: catalog.Kind, row: Callable[[str], Any]) -> typed.Of:
    """A catalog row by its name."""
    one = typed.choice(lambda: catalog.names(kind))

    def value_of(value: Any) -> Any:
        if kind == "device" and isinstance(value, list):
            raise ValueError(ONE_KIND)
        return row(one.value_of(value))

    return typed.Of(value_of, enum=lambda: catalog.names(kind))


def _or_mapping(kind: catalog.Kind) -> str:
    return f"{', '.join(catalog.names(kind))}, or a mapping"


_ALink = Annotated[Any, typed.OrMapping(_OwnLink, _row("link", catalog.link), partial(
    _or_mapping, "link"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineCluster:
    """The mapping's keys."""

    __pydantic_config__ = typed.CONFIG
    device: Annotated[Any, typed.OrMapping(_OwnDevice, _row("device", catalog.device), partial(
        _or_mapping, "device"))]
    num_nodes: Annotated[int, typed.whole(1, 100_000)] = 1
    devices_per_node: Annotated[int, typed.whole(1, 1024)]
    intra_link: _ALink
    inter_link: _ALink = None
    links: Annotated[Mapping[str, Any] | None, typed.any_keys(
        "a mapping of links to groups of devices")] = None
    ssd_bytes_per_s: _Bandwidth = SSD_BYTES_PER_S
    host_bytes_per_s: _Bandwidth = HOST_BYTES_PER_S


def _name(value: Any) -> str:
    if isinstance(value, list):
        raise ValueError(ONE_KIND)
    return str(typed.choice(cluster_names).value_of(value))


def cluster_names() -> list[str]:
    return [*catalog.names("cluster"), LOCAL_CLUSTER]


AnyCluster = Annotated[Any, typed.OrMapping(
    InlineCluster, typed.Of(_name, enum=cluster_names),
    lambda: f"{', '.join(cluster_names())}, or a mapping")]


def _built(part: Any) -> Any:
    return part.built() if isinstance(part, (_OwnDevice, _OwnLink)) else part


def built_cluster(own: InlineCluster, reading: typed.Reading) -> Cluster:
    """The cluster that is described under the key `cluster`."""
    device, intra, inter = map(_built, (own.device, own.intra_link, own.inter_link))
    if inter is None and own.num_nodes > 1:
        reading.reject("cluster.inter_link", f"required: {_or_mapping('link')}")
    joined = _joined(own, intra, reading)
    return Cluster(
        name="inline", device=device, num_nodes=own.num_nodes,
        devices_per_node=own.devices_per_node, intra_link=intra, inter_link=inter or intra,
        ssd_bytes_per_s=own.ssd_bytes_per_s, host_bytes_per_s=own.host_bytes_per_s,
        **(places_of(own.devices_per_node, joined) if joined else {}))


def _joined(own: InlineCluster, intra: Link, reading: typed.Reading) -> dict[Link, list[list[int]]]:
    """Groups of devices by the link that joins them; {} where none is faster than the node's."""
    known, found, taken = catalog.names("link"), dict[Link, list[list[int]]](), set[int]()
    for name, value in (own.links or {}).items():
        key = f"cluster.links.{name}"
        if name not in known:
            reading.reject(key, f"unknown key; {nearest(name, known)}")
        elif (groups := _groups(value, own.devices_per_node)) is None:
            reading.reject(key, _GROUPS)
        else:
            devices = {device for group in groups for device in group}
            if taken & devices:
                reading.reject(key, "each device in one group at most: "
                               f"{min(taken & devices)} is in two")
            if catalog.link(name).speed <= intra.speed:
                reading.reject(key, "a link that is faster than intra_link, which joins all "
                               "devices of a node")
            taken |= devices
            found[catalog.link(name)] = groups
    return found


def _groups(value: Any, per_node: int) -> list[list[int]] | None:
    if typed.is_one_of(value, int) and 2 <= value <= per_node:
        return [list(range(first, first + value))
                for first in range(0, per_node - value + 1, value)]
    if not isinstance(value, list) or not value:
        return None
    groups = [group if isinstance(group, list) else [] for group in value]
    devices = [device for group in groups for device in group]
    is_right = (all(typed.is_one_of(device, int) for device in devices)
                and len(set(devices)) == len(devices) and set(devices) <= set(range(per_node))
                and min(map(len, groups)) > 1)
    return groups if is_right else None
