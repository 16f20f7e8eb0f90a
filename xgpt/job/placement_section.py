"""Sections of a job file for memory below the devices: `tiers` of a node, beside `cluster`, and
`schedule.placement`, which fixes where bytes lie.

    tiers: {host: {memory: 64 GiB, up: 12 GB, down: 12 GB},
            disk: {memory: 1 TB, up: 3 GB, down: 1 GB}}
    schedule: {placement: {weights: [0.2, 0.8, 0], kv: [0, 1, 0], device_batch: 64}}"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Link, Tier
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import Mistake
from xgpt.core.model import ModelSpec
from xgpt.core.placement import DISK, PLACED_POLICIES, TIERS, Shares
from xgpt.core.system.machine import gpus_here
from xgpt.core.units import EIGHT_BITS, parse_bytes, parse_share
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.typed import CONFIG, Flag, Of, Reading, amount, choice, is_one_of, that, whole

_SUM = 1e-6  # chosen: by which shares written with few digits may miss a sum of 1
_SHARES = "three shares (device, host, disk) that sum to 1, such as [0.2, 0.8, 0]"


def _shares(value: Any) -> Shares:
    """The shares of a list. Raises ValueError."""
    if not isinstance(value, list) or len(value) != len(TIERS):
        raise ValueError
    given = [_share(one) for one in value]
    if not abs((total := math.fsum(given)) - 1) <= _SUM:
        raise ValueError(f"{_SHARES}; these sum to {total:.4g}")
    first, second, third = (one / total for one in given)
    return first, second, third


_share = amount(parse_share, lambda x: 0 <= x <= 1, _SHARES).value_of
_Shares = Annotated[Shares | None, Of(
    _shares, _SHARES, type="array", minItems=3, maxItems=3, items={"type": ["number", "string"]})]
_Bits = Annotated[Literal[16, 4] | None, that(
    lambda value: value in (16, 4) and is_one_of(value, int), "16 or 4", enum=[16, 4])]


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """Keys of `schedule.placement`. None leaves a value to the planner."""

    __pydantic_config__ = CONFIG
    weights: _Shares = None
    kv: _Shares = None
    hidden: _Shares = None
    device_batch: Annotated[int, whole(1, 1_000_000)] | None = None
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


_Rate = Annotated[float, amount(parse_bytes, lambda x: 1 <= x < math.inf, "bytes/s, or '3 GB'")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    """Keys of a tier: memory of a node, and the rates towards its devices and back."""

    memory: Annotated[int, amount(parse_bytes, lambda x: 1 <= x < math.inf, "bytes, or '64 GiB'")]
    up: _Rate
    down: _Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host(_Disk):
    attention: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersSection:
    """Keys of the section `tiers`."""

    __pydantic_config__ = CONFIG
    host: _Host | None = None
    disk: _Disk | None = None

    @property
    def built(self) -> tuple[Tier, ...]:
        """The tiers that are given, the host before the disk."""
        def link(rate: float) -> Link:
            return Link(name="tier", bandwidth_bytes_per_s=rate, latency_s=0.0, source="job file")

        return tuple(Tier(name="host" if own is self.host else "disk", memory_bytes=own.memory,
                          up=link(own.up), down=link(own.down),
                          attention=isinstance(own, _Host) and own.attention)
                     for own in (self.host, self.disk) if own is not None)


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
            and not model.is_encoder_decoder and not job.workload.only_encodes
            and job.workload.arrivals is None)


def wrong_placement(job: Job, model: ModelSpec) -> Iterator[Mistake]:
    """Yields a placement of a model that has none."""
    if job.schedule.placement is not None and model.is_encoder_decoder:
        yield Mistake(file=str(job.source), line=None, key="schedule.placement", value=None,
                      allowed=f"left out for {model.name}, an encoder-decoder model")


def _tier_names(job: Job) -> list[str]:
    """Tiers of a node of the job's cluster; this machine's rates are not measured yet."""
    if job.cluster == LOCAL_CLUSTER:
        has_host = any(one.name == "host" for one in job.tiers) or gpus_here()
        return ["host", "disk"] if has_host else ["disk"]
    own = job.cluster if isinstance(job.cluster, Cluster) else catalog.cluster(job.cluster)
    return [tier.name for tier in with_tiers(own, job).tiers]


def check_placed(job: Job, reading: Reading) -> None:
    """Records what contradicts a placement, or memory below the devices, in the file."""
    asked, run, own = job.schedule.placement, job.run, job.schedule
    limits = job.constraint.host_bytes, job.constraint.disk_bytes
    names = _tier_names(job) if job.cluster and (asked or any(limits)) else list(TIERS)
    has = f"a node has {' and '.join(names) or 'none'}; give `tiers`"
    why = f"{OWN_ENGINE}'s own runner alone places bytes on host or disk"
    is_folder, is_own = run.offload not in ("auto", "off"), run.engine == OWN_ENGINE
    wrongs = [(is_folder and not is_own, "run.offload",
               f"auto or off with run.engine {run.engine}: {why}")]
    if asked is not None:
        strange = ", ".join(name for name in own.policies if name not in PLACED_POLICIES)
        beside = "beside schedule.placement"
        wrongs += [
            (asked.hidden is not None and asked.hidden[DISK] > 0, "schedule.placement.hidden",
             "a last share of 0: hidden states never lie on disk"),
            (asked.kv_bits == 4 and bool(asked.host_attention), "schedule.placement.kv_bits",
             "16 with host_attention: true: the host attends to entries as they were computed"),
            (bool(strange) and reading.has("schedule.policy"), "schedule.policy",
             f"{' or '.join(PLACED_POLICIES)} {beside}: {strange} has none"),
            ((own.tp_degree or 1) > 1, "schedule.tp_degree", f"1 {beside}"),
            (bool(own.tp_gpus), "schedule.tp_gpus", f"0 {beside}"),
            (not is_own, "run.engine", f"{OWN_ENGINE} {beside}: {why}"),
            (job.plan_engine != OWN_ENGINE and reading.has("plan.engine"), "plan.engine",
             f"{OWN_ENGINE} {beside}"),
            (run.offload == "off", "run.offload", f"auto, or a folder, {beside}"),
            *((bits == 4 and dtype in EIGHT_BITS, f"schedule.placement.{name}_bits",
               f"16 beside run.{name}_dtype: {dtype}") for name, bits, dtype in (
                   ("weight", asked.weight_bits, run.weight_dtype),
                   ("kv", asked.kv_bits, run.kv_dtype)))]
    for index, name in enumerate(TIERS[1:]):
        if name not in names:
            wrongs += [(limits[index] is not None, f"constraint.{('host_memory', 'disk')[index]}",
                        f"of a cluster with the tier {name}: {has}"),
                       *((bool(shares and shares[1 + index]), f"schedule.placement.{pool}",
                          f"0 for {name}, a tier that is not there: {has}")
                         for pool in ("weights", "kv", "hidden")
                         for shares in [getattr(asked, pool, None)])]
    for is_wrong, key, allowed in wrongs:
        if is_wrong:
            reading.reject(key, allowed)
