"""The scheduler's results, which the runner executes: `Estimate` and `Schedule`.
xgpt.core.schedule_file reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic_core import core_schema

from xgpt.core.constraint import Bound, Prospect
from xgpt.core.controls import Controls, Order, max_in_system
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.placement import PlacedFigures
from xgpt.core.policies import policies, policy
from xgpt.core.served import Served
from xgpt.core.units import Amount, Count, Flag, Gap, Positive, Unbounded

_Part = TypeVar("_Part")
NOT_SURE = "not sure enough to keep the bound"  # reason against a faster alternative
MARGINAL = 0.02  # chosen: differences of a gap below this share are not shown
OPEN = 0.05  # chosen: a policy counts as searched if its upper bound is so near to its best


class ByPolicy:
    """Pydantic schema of controls: the class that the row of their policy names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.tagged_union_schema(
            {row.name: handler.generate_schema(row.load("controls")) for row in policies()},
            "policy")


class Status(StrEnum):
    """How the search for a schedule ended; the value is shown, and stored in files."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within gap"  # no schedule is better by more than the gap
    LIMIT = "stopped at its limit"
    JOB = "quickest for this job"  # others are quicker in steady state, but the job is short
    BEGINNING = "quickest at the caps"  # breaks its limit until output lengths are observed
    GIVEN = "given"  # the job fixes every control variable
    BEST_SEEN = "best seen"  # among the batches of another engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Expected figures in steady state. Throughputs count all replicas together (in requests or
    tokens per second), all else is of one replica.

    `latency_s` is for the kind and quantile of the latency limit. `ttft_s` and `tpot_s` are of the
    request with the quantile's output length: seconds from the start of its prefill to its first
    token, and mean seconds of each later one (0 if there is none); None in older files.
    `encode_batch` and `decode_batch` are means: requests encoded together, and requests active at
    the first decode iteration of a phase. `decode_iterations` lie between two prefills (static
    batches: in the life of a batch). `memory_bytes` is by rank; `fits`: whether it suffices."""

    throughput_qps: Amount
    output_tokens_per_s: Amount
    latency_s: Unbounded
    encode_s: Unbounded
    decode_iteration_s: Unbounded
    period_s: Unbounded
    encode_batch: Count
    decode_batch: Amount
    decode_iterations: Count
    memory_bytes: tuple[Count, ...]
    memory_capacity_bytes: Count
    fits: Flag
    ttft_s: Unbounded | None = None
    tpot_s: Unbounded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A configuration: control variables, deployment, and expected figures.

    `others`: replicas of other shapes on the ranks behind these, each with controls of its own,
    which share the requests. Their throughputs are included in `figures`. They have no others."""

    controls: Annotated[Controls, ByPolicy()]
    deployment: Deployment
    figures: Figures
    notes: tuple[str, ...] = ()
    others: tuple[Estimate, ...] = ()

    @property
    def shares_prefixes(self) -> bool:
        """Whether the policy of every shape encodes shared prefixes once; no placed cache does."""
        return all(policy(shape.policy).shares_prefixes and not any(
            pool.placement for pool in shape.deployment.pools) for shape in (self, *self.others))

    @property
    def shapes(self) -> tuple[Estimate, ...]:
        """One Estimate for the replicas of each shape, in the order of their ranks."""
        return (self.beside(()), *self.others)

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """The pools of every replica of all shapes, in the order of their ranks."""
        pools, first_rank = list[Pool](), 0
        for shape in (self, *self.others):
            for copy in range(shape.deployment.replicas):
                pools += shape.deployment.pools_of(copy, first_rank=first_rank)
            first_rank += shape.deployment.num_devices
        return tuple(pools)

    @property
    def longest_query(self) -> int:
        """Longest request (input and output tokens) that the KV cache of every shape can hold."""
        return min(shape.deployment.group_kv_tokens for shape in (self, *self.others))

    @property
    def longest_input(self) -> int:
        """Longest input, in tokens, that every shape can encode; 0: any."""
        room = [tokens for shape in (self, *self.others)
                if (tokens := shape.deployment.encoding.kv_tokens)]
        return min(room, default=0)

    @property
    def num_devices(self) -> int:
        """Devices of the replicas of all shapes."""
        return sum(shape.deployment.num_devices for shape in (self, *self.others))

    def beside(self, others: tuple[Estimate, ...]) -> Estimate:
        """This Estimate with `others` replaced, and its throughputs adjusted."""
        def total(name: str) -> float:
            more = sum(getattr(other.figures, name) for other in others)
            less = sum(getattr(other.figures, name) for other in self.others)
            return float(getattr(self.figures, name) + more - less)

        if others == self.others:
            return self
        return replace(self, others=others, figures=replace(
            self.figures, throughput_qps=total("throughput_qps"),
            output_tokens_per_s=total("output_tokens_per_s")))

    @property
    def policy(self) -> str:
        return self.controls.policy

    @property
    def variables(self) -> Mapping[str, Any]:
        """Values of its control variables and tensor plan, by name."""
        own = {field.name: getattr(self.controls, field.name)
               for field in fields(self.controls)}  # type: ignore[arg-type]
        return {**own, "tp_degree": self.deployment.tp_degree, "tp_gpus": self.deployment.tp_gpus}

    @property
    def most_in_system(self) -> float:
        """Most requests of a replica between the start of prefill and the last token, as
        planned."""
        figures = self.figures
        return max(figures.decode_batch + figures.encode_batch, max_in_system(self.controls))

    @property
    def one_copy(self) -> Estimate:
        """This configuration with one replica."""
        return self.in_copies(1)

    def in_copies(self, count: int) -> Estimate:
        """This configuration with `count` replicas and no others; throughputs scale with them."""
        own = self.beside(())
        figures, more = own.figures, count / self.deployment.replicas
        if more == 1:
            return own
        return replace(own, deployment=replace(self.deployment, replicas=count), figures=replace(
            figures, throughput_qps=figures.throughput_qps * more,
            output_tokens_per_s=figures.output_tokens_per_s * more))

    def changed(self, **changes: Any) -> Estimate:
        """This Estimate with parts, or fields of its parts, replaced by name; `kv_tokens` is that
        of the decoding pool. Raises TypeError for a name that no part has."""
        if "decode_micro_batches" in changes:
            changes["num_groups"] = changes["decode_micro_batches"]
        left = dict(changes)
        left.pop("decode_micro_batches", None)
        own = _replaced(self, changes, left)
        controls = _replaced(own.controls, changes, left)
        if (even := getattr(controls, "even", None)) is not None:
            controls = replace(controls, even=_replaced(even, changes, left))  # type: ignore[type-var]
        figures = _replaced(own.figures, changes, left)
        deployment = _replaced(own.deployment, changes, left)
        decoding = deployment.decoding
        pools = tuple(_replaced(pool, changes, left) if pool is decoding else pool
                      for pool in deployment.pools)
        if left:
            raise TypeError(f"no part of an estimate has {', '.join(sorted(left))}")
        return replace(own, controls=controls, figures=figures,
                       deployment=replace(deployment, pools=pools))


# the set that an alternative is the best of; "unsearched": policies that were not compared
AlternativeKind = Literal["policy", "unsearched", "RRA and WAA alone", "tp_degree",
                          "without a latency bound", "without a margin",
                          "highest in steady state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An alternative that was not chosen. `subject`: policy, policies ("unsearched") or tp_degree
    that it is the best of, else "". `words`: its configuration; "" if none. `is_unsure`: it is
    faster, but misses the limit with its own safety margin."""

    kind: AlternativeKind
    subject: str = ""
    words: str = ""
    throughput_qps: Amount | None = None  # of all replicas; None: no schedule
    latency_s: Unbounded | None = None
    reason: str
    is_unsure: bool = False

    @property
    def name(self) -> str:
        """The set that it is the best of; policies by their titles."""
        if self.kind in ("policy", "unsearched"):
            return ", ".join(policy(name).title for name in self.subject.split(", "))
        return f"{self.kind} {self.subject}".strip()

    @property
    def label(self) -> str:
        """The alternative in words."""
        return f"{self.name}: {self.words}" if self.words else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTried:
    """A number of devices that was tried for a job that asks for few or cheap ones. `expected_s`:
    seconds of the job, or of a million requests; `with_margin_s`: with the constraint's confidence;
    None if there is no schedule. `price`: in the tariff's currency, 0 if unknown. `reason`: why the
    size misses a limit, "" if it keeps all. `is_impossible`: it is proved that no schedule keeps
    the limits."""

    devices: Positive
    expected_s: Amount | None = None
    with_margin_s: Amount | None = None
    price: Amount = 0.0
    reason: str = ""
    is_impossible: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesTried:
    """A number of replicas that was examined, each on `devices_per_replica` devices.

    `throughput_qps` and `words`: the best schedule found (None, and the reason, if there is none).
    `bound_qps`: upper bound on all of its schedules (of a service: on this one); one that cannot
    win is not searched further. `devices`: of each replica, the largest first, if they are unequal
    (the bound is then that of all unequal divisions); else empty."""

    replicas: Positive
    devices_per_replica: Count
    throughput_qps: Amount | None
    latency_s: Unbounded | None
    bound_qps: Unbounded
    words: str
    devices: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of the search's proof. Throughputs are in requests/s of all replicas.

    `bound_qps`: upper bound for every admissible configuration. `gap`: (bound - schedule) /
    schedule. `nodes`: configurations evaluated. `unbounded_qps`: best throughput without a latency
    limit. `pruned`: number of boxes pruned, by reason. `policy_bounds`: upper bound by policy, the
    highest first. `hardware_qps`: the devices' roofline limit (xsimulator.roofline_limit).
    `covers`: replica sizes that the bound covers, in words, if they may differ. `bare_qps`: best
    throughput found without a safety margin, if the schedule's costs any."""

    status: str
    bound_qps: Unbounded
    gap: Gap
    nodes: Count
    seconds: Amount
    unbounded_qps: Unbounded | None = None
    pruned: tuple[tuple[str, Count], ...] = ()
    policy_bounds: tuple[tuple[str, Amount], ...] = ()
    hardware_qps: Amount | None = None
    covers: str = ""
    bare_qps: Amount | None = None

    @property
    def bare_gap(self) -> float | None:
        """Optimality gap among schedules without a safety margin; None if it is hardly smaller than
        `gap`."""
        gap = self.bound_qps / self.bare_qps - 1 if self.bare_qps else self.gap
        return max(gap, 0.0) if gap < self.gap * (1 - MARGINAL) else None

    def left_open(self, name: str, throughput_qps: float) -> float | None:
        """Upper bound of policy `name` if it is more than OPEN above `throughput_qps`, the best
        found of it; else None. A policy that cannot win is not searched to its best."""
        most = dict(self.policy_bounds).get(name, 0.0)
        return most if most > throughput_qps * (1 + OPEN) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Safety margin: the schedule is planned for the latency limit divided by `factor`. `cost`:
    share by which a schedule without it is faster."""

    factor: Unbounded = 1.0
    cost: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered:
    """The cost of an order that keeps requests together that share prefixes. `first_s`,
    `input_first_s`: expected seconds until the first hundredth of the results is written, in this
    order and in the input's. `input_saved`: share of the input tokens that the input's order would
    not encode."""

    first_s: Amount
    input_first_s: Amount
    input_saved: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The chosen configuration with its proof. `fingerprint`: that of its Problem; the runner
    refuses another one. `over_copies`: every number of replicas examined, the most first; empty if
    only one was. `prospects`: expected values of metrics other than latency that have limits.
    `sizes`: numbers of devices tried, the fewest first.

    `order`: in which order requests are run, within windows of `window` requests (0: the whole
    job). `order_gain`: share of the makespan that it saves, where the planner chose it.
    `reordered`: where the order keeps shared prefixes together; else None. `placed`: of a schedule
    whose pools have a placement. `served`: of one for requests that arrive over time."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    estimate: Estimate
    bounds: tuple[Bound, ...]
    proof: Proof
    fingerprint: str
    margin: Margin = Margin()
    rejected: tuple[Rejected, ...] = ()
    explanation: tuple[str, ...] = ()
    over_copies: tuple[CopiesTried, ...] = ()
    prospects: tuple[Prospect, ...] = ()
    sizes: tuple[SizeTried, ...] = ()
    order: Order = "input"
    window: Count = 0
    order_gain: Amount = 0.0
    reordered: Reordered | None = None
    placed: PlacedFigures | None = None
    served: Served | None = None

    @property
    def controls(self) -> Controls:
        return self.estimate.controls

    @property
    def deployment(self) -> Deployment:
        return self.estimate.deployment

    @property
    def figures(self) -> Figures:
        return self.estimate.figures

    @property
    def bound(self) -> Bound:
        """The bound on latency."""
        return next(bound for bound in self.bounds if bound.metric == "latency")

    def changed(self, **changes: Any) -> Schedule:
        """This Schedule with fields of its own, its proof, its latency limit or its estimate
        replaced by name. Raises TypeError for a name that no part has."""
        left = dict(changes)
        own = _replaced(self, changes, left)
        of_latency, proof = own.bound, _replaced(own.proof, changes, left)
        bounds = tuple(_replaced(bound, changes, left) if bound is of_latency else bound
                       for bound in own.bounds)
        estimate = own.estimate.changed(**left) if left else own.estimate
        return replace(own, bounds=bounds, proof=proof, estimate=estimate)


def _replaced(part: _Part, changes: dict[str, Any], left: dict[str, Any]) -> _Part:
    """`part` with its fields among `changes` replaced, whose names are removed from `left`."""
    own = {field.name: changes[field.name] for field in fields(part)  # type: ignore[arg-type]
           if field.name in changes}
    for name in own:
        left.pop(name, None)
    return replace(part, **own) if own else part  # type: ignore[type-var]


def devices_of_copies(estimate: Estimate) -> tuple[int, ...]:
    """Number of devices of each replica of all shapes, in the order of their ranks."""
    return tuple(shape.deployment.devices_per_replica for shape in (estimate, *estimate.others)
                 for _ in range(shape.deployment.replicas))


def devices_sum(devices: Sequence[int]) -> str:
    """Devices of replicas as a sum, the largest first: "4 + 3", "5 + 3 x 1"."""
    counts = {each: devices.count(each) for each in sorted(set(devices), reverse=True)}
    return " + ".join(f"{count} x {each}" if count > 1 else str(each)
                      for each, count in counts.items())
