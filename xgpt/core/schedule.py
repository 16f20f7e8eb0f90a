"""The artefacts the scheduler hands to the runner: `Estimate` and `Schedule`.

The runner executes one wherever it came from; xgpt.core.schedule_file reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic_core import core_schema

from xgpt.core.constraint import Bound, Prospect
from xgpt.core.controls import Controls, max_in_system
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.policies import policies, policy
from xgpt.core.units import Amount, Count, Flag, Gap, Positive, Unbounded

_Part = TypeVar("_Part")
NOT_SURE = "not sure enough to keep the bound"  # in the reason of a quicker alternative
MARGINAL = 0.02  # share of a gap that is not worth a word
OPEN = 0.05  # share that a policy may have above the best seen of it, and counts as searched


class ByPolicy:
    """Controls of the class that the row of their policy names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.tagged_union_schema(
            {row.name: handler.generate_schema(row.load("controls")) for row in policies()},
            "policy")


class Status(StrEnum):
    """How the search for a schedule ended; the value is what is shown, and what files hold."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within gap"  # of the optimum, which may be this or not
    LIMIT = "stopped at its limit"
    JOB = "quickest for this job"  # of few queries, though others are quicker in steady state
    BEGINNING = "quickest at the caps"  # does not keep its bound, until lengths are observed
    GIVEN = "given"  # every control variable is the job's own
    BEST_SEEN = "best seen"  # of the batches of another engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is expected in steady state. Throughputs are of all copies of the model together, all
    else is of one copy.

    `latency_s` is for the bound's kind and quantile. Of the query of the quantile's output length
    `ttft_s` is from the start of its encoding to its first token, `tpot_s` the mean of each later
    one (0 where there is none); None in files of before. `encode_batch` and `decode_batch` are
    means: the queries encoded together, and those active at the first decode iteration of a phase.
    `decode_iterations` lie between two encodings (static batches: in the life of a batch).
    `memory_bytes` is per rank, in rank order; `fits`: whether all that is needed has room."""

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
    """One configuration: what is executed, where, and what is expected of it.

    `others`: copies of another shape, on the ranks behind these, which share the queries with them
    by a schedule of their own; their throughputs are in those of `figures` as well. They have no
    others."""

    controls: Annotated[Controls, ByPolicy()]
    deployment: Deployment
    figures: Figures
    notes: tuple[str, ...] = ()
    others: tuple[Estimate, ...] = ()

    @property
    def shapes(self) -> tuple[Estimate, ...]:
        """The copies of each shape by themselves, in the order of their ranks."""
        return (self.beside(()), *self.others)

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """The pools of every copy of all shapes, in the order of their ranks."""
        pools, first_rank = list[Pool](), 0
        for shape in (self, *self.others):
            for copy in range(shape.deployment.replicas):
                pools += shape.deployment.pools_of(copy, first_rank=first_rank)
            first_rank += shape.deployment.num_devices
        return tuple(pools)

    @property
    def longest_query(self) -> int:
        """KV entries (tokens) of the longest query that a copy of any shape can take."""
        return min(shape.deployment.group_kv_tokens for shape in (self, *self.others))

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that a copy of any shape can encode; 0: any."""
        room = [tokens for shape in (self, *self.others)
                if (tokens := shape.deployment.encoding.kv_tokens)]
        return min(room, default=0)

    @property
    def num_devices(self) -> int:
        """Devices of the copies of all shapes."""
        return sum(shape.deployment.num_devices for shape in (self, *self.others))

    def beside(self, others: tuple[Estimate, ...]) -> Estimate:
        """The same copies beside these others, in place of those that they are beside."""
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
        """The values of its control variables and of its tensor plan, by name."""
        own = {field.name: getattr(self.controls, field.name)
               for field in fields(self.controls)}  # type: ignore[arg-type]
        return {**own, "tp_degree": self.deployment.tp_degree, "tp_gpus": self.deployment.tp_gpus}

    @property
    def most_in_system(self) -> float:
        """Queries of a copy between the start of encoding and the last token, at most, as
        planned."""
        figures = self.figures
        return max(figures.decode_batch + figures.encode_batch, max_in_system(self.controls))

    @property
    def one_copy(self) -> Estimate:
        """One of its copies by itself."""
        return self.in_copies(1)

    def in_copies(self, count: int) -> Estimate:
        """The same configuration in so many copies, which answer as many times the queries, and
        none of another shape."""
        own = self.beside(())
        figures, more = own.figures, count / self.deployment.replicas
        if more == 1:
            return own
        return replace(own, deployment=replace(self.deployment, replicas=count), figures=replace(
            figures, throughput_qps=figures.throughput_qps * more,
            output_tokens_per_s=figures.output_tokens_per_s * more))

    def changed(self, **changes: Any) -> Estimate:
        """The same with whole parts replaced, then fields in whichever parts have them; `kv_tokens`
        is the decoding pool's. Raises TypeError for a name that no part has."""
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


