"""Sections of a job file for the planner: `constraint` with the `objective`, and a `cluster` that
is described inline:

    cluster: {device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16,
              links: {nvlink3-bridge: 2}}

The device and the links are catalog names, or mappings with the keys of xgpt.core.cluster's
classes. `intra_link` joins all devices of a node; the one in `links` joins neighbours faster."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from xgpt.core import catalog
from xgpt.core.cluster import HOST_BYTES_PER_S, SSD_BYTES_PER_S, Cluster, Device, Link
from xgpt.core.constraint import (
    ATTAINMENT,
    Bound,
    BoundKind,
    Constraint,
    Metric,
    Objective,
    OnDeadline,
    deadline_bound,
    latency_constraint,
)
from xgpt.core.errors import UnknownNameError, XgptError, nearest
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, parse_bytes, parse_seconds, parse_share
from xgpt.job import typed
from xgpt.job.job import LOCAL_CLUSTER
from xgpt.job.typed import CONFIG, Of, OrMapping, amount, choice, number, whole

ONE_KIND = ("one kind of device: a job is not planned for several. Give each kind a job of its "
            "own, with a share of the requests (by the requests/s that `xgpt schedule` predicts)")
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
    """A check for a mapping with the keys of class `own`, or a name that `row` looks up."""
    def value_of(value: Any) -> Any:
        if isinstance(value, list) and own is not _OwnLink:
            raise ValueError(ONE_KIND)
        try:
            return row(value if isinstance(value, str) else "")
        except UnknownNameError as unknown:
            raise ValueError(str(unknown)) from None

    return typed.OrMapping(own, typed.Of(value_of, enum=names),
                           lambda: f"{', '.join(names())}, or a mapping")


_ALink = Annotated[Any, _or_mapping(_OwnLink, lambda: catalog.names("link"), catalog.link)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineCluster:
    """Keys of the section `cluster`, if it is a mapping."""

    __pydantic_config__ = typed.CONFIG
    device: Annotated[Any, _or_mapping(
        _OwnDevice, lambda: catalog.names("device"), catalog.device_named)]
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


def cluster_words() -> str:
    return f"{', '.join(cluster_names())}, so many GPUs (8xH100), or a mapping"


def _cluster_of(value: Any) -> str:
    """The name of a cluster of the catalog, or of one like `8xH100`. Raises ValueError."""
    if isinstance(value, list):
        raise ValueError(ONE_KIND)
    try:
        return LOCAL_CLUSTER if value == LOCAL_CLUSTER else catalog.cluster(
            value if isinstance(value, str) else "").name
    except XgptError as refused:
        others = f", {LOCAL_CLUSTER}, so many GPUs (8xH100), or a mapping"
        is_name = isinstance(refused, UnknownNameError) and refused.kind == "cluster"
        raise ValueError(f"{refused}{others * is_name}") from None


AnyCluster = Annotated[Any, OrMapping(InlineCluster, Of(_cluster_of, anyOf=lambda: [
    {"enum": cluster_names()},
    {"type": "string", "pattern": f"^{catalog.SIZED.pattern}$"}]), cluster_words)]


def built_cluster(own: InlineCluster, reading: typed.Reading) -> Cluster:
    """The Cluster that the section `cluster` describes."""
    parts: list[Any] = [part.built() if isinstance(part, (_OwnDevice, _OwnLink)) else part
                        for part in (own.device, own.intra_link, own.inter_link)]
    device, intra, inter = parts
    if inter is None and own.num_nodes > 1:
        reading.reject("cluster.inter_link", "required: what joins the nodes: "
                       f"{', '.join(catalog.names('link'))}, or a mapping")
    return Cluster(
        name="inline", device=device, num_nodes=own.num_nodes,
        devices_per_node=own.devices_per_node, intra_link=intra, inter_link=inter or intra,
        ssd_bytes_per_s=own.ssd_bytes_per_s, host_bytes_per_s=own.host_bytes_per_s,
        **_islands(own, intra, reading))


def _islands(own: InlineCluster, intra: Link, reading: typed.Reading) -> dict[str, Any]:
    """Cluster's `island_link` and `island_size`: the link that joins neighbours faster than the
    node's own, and how many it joins; empty without one."""
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


_SECONDS = "seconds > 0, '500 ms'"


def _is_limit(seconds: float) -> bool:
    return 0 < seconds < math.inf


