"""A cluster described in the job file itself instead of by a catalog name.

    cluster: {device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16}

    cluster: {device: A40, devices_per_node: 4, intra_link: pcie4-x16,
              links: {nvlink3-bridge: 2}}

The device and the links are catalog names, or mappings with the keys of xgpt.core.cluster's
classes. `intra_link` joins all devices of a node, one of `links` neighbours faster, so many of them
at a time.
`ssd_bytes_per_s` and `host_bytes_per_s` (how quickly weights are loaded) may be given too."""

import math
from collections.abc import Callable, Mapping
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
)
from xgpt.core.errors import nearest
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, parse_bytes, parse_seconds
from xgpt.job import typed
from xgpt.job.job import LOCAL_CLUSTER

ONE_KIND = ("one kind of device: a job is not planned for several. Give each kind a job of its "
            "own, with a share of the requests (by the queries/s that `xgpt schedule` predicts)")
_NEIGHBOURS = "a number of neighbours (2: pairs), which divides devices_per_node"
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


def _or_mapping(own: Any, names: Callable[[], list[str]], row: Callable[[str], Any],
                ) -> typed.OrMapping:
    """A mapping, as the class `own`, or what `row` makes of one of the names."""
    one = typed.choice(names)

    def value_of(value: Any) -> Any:
        if isinstance(value, list) and own is not _OwnLink:
            raise ValueError(ONE_KIND)
        return row(one.value_of(value))

    return typed.OrMapping(own, typed.Of(value_of, enum=names),
                           lambda: f"{', '.join(names())}, or a mapping")


_ALink = Annotated[Any, _or_mapping(_OwnLink, lambda: catalog.names("link"), catalog.link)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineCluster:
    """The mapping's keys."""

    __pydantic_config__ = typed.CONFIG
    device: Annotated[Any, _or_mapping(
        _OwnDevice, lambda: catalog.names("device"), catalog.device)]
    num_nodes: Annotated[int, typed.whole(1, 100_000)] = 1
    devices_per_node: Annotated[int, typed.whole(1, 1024)]
    intra_link: _ALink
    inter_link: _ALink = None
    links: Annotated[Mapping[str, Any] | None, typed.any_keys(
        "one link, and how many neighbours it joins: {nvlink3-bridge: 2}")] = None
    ssd_bytes_per_s: _Bandwidth = SSD_BYTES_PER_S
    host_bytes_per_s: _Bandwidth = HOST_BYTES_PER_S


def cluster_names() -> list[str]:
    return [*catalog.names("cluster"), LOCAL_CLUSTER]


AnyCluster = Annotated[Any, _or_mapping(InlineCluster, cluster_names, str)]


def _built(part: Any) -> Any:
    return part.built() if isinstance(part, (_OwnDevice, _OwnLink)) else part


def built_cluster(own: InlineCluster, reading: typed.Reading) -> Cluster:
    """The cluster that is described under the key `cluster`."""
    device, intra, inter = map(_built, (own.device, own.intra_link, own.inter_link))
    if inter is None and own.num_nodes > 1:
        reading.reject("cluster.inter_link", "required: what joins the nodes: "
                       f"{', '.join(catalog.names('link'))}, or a mapping")
    return Cluster(
        name="inline", device=device, num_nodes=own.num_nodes,
        devices_per_node=own.devices_per_node, intra_link=intra, inter_link=inter or intra,
        ssd_bytes_per_s=own.ssd_bytes_per_s, host_bytes_per_s=own.host_bytes_per_s,
        **_islands(own, intra, reading))


def _islands(own: InlineCluster, intra: Link, reading: typed.Reading) -> dict[str, Any]:
    """The link that joins neighbours faster than the node's own, and how many."""
    known, found, links = catalog.names("link"), dict[str, Any](), own.links or {}
    for name, size in links.items():
        key = f"cluster.links.{name}"
        if name not in known:
            reading.reject(key, f"unknown key; {nearest(name, known)}")
        elif not typed.is_one_of(size, int) or size < 2 or own.devices_per_node % size:
            reading.reject(key, _NEIGHBOURS)
        elif catalog.link(name).speed <= intra.speed:
            reading.reject(key, "a link that is faster than intra_link, which joins all devices of "
                           "a node")
        else:
            found = {"island_link": catalog.link(name), "island_size": size}
    if len(links) > 1:
        reading.reject("cluster.links", "one link alone")
    return found
