"""A cluster described in the job file itself instead of by a catalog name.

    cluster: {device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16}

The device and the links are catalog names, or mappings with the keys of xgpt.core.cluster's
classes.
`ssd_bytes_per_s` and `host_bytes_per_s` (how quickly weights are loaded) may be given too."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Device, Link, uniform_cluster
from xgpt.core.constraint_section import read_price
from xgpt.core.sections import Section
from xgpt.core.units import DTYPE_BYTES, parse_bytes, parse_seconds

_LOADING = ("ssd_bytes_per_s", "host_bytes_per_s")  # may be left out: xgpt.core.cluster's defaults


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
               **{key: _bandwidth(section, key) for key in _LOADING if section.has(key)}}
    section.finish()
    return cluster


def _read_part(section: Section, key: str, kind: catalog.Kind,
               read: Callable[[Section], dict[str, Any]]) -> str | dict[str, Any]:
    """A catalog row's name, or a mapping that `read` understands."""
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
        for dtype in DTYPE_BYTES:
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
                                          lambda x: 0 <= x < math.inf, "seconds >= 0, or '10 us'")}


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
        **{key: mapping[key] for key in _LOADING if key in mapping})


def _build_link(row: str | Mapping[str, Any]) -> Link:
    return catalog.link(row) if isinstance(row, str) else Link(**row, source="job file")