# what an alternative is the best of; "unsearched": policies that were not compared
AlternativeKind = Literal["policy", "unsearched", "RRA and WAA alone", "tp_degree",
                          "without a latency bound", "without a margin",
                          "highest in steady state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An alternative that was not chosen. subject: the policy, the policies ("unsearched") or the
    tp_degree that it is the best of, else "". words: its configuration, ""
    if there is none. is_unsure: it is faster, but misses the limit with its own margin."""

    kind: AlternativeKind
    subject: str = ""
    words: str = ""
    throughput_qps: Amount | None = None  # of all copies; None: no schedule
    latency_s: Unbounded | None = None
    reason: str
    is_unsure: bool = False

    @property
    def name(self) -> str:
        """What it is the best of: policies by their titles."""
        if self.kind in ("policy", "unsearched"):
            return ", ".join(policy(name).title for name in self.subject.split(", "))
        return f"{self.kind} {self.subject}".strip()

    @property
    def label(self) -> str:
        """The alternative in words."""
        return f"{self.name}: {self.words}" if self.words else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTried:
    """A number of devices that was tried for a job that asks for few or cheap ones. expected_s:
    seconds of the job, or of a million requests; with_margin_s: with the constraint's confidence;
    None if there is no schedule. price: in the tariff's currency, 0 if unknown. reason: why the
    size misses a limit, "" if it keeps all. is_impossible: that no schedule keeps the limits is
    proved."""

    devices: Positive
    expected_s: Amount | None = None
    with_margin_s: Amount | None = None
    price: Amount = 0.0
    reason: str = ""
    is_impossible: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesTried:
    """What so many copies of the model come to, on so many devices each: the best that was found,
    in `words` (None, and why, where there is none), and what no schedule of them exceeds. One that
    cannot win is not searched to its own best. `devices`: of each copy, the largest first, where
    they are unlike (the bound then is of all divisions into unlike ones); else empty."""

    replicas: Positive
    devices_per_replica: Count
    throughput_qps: Amount | None
    latency_s: Unbounded | None
    bound_qps: Unbounded
    words: str
    devices: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the search proved. `bound_qps` is an upper bound on the throughput of any admissible
    configuration, `gap` what it is above the schedule's, as a share; `nodes` the configurations
    evaluated; `unbounded_qps` the best throughput with no latency bound; `pruned` the boxes given
    up, by reason; `policy_bounds` what no configuration of each policy exceeds, the highest first;
    `hardware_qps` the devices' roofline limit (xsimulator.roofline_limit); `covers` of which copies
    the bound is, in words, where they may be of several sizes; `bare_qps` the best throughput that
    was seen with no margin of its own, where the schedule's costs any."""

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
        """By what share no schedule, none with a margin of its own, exceeds the best that was seen
        of those; None where the schedule itself has as much."""
        gap = self.bound_qps / self.bare_qps - 1 if self.bare_qps else self.gap
        return max(gap, 0.0) if gap < self.gap * (1 - MARGINAL) else None

    def left_open(self, name: str, throughput_qps: float) -> float | None:
        """What no configuration of a policy exceeds, where that is more than OPEN above the best
        that was seen of it: one that cannot win is not searched to its own best."""
        most = dict(self.policy_bounds).get(name, 0.0)
        return most if most > throughput_qps * (1 + OPEN) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What is kept back for what is uncertain: the schedule is planned for the bound divided by
    `factor`; one without it has more throughput by the share `cost`."""

    factor: Unbounded = 1.0
    cost: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The chosen configuration with what the search proved about it. `fingerprint`: of the Problem
    it answers; the runner refuses another one. `over_copies`: every number of copies of the model
    that was looked at, the most first; empty where there was one, of one size. `prospects`: of its
    bounds but that on latency. `sizes`: numbers of devices tried, the fewest first."""

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
        """The same with fields of its proof, its latency bound, its estimate or its own replaced.
        Raises TypeError for a name that no part has."""
        left = dict(changes)
        own = _replaced(self, changes, left)
        of_latency, proof = own.bound, _replaced(own.proof, changes, left)
        bounds = tuple(_replaced(bound, changes, left) if bound is of_latency else bound
                       for bound in own.bounds)
        estimate = own.estimate.changed(**left) if left else own.estimate
        return replace(own, bounds=bounds, proof=proof, estimate=estimate)


def _replaced(part: _Part, changes: dict[str, Any], left: dict[str, Any]) -> _Part:
    """`part` with those of its fields that are among the changes; they are taken out of `left`."""
    own = {field.name: changes[field.name] for field in fields(part)  # type: ignore[arg-type]
           if field.name in changes}
    for name in own:
        left.pop(name, None)
    return replace(part, **own) if own else part  # type: ignore[type-var]


def devices_of_copies(estimate: Estimate) -> tuple[int, ...]:
    """Devices of each copy of all shapes, in the order of their ranks."""
    return tuple(shape.deployment.devices_per_replica for shape in (estimate, *estimate.others)
                 for _ in range(shape.deployment.replicas))


def devices_tried(row: CopiesTried) -> tuple[int, ...]:
    """Devices of each copy of a line."""
    return row.devices or (row.devices_per_replica,) * row.replicas


def sum_of(devices: Sequence[int]) -> str:
    """Devices of copies as a sum, the largest first: "4 + 3", "5 + 3 x 1"."""
    counts = {each: devices.count(each) for each in sorted(set(devices), reverse=True)}
    return " + ".join(f"{count} x {each}" if count > 1 else str(each)
                      for each, count in counts.items())
