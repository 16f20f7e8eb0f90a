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
from typing import Any

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Device, Link, places_of, uniform_cluster
from xgpt.core.constraint_section import read_price
from xgpt.core.sections import Section, is_one_of
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, parse_bytes, parse_seconds

_LOADING = ("ssd_bytes_per_s", "host_bytes_per_s")  # may be left out: xgpt.core.cluster's defaults


_ONE_KIND = ("one kind of device: a job is not planned for several. Give each kind a job of its "
             "own, with a share of the requests (by the queries/s that `xgpt schedule` predicts)")


def is_of_several(section: Section, key: str) -> bool:
    """Whether a list stands where one cluster or device is to be named; that is a mistake."""
    field = section.get(key)
    if field is None or not isinstance(field.value, list):
        return False
    section.reject(key, _ONE_KIND)
    return True


def read_inline_cluster(section: Section) -> dict[str, Any]:
    """The mapping with its defaults filled in; `build_cluster` makes a Cluster of it."""
    num_nodes = section.integer("num_nodes", 1, 1, 100_000)
    per_node = section.integer("devices_per_node", None, 1, 1024)
    if not section.has("devices_per_node"):
        section.reject("devices_per_node", "required: a whole number >= 1")
    intra = _read_part(section, "intra_link", "link", _read_link)
    needs_inter = num_nodes > 1 or section.has("inter_link")
    inter = _read_part(section, "inter_link", "link", _read_link) if needs_inter else intra
    cluster = {"device": _read_part(section, "device", "device", _read_device),
               "num_nodes": num_nodes, "devices_per_node": per_node,
               "intra_link": intra, "inter_link": inter,
               **_read_links(section, per_node or 0, intra),
               **{key: _bandwidth(section, key) for key in _LOADING if section.has(key)}}
    section.finish()
    return cluster


def _read_links(section: Section, per_node: int, intra: str | dict[str, Any]) -> dict[str, Any]:
    """{"links": groups of devices by the link that joins them}; {} where none is faster than the
    node's own."""
    inner = section.section("links", "a mapping of links to groups of devices")
    if inner is None:
        return {}
    found, taken = dict[str, list[list[int]]](), set[int]()
    is_known = bool(intra if isinstance(intra, str) else intra["bandwidth_bytes_per_s"])
    for name in catalog.names("link"):
        if (field := inner.get(name)) is None:
            continue
        if (groups := _groups(field.value, per_node)) is None:
            inner.reject(name, _GROUPS)
            continue
        own = {device for group in groups for device in group}
        if taken & own:
            inner.reject(name, f"each device in one group at most: {min(taken & own)} is in two")
        if is_known and catalog.link(name).speed <= _build_link(intra).speed:
            inner.reject(name, "a link that is faster than intra_link, which joins all devices of "
                         "a node")
        taken |= own
        found[name] = groups
    inner.finish()
    return {"links": found} if found else {}


_GROUPS = ("a number of neighbours (2: pairs), or groups of devices as a node numbers them, as "
           "[[0, 1], [2, 3]]: two and more in each, each device in one group at most")


def _groups(value: Any, per_node: int) -> list[list[int]] | None:
    if is_one_of(value, int) and 2 <= value <= per_node:
        return [list(range(first, first + value))
                for first in range(0, per_node - value + 1, value)]
    if not isinstance(value, list) or not value:
        return None
    groups = [[part.value for part in group.value] if isinstance(group.value, list) else []
              for group in value]
    devices = [device for group in groups for device in group]
    is_right = (all(is_one_of(device, int) for device in devices)
                and len(set(devices)) == len(devices) and set(devices) <= set(range(per_node))
                and min(map(len, groups)) > 1)
    return groups if is_right else None


def _read_part(section: Section, key: str, kind: catalog.Kind,
               read: Callable[[Section], dict[str, Any]]) -> str | dict[str, Any]:
    """A catalog row's name, or a mapping that `read` understands."""
    if kind == "device" and is_of_several(section, key):
        return ""
    if not section.has(key):
        section.reject(key, f"required: {', '.join(catalog.names(kind))}, or a mapping")
        return ""
    if (inner := section.mapping(key)) is None:
        return section.choice(key, "", catalog.names(kind))
    row = read(inner)
    inner.finish()
    return row


def _read_device(section: Section) -> dict[str, Any]:
    rates = section.section("flops_per_s")
    flops: dict[str, float] = {}
    if rates is None and not section.has("flops_per_s"):
        section.reject("flops_per_s", "required: {float32: ..., bfloat16: ...}, dense peak rates")
    if rates is not None:
        for dtype in (*DTYPE_BYTES, *EIGHT_BITS):
            rate = rates.number(dtype, None, lambda x: x > 0, "FLOP/s > 0")
            if rate is not None:
                flops[dtype] = rate
        if not rates.has("float32"):
            rates.reject("float32", "required: FLOP/s > 0")
        rates.finish()
    return {"name": section.text("name", "custom"),
            "kind": section.choice("kind", "gpu", ("gpu", "cpu")),
            "memory_bytes": _required_amount(section, "memory_bytes", parse_bytes,
                                             lambda x: 1 <= x < math.inf, "bytes, or '48 GiB'"),
            "bandwidth_bytes_per_s": _bandwidth(section), "flops_per_s": flops,
            "price_per_hour": read_price(section)}


def _read_link(section: Section) -> dict[str, Any]:
    return {"name": section.text("name", "custom"), "bandwidth_bytes_per_s": _bandwidth(section),
            "latency_s": _required_amount(section, "latency_s", parse_seconds,
                                          lambda x: 0 <= x < math.inf, "seconds >= 0, or '10 us'"),
            "has_peer_access": section.flag("has_peer_access", False)}


def _bandwidth(section: Section, key: str = "bandwidth_bytes_per_s") -> float:
    return float(_required_amount(section, key, parse_bytes,
                                  lambda x: 1 <= x < math.inf, "bytes/s, or '25 GB'"))


def _required_amount(section: Section, key: str, parse: Callable[[str | int | float], float],
                     is_allowed: Callable[[float], bool], allowed: str) -> float:
    if not section.has(key):
        section.reject(key, f"required: {allowed}")
        return 0.0
    return section.amount(key, 0.0, parse, is_allowed, allowed)


def build_cluster(mapping: Mapping[str, Any]) -> Cluster:
    """The Cluster of a mapping that `read_inline_cluster` accepted."""
    device, intra, inter = mapping["device"], mapping["intra_link"], mapping["inter_link"]
    return uniform_cluster(
        name="inline",
        device=catalog.device(device) if isinstance(device, str) else Device(**{
            **device, "memory_bytes": int(device["memory_bytes"]), "source": "job file",
            "flops_per_s": tuple(device["flops_per_s"].items())}),
        num_nodes=mapping["num_nodes"], devices_per_node=mapping["devices_per_node"],
        intra_link=_build_link(intra), inter_link=_build_link(inter),
        **(places_of(mapping["devices_per_node"], {
            catalog.link(name): groups for name, groups in mapping["links"].items()})
           if "links" in mapping else {}),
        **{key: mapping[key] for key in _LOADING if key in mapping})


def _build_link(row: str | Mapping[str, Any]) -> Link:
    return catalog.link(row) if isinstance(row, str) else Link(**row, source="job file")