Quantile = Annotated[float, number("between 0 and 1", gt=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A limit in seconds on a metric of requests, perhaps with a quantile of its own."""

    limit_s: Annotated[float, amount(parse_seconds, _is_limit, _SECONDS)]
    quantile: Quantile | None = None


Limit = Annotated[Any, OrMapping(_Limit, amount(parse_seconds, _is_limit, _SECONDS),
                                 f"{_SECONDS}, or {{limit_s: 0.5, quantile: 0.9}}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSection:
    """Keys of the section `constraint`."""

    __pydantic_config__ = CONFIG
    latency_s: Annotated[float, amount(parse_seconds, lambda x: x > 0,
                                       "seconds > 0, '90 s', '2 min', or inf")] = math.inf
    kind: Annotated[BoundKind, choice(get_args(BoundKind))] = "sequence"
    quantile: Quantile = 0.99
    ttft_s: Limit | None = None
    tpot_s: Limit | None = None
    queueing_s: Limit | None = None
    scale: Annotated[float, number("a factor > 0 on all limits", gt=0)] | None = None
    makespan_s: Annotated[float | None, amount(
        parse_seconds, _is_limit, "seconds > 0, '90 min' or '6h'")] = None
    deadline_s: Annotated[float | None, amount(parse_seconds, _is_limit, _SECONDS)] = None
    attainment: Annotated[float, number("above 0 and at most 1", gt=0, le=1)] | None = None
    on_deadline: Annotated[OnDeadline, choice(get_args(OnDeadline))] = "finish"
    confidence: Annotated[float, number("at least 0.5 and below 1", ge=0.5, lt=1)] = 0.95
    drift: Annotated[float, amount(parse_share, lambda x: 0 <= x < 1,
                                   "a share of the mean output length, '15%' or 0.15, below 1")] = (
        0.0)
    memory: Annotated[int | None, amount(parse_bytes, lambda x: x > 0,
                                         "bytes of each device, for example '40 GiB'")] = None
    host_memory: Annotated[int | None, amount(
        parse_bytes, lambda x: x > 0, "bytes of a node below its devices, '200 GiB'")] = None
    disk: Annotated[int | None, amount(
        parse_bytes, lambda x: x > 0, "bytes of a node's disk, '1 TB'")] = None
    max_gpus: Annotated[int, whole(1, 100_000)] | None = None


def constraint_of(own: ConstraintSection, objective: Objective, *, arrive: bool) -> Constraint:
    """The Constraint of the section. `arrive`: requests do so over time; then every limit holds for
    a share of the requests, and `attainment` for all limits jointly."""
    given: dict[Metric, _Limit | float | None] = {
        "ttft": own.ttft_s, "tpot": own.tpot_s, "queueing": own.queueing_s}
    joint, factor = own.attainment if arrive else None, own.scale or 1.0
    limits = {metric: limit if isinstance(limit, _Limit) else _Limit(limit_s=limit)
              for metric, limit in given.items() if limit is not None}
    further = [Bound(metric=metric, limit_s=limit.limit_s * factor, kind="queries",
                     quantile=joint or limit.quantile or own.quantile)
               for metric, limit in limits.items()]
    if own.makespan_s is not None:
        further.append(Bound(metric="makespan", limit_s=own.makespan_s))
    # the limits may be the requests'
    if own.deadline_s is not None or (own.attainment is not None and not arrive):
        further.append(deadline_bound((own.deadline_s or math.inf) * factor,
                                      own.attainment or ATTAINMENT))
    return latency_constraint(
        latency_s=own.latency_s * factor, kind="queries" if arrive else own.kind,
        quantile=joint or own.quantile, attainment=joint,
        further=tuple(further), confidence=own.confidence, drift=own.drift,
        memory_bytes=own.memory, host_bytes=own.host_memory, disk_bytes=own.disk,
        max_gpus=own.max_gpus, objective=objective, on_deadline=own.on_deadline)


def without_limit(constraint: Constraint) -> Iterator[tuple[str, str]]:
    """Yields (key, what is allowed) for each key on deadlines that means nothing, since neither the
    constraint nor, as is assumed, a request has one."""
    needs = "constraint.deadline_s, or requests with deadline_s"
    joint = "constraint.ttft_s, another limit, " if constraint.attainment else ""
    limits_s = [own.limit_s for own in constraint.bounds if joint or own.metric == "deadline"]
    if limits_s and math.isinf(min(limits_s)):
        yield "constraint.attainment", f"needs a limit: {joint}{needs}"
    if constraint.on_deadline == "stop" and math.isinf(min(
            constraint.limit_s("deadline"), constraint.limit_s("makespan"))):
        yield "constraint.on_deadline", f"needs a limit: constraint.makespan_s, {needs}"
