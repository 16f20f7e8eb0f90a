"""Sections of a job file for memory below the devices: `tiers` of a node, beside `cluster`, and
`schedule.placement`, which fixes where bytes lie.

    tiers: {host: {memory: 64 GiB, up: 12 GB, down: 12 GB},
            disk: {memory: 1 TB, up: 3 GB, down: 1 GB}}
    schedule: {placement: {weights: [0.2, 0.8, 0], kv: [0, 1, 0], device_batch: 64}}"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Device, Link, Tier
from xgpt.core.constraint import Constraint
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import Mistake
from xgpt.core.model import ModelSpec
from xgpt.core.placement import DISK, HOST, TIERS, AskedPlacement, Shares
from xgpt.core.units import EIGHT_BITS, parse_bytes, parse_share
from xgpt.job import typed
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.typed import CONFIG, Flag, Of, Reading, choice, that, whole

PLACED_POLICIES = ("rra", "ft")
_SUM = 1e-6  # chosen: by which shares written with few digits may miss a sum of 1
_SHARES = "three shares (device, host, disk) that sum to 1, such as [0.2, 0.8, 0]"
_MOST_REQUESTS = 1_000_000  # chosen, as of other numbers of requests


def _shares(value: Any) -> Shares:
    """The shares of a list, each from 0 to 1. Raises ValueError."""
    if not isinstance(value, list) or len(value) != len(TIERS):
        raise ValueError
    try:
        first, second, third = (0.0 + parse_share(one) for one in value)
    except (TypeError, ValueError):
        raise ValueError from None
    total = first + second + third
    if not all(0 <= one <= 1 for one in (first, second, third)):
        raise ValueError
    if not abs(total - 1) <= _SUM:
        raise ValueError(f"{_SHARES}; these sum to {total:.4g}")
    return first / total, second / total, third / total


_Shares = Annotated[Shares | None, Of(
    _shares, _SHARES, type="array", minItems=3, maxItems=3, items={"type": ["number", "string"]})]
_Bits = Annotated[Literal[16, 4] | None, that(
    lambda value: value in (16, 4) and typed.is_one_of(value, int), "16 or 4", enum=[16, 4])]


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """Keys of `schedule.placement`. None leaves a value to the planner."""

    __pydantic_config__ = CONFIG
    weights: _Shares = None
    kv: _Shares = None
    hidden: _Shares = None
    device_batch: Annotated[int, whole(1, _MOST_REQUESTS)] | None = None
    order: Annotated[Literal["zigzag", "row"] | None, choice(("zigzag", "row"))] = None
    overlap: Flag | None = None
    host_attention: Annotated[bool | None, that(
        lambda value: value == "auto" or isinstance(value, bool), "auto, true or false",
        lambda value: None if value == "auto" else value, enum=["auto", True, False])] = None
    weight_bits: _Bits = None
    kv_bits: _Bits = None


# fields of the section `schedule`
FIELDS = (("placement", Annotated[_Placement | None, Field(
    description="a mapping, for example {weights: [0.2, 0.8, 0], kv: [0, 1, 0]}")], None),)


def placement_of(reading: Reading, own: Any) -> AskedPlacement | None:
    """The values of a placement that the section `schedule`, read as `own`, fixes; None: it has
    none."""
    if own.placement is None:
        return None
    key, asked = "schedule.placement", AskedPlacement(**vars(own.placement))
    if asked.hidden is not None and asked.hidden[DISK]:
        reading.reject(f"{key}.hidden", "a last share of 0: hidden states never lie on disk")
    if asked.kv_bits == 4 and asked.host_attention:
        reading.reject(f"{key}.kv_bits", "16 with host_attention: true: the host attends to "
                       "entries as they were computed")
    if strange := [name for name in own.policies if name not in PLACED_POLICIES]:
        reading.reject("schedule.policy", f"{' or '.join(PLACED_POLICIES)} beside placement: "
                       f"{', '.join(strange)} has none")
    for name in ("tp_degree", "tp_gpus"):
        if (getattr(own, name) or 0) > (name == "tp_degree"):
            reading.reject(f"schedule.{name}", "left out beside placement: a placed stage has one "
                           "device")
    return asked


_Bytes = Annotated[int, typed.amount(parse_bytes, lambda x: 1 <= x < math.inf,
                                     "bytes, or '64 GiB'")]
_Rate = Annotated[float, typed.amount(parse_bytes, lambda x: 1 <= x < math.inf,
                                      "bytes/s, or '3 GB'")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tier:
    """Keys of a tier: memory of a node, and the rates towards its devices and back."""

    memory: _Bytes
    up: _Rate
    down: _Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host(_Tier):
    attention: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersSection:
    """Keys of the section `tiers`."""

    __pydantic_config__ = CONFIG
    host: _Host | None = None
    disk: _Tier | None = None

    @property
    def built(self) -> tuple[Tier, ...]:
        """The tiers that are given, the host before the disk."""
        given: list[tuple[Literal["host", "disk"], _Tier | None]] = [
            ("host", self.host), ("disk", self.disk)]
        return tuple(Tier(
            name=name, memory_bytes=own.memory, up=_link(f"{name} up", own.up),
            down=_link(f"{name} down", own.down),
            attention=isinstance(own, _Host) and own.attention)
            for name, own in given if own is not None)


def _link(name: str, bytes_per_s: float) -> Link:
    return Link(name=name, bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0, source="job file")


def with_tiers(cluster: Cluster, job: Job) -> Cluster:
    """`cluster` with the tiers that the job gives in place of its own, as far as the constraint
    allows."""
    found = {tier.name: tier for tier in (*cluster.tiers, *job.tiers)}
    most = {"host": job.constraint.host_bytes, "disk": job.constraint.disk_bytes}
    return replace(cluster, tiers=tuple(
        replace(tier, memory_bytes=min(tier.memory_bytes, most[tier.name] or tier.memory_bytes))
        for tier in sorted(found.values(), key=lambda tier: TIERS.index(tier.name))))


def may_offload(job: Job, model: ModelSpec) -> bool:
    """Whether the job may work with memory below the devices."""
    return (job.run.offload != "off" and job.run.engine == job.plan_engine == OWN_ENGINE
            and not model.is_encoder_decoder)


def wrong_placement(job: Job, model: ModelSpec, device: Device) -> Iterator[Mistake]:
    """Yields what the job asks of memory below the devices that the model or this machine has
    not."""
    asked, wrongs = job.schedule.placement, list[tuple[str, str]]()
    if job.cluster == LOCAL_CLUSTER:
        given = {tier.name for tier in job.tiers}
        names = ["host"] * (device.kind == "gpu" or "host" in given) + ["disk"]
        wrongs += wrong_tiers(asked, job.constraint, names)
    if asked is not None and model.is_encoder_decoder:
        wrongs.append(("schedule.placement", f"left out for {model.name}, an encoder-decoder "
                       "model"))
    for key, allowed in wrongs:
        yield Mistake(file=str(job.source), line=None, key=key, value=None, allowed=allowed)


def wrong_tiers(asked: AskedPlacement | None, constraint: Constraint, tiers: Sequence[str],
                ) -> Iterator[tuple[str, str]]:
    """Yields (key, what is allowed) for each key that needs a tier which a node has not. `tiers`:
    names of those that it has."""
    lacking = [(index, name) for index, name in enumerate(TIERS) if index and name not in tiers]
    has = f"a node has {' and '.join(tiers) or 'none'}; give `tiers`"
    for index, name in lacking:
        key, limit = {HOST: ("host_memory", constraint.host_bytes),
                      DISK: ("disk", constraint.disk_bytes)}[index]
        if limit is not None:
            yield f"constraint.{key}", f"of a cluster with the tier {name}: {has}"
        for pool in ("weights", "kv", "hidden"):
            shares = None if asked is None else getattr(asked, pool)
            if shares is not None and shares[index]:
                yield (f"schedule.placement.{pool}",
                       f"0 for {name}, a tier that is not there: {has}")


def check_placed(job: Job, reading: Reading) -> None:
    """Records what contradicts a placement, or memory below the devices, in the rest of the file.
    """
    asked, run = job.schedule.placement, job.run
    if job.cluster not in (LOCAL_CLUSTER, ""):  # this machine's are measured: xgpt.job.resolve
        own = job.cluster if isinstance(job.cluster, Cluster) else catalog.cluster(job.cluster)
        names = [tier.name for tier in with_tiers(own, job).tiers]
        for key, allowed in wrong_tiers(asked, job.constraint, names):
            reading.reject(key, allowed)
    if run.engine != OWN_ENGINE and run.offload not in ("auto", "off"):
        reading.reject("run.offload", f"auto or off with run.engine {run.engine}: xgpt's own "
                       "runner alone works with memory below the devices")
    if asked is None:
        return
    if run.engine != OWN_ENGINE:
        reading.reject("run.engine", f"{OWN_ENGINE} beside schedule.placement: xgpt's own runner "
                       "alone works with memory below the devices")
    if job.plan_engine != OWN_ENGINE and reading.has("plan.engine"):
        reading.reject("plan.engine", f"{OWN_ENGINE} beside schedule.placement")
    if run.offload == "off":
        reading.reject("run.offload", "auto, or a folder, beside schedule.placement")
    for key, bits in (("weight", asked.weight_bits), ("kv", asked.kv_bits)):
        dtype = getattr(run, f"{key}_dtype")
        if bits == 4 and dtype in EIGHT_BITS:
            reading.reject(f"schedule.placement.{key}_bits", f"16 beside run.{key}_dtype: {dtype}")
