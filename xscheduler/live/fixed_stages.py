"""The best control variables on fixed stages, without moving a layer.

The planner's search (xscheduler.search) runs over one cell: the stages are those of a schedule, and
the points are those that fit into its caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from xgpt.core.constraint import METRIC_WORDS, Constraint, Metric
from xgpt.core.controls import ContinuousControls, RraControls, WaaControls, max_in_system
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.errors import InputError, Mistake
from xgpt.core.lengths import BoolArray, IntArray
from xgpt.core.policies import Role, policy, replanned_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.feasibility import Feasibility
from xscheduler.margin import Margins
from xscheduler.replays import Replays
from xscheduler.replicas import max_replicas, problem_of_replica
from xscheduler.search import SURE, Search
from xscheduler.space import CHUNK, Cell, Point
from xsimulator.allocation import pool_layers
from xsimulator.plans import PoolPairs, StagePlan, StagePlans
from xsimulator.rough.figures import Formula, RoughFigures, point_of
from xsimulator.rough.formulas import Formulas

FEW = 32  # chosen: points of a cell that are all replayed, whatever the formula says of them
_PACED: tuple[Metric, ...] = ("latency", "ttft", "tpot")
_LIMITED = ("max_active", "token_budget")  # may only shrink within given caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to continue. estimate: its configuration and figures, if they are known. reason: why
    it is not admissible; None if it is."""

    estimate: Estimate | None
    reason: str | None

    @property
    def qps(self) -> float:
        """Throughput, requests/s, of an admissible option, else 0."""
        return self.estimate.figures.throughput_qps if self.estimate and not self.reason else 0.0


class FixedPlans:
    """Stage plans with the layers on the stages of a schedule (xsimulator.plans.PlanSource)."""

    def __init__(self, problem: Problem, timing: TimingSource, pools: tuple[Pool, ...]) -> None:
        self.problem, self._plans = problem, StagePlans(problem, timing)
        self._ranks = [tuple(stage.ranks for stage in pool.stages) for pool in pools]
        self._devices = pools[0].num_devices
        self._pools = {ranks: self._plans.of_stages(pool.stages, pool.role)
                       for ranks, pool in zip(self._ranks, pools, strict=True)}

    def both(self, tp_degree: int, tp_gpus: int) -> StagePlan:
        """The stage plan of the only pool, which encodes and decodes."""
        (plan,) = self._pools.values()
        return plan

    def pool(self, ranks: Sequence[tuple[int, ...]], role: Role,
             first_index: int = 0) -> StagePlan:
        """The stage plan of the pool on these ranks."""
        return self._pools.get(tuple(ranks)) or self._plans.pool(ranks, role, first_index)

    def of_stages(self, stages: tuple[StageAssignment, ...], role: Role) -> StagePlan:
        """The stage plan of a pool of these stages."""
        return self._plans.of_stages(stages, role)

    def pairs(self, tp_degree: int, tp_gpus: int) -> PoolPairs:
        """The schedule's own division into two pools; none if it has one pool."""
        encode, *rest = self._ranks
        return PoolPairs(self, (tp_degree, tp_gpus),
                         {self._devices: (encode, rest[0])} if rest else {})


class CacheLimitedFormula:
    """A policy's rough formula (see Formula) at the points that a run can change to. Methods
    without a docstring are those of Formula.

    RRA's batches may grow within the memory of their caches. Other policies' sizes may only shrink.
    A run cannot change between chunks and whole batches, which use their slots differently."""

    def __init__(self, own: Formula, now: Estimate, initial: Estimate | None,
                 most: Mapping[str, int]) -> None:
        """now: the running schedule. initial: the schedule that the caches were made for; None for
        RRA, or if nothing runs yet. most: upper limits of control variables."""
        self.policy, self.problem = own.policy, own.problem
        self._own, self._now, self._initial = own, now, initial
        self.current_point = point_of(now)
        names = policy(own.policy).variable_names
        self._column = {name: names.index(name) for name in names}
        self._most = {name: limit for name, limit in most.items() if name in names}

    def can_allocate(self, plan: tuple[int, int]) -> bool:
        return True

    def points(self, plan: tuple[int, int]) -> IntArray:
        own = self._own.points(plan)
        capped = own.copy()
        for name, most in self._most.items():
            capped[:, self._column[name]] = np.minimum(capped[:, self._column[name]], most)
        if all(self.problem.fixed.value_of(name) in (None, self.current_point[column])
               for name, column in self._column.items()):
            capped = np.concatenate([capped, [self.current_point]])
        every = np.unique(capped, axis=0)
        return every[self._are_free(every)]

    def _are_free(self, points: IntArray) -> BoolArray:
        free = np.ones(len(points), bool)
        for name, most in self._most.items():
            free &= points[:, self._column[name]] <= most
        if CHUNK in self._column:
            column = self._column[CHUNK]
            chunk, now = points[:, column], self.current_point[column]
            is_rra = isinstance(self._now.controls, RraControls)
            free &= (chunk > 0) == (now > 0) if is_rra else chunk == now
        if isinstance(self._now.controls, ContinuousControls):
            free &= points[:, 0] >= self._now.deployment.num_groups
        return free

    def rough(self, plan: tuple[int, int], points: IntArray) -> RoughFigures:
        """The rough figures; points that the run cannot change to need infinite memory."""
        if not len(points):
            return RoughFigures(**{name: np.empty(0) for name in RoughFigures.__slots__})
        found = self._own.rough(plan, points)
        return replace(found, memory_bytes=np.where(self._are_free(points), found.memory_bytes,
                                                    np.inf))

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        return self._own.of_estimate(estimate)

    def estimate(self, plan: tuple[int, int], point: Point) -> Estimate:
        found = self._own.estimate(plan, point)
        if point == self.current_point:
            now = self._now.one_copy
            return replace(found, controls=now.controls, deployment=now.deployment,
                           figures=replace(found.figures, memory_bytes=now.figures.memory_bytes))
        if self._initial is None:
            return found
        initial = self._initial.one_copy
        found = replace(found, deployment=initial.deployment, figures=replace(
            found.figures, memory_bytes=initial.figures.memory_bytes))
        if isinstance(initial.controls, WaaControls):
            found = found.changed(max_in_system=min(
                max_in_system(found.controls), max_in_system(initial.controls)))
        return found


class FixedStages:
    """Searches control variables on the stages of `now`, for one of its equal replicas."""

    def __init__(self, now: Estimate, problem: Problem, timing: TimingSource, *,
                 initial: Estimate | None = None, most: Mapping[str, int] | None = None) -> None:
        """initial, most: see CacheLimitedFormula."""
        self._now, self._timing = now, timing
        part = problem_of_replica(problem, now)
        fixed = part.fixed
        if isinstance(now.controls, RraControls) and fixed.decode_micro_batches is None:
            fixed = replace(fixed, decode_micro_batches=now.controls.decode_micro_batches)
        if isinstance(now.controls, WaaControls) and fixed.encode_chunk is None:
            fixed = replace(fixed, encode_chunk=now.controls.encode_chunk)
        self.problem = replace(part, fixed=replace(fixed, replicas=None))
        limits = dict(most or {})
        if initial is not None and isinstance(initial.controls, ContinuousControls):
            limits |= {name: value for name in _LIMITED
                       if (value := getattr(initial.controls, name)) is not None}
        elif initial is not None:
            most_batch = initial.figures.encode_batch
            limits["encode_batch"] = min(limits.get("encode_batch", most_batch), most_batch)
        formulas = Formulas(self.problem, timing, plans=FixedPlans(
            self.problem, timing, now.deployment.pools))
        plan = now.deployment.tp_degree, now.deployment.tp_gpus
        own = formulas.of(now.policy, getattr(now.controls, "admission", None))
        self._formula = CacheLimitedFormula(own, now, initial, limits)
        self._cell = Cell(self.problem, self._formula, plan)
        self._replays = Replays(self.problem, timing)
        self._evaluator = Evaluator(self.problem, timing)
        self._margins_of = cache(self._make_margins)

    def keeps(self, constraint: Constraint, *, has_margin: bool) -> Feasibility:
        """The Feasibility that checks points against a constraint."""
        return Feasibility(constraint, lambda part: self._margins_of(constraint),
                          has_margin=has_margin)

    def _make_margins(self, constraint: Constraint) -> Margins:
        return Margins(replace(self.problem, constraint=constraint), self._evaluator,
                      is_of_job=False)

    def unchanged(self, constraint: Constraint, *, has_margin: bool) -> Option:
        """The Option to continue with the present control variables."""
        if (reason := self._exclusion()) is not None:
            return Option(estimate=None, reason=reason)
        search, keeps = self._search(), self.keeps(constraint, has_margin=has_margin)
        point = self._formula.current_point
        found = search.replay(self._cell, point, times=SURE)
        if found.figures is None:
            return Option(estimate=None, reason="requests of these lengths do not fit into its "
                                                "caches, or the profile has no such sizes")
        reason = None
        if not keeps.is_kept(self._cell, point):
            reason = self._broken_limit(constraint, point) or (
                f"latency would be {format_seconds(found.latency_s)}, within the limit of "
                f"{format_seconds(constraint.latency_s)}, but not with the confidence asked for")
        return self._option(point, reason)

    def best(self, constraint: Constraint, *, has_margin: bool,
             most_replays: int | None = None) -> Option:
        """The admissible Option with the highest throughput. If there is none, the one of least
        latency, with the reason. most_replays: limit of replays, for a quick answer."""
        if (reason := self._exclusion()) is not None:
            return Option(estimate=None, reason=reason)
        search = self._search(most_replays)
        keeps = self.keeps(constraint, has_margin=has_margin)
        if most_replays is None and len(self._cell.points) <= FEW:
            for point in self._cell.points.tolist():
                search.replay(self._cell, tuple(point))
        found = search.best(keeps, is_compared=most_replays is not None)
        if found:
            return self._option(found[0].point, None)
        quickest = search.quickest()
        if not quickest:
            return Option(estimate=None, reason=(
                "not even the smallest batch has room in the memory, or times in the profile"))
        best = min(quickest, key=lambda one: one.replayed.latency_s)
        return self._option(best.point, self._refusal(best.point, constraint))

    def _refusal(self, point: Point, constraint: Constraint) -> str:
        """Why no point keeps the constraint, in words, by the point of least latency."""
        replayed = self._cell.replayed[point]
        if (broken_limit := self._broken_limit(constraint, point)) is None:
            broken_limit = (f"the limit of {constraint.latency_s:.4g} s is not kept with the "
                            "confidence asked for")
        elif replayed.latency_s > constraint.latency_s:
            broken_limit = f"the limit is {constraint.latency_s:.4g} s"
        return (f"the smallest latency on these stages is {replayed.latency_s:.4g} s, with "
                f"{variables_words(replayed.estimate)}; {broken_limit}")

    def _search(self, most_replays: int | None = None) -> Search:
        return Search(self.problem, [(self._cell, self._replays)], most_replays=most_replays)

    def _option(self, point: Point, reason: str | None) -> Option:
        estimate = self._cell.replayed[point].shown(self.problem)
        return Option(estimate=estimate.in_copies(self._now.deployment.replicas), reason=reason)

    def _exclusion(self) -> str | None:
        """Why the job rules out the deployed policy or tensor plan; None if it does not."""
        fixed, now = self.problem.fixed, self._now.variables
        for key in ("policy", "tp_degree", "tp_gpus"):
            wanted = getattr(fixed, key)
            if wanted is not None and wanted != now[key]:
                return f"the job fixes {key} {wanted}, deployed is {now[key]}"
        return None

    def _broken_limit(self, constraint: Constraint, point: Point) -> str | None:
        """The limit that a replay exceeds without a margin, in words; None if it exceeds none."""
        figures = self._cell.replayed[point].figures
        for metric in _PACED:
            limit_s, seen_s = constraint.limit_s(metric), getattr(figures, f"{metric}_s")
            if seen_s > limit_s:
                return (f"{METRIC_WORDS[metric]} would be {format_seconds(seen_s)}, over the limit "
                        f"of {format_seconds(limit_s)}")
        return None


def check_deployable(deployed: Estimate, problem: Problem) -> None:
    """Raises InputError if the schedule cannot be deployed for this problem."""
    mistakes = []

    def refuse(key: str, value: object, allowed: str) -> None:
        mistakes.append(Mistake(file="schedule", line=None, key=key, value=value, allowed=allowed))

    if deployed.policy not in replanned_policies():
        refuse("policy", deployed.policy,
               f"one of {', '.join(replanned_policies())}: others have no schedule to change")
    if deployed.others:
        refuse("others", len(deployed.others),
               "none: only a schedule with equal replicas can be revised")
        raise InputError(mistakes)
    deployment, cluster = deployed.deployment, problem.cluster
    ranks = sorted(rank for stage in deployment.stages for rank in stage.ranks)
    fitting = max_replicas(cluster, deployment.devices_per_replica)
    if ranks != list(range(len(ranks))) or not (
            deployment.replicas in (fitting, problem.fixed.replicas) and fitting):
        refuse("stages", f"{deployment.num_devices} ranks", f"{cluster.num_devices}, the devices "
                                                            f"of cluster {cluster.name}")
    for pool in deployed.deployment.pools:
        wanted = pool_layers(problem.model, pool.role)
        held = (sum(stage.num_layers for stage in pool.stages),
                sum(stage.num_encoder_layers for stage in pool.stages))
        if held != wanted:
            refuse("stages", f"{held[0]} + {held[1]} layers",
                   f"{wanted[0]} + {wanted[1]} layers of {problem.model.name}, in each pool")
    if mistakes:
        raise InputError(mistakes)


def variables_words(estimate: Estimate) -> str:
    """The control variables of an estimate in words."""
    figures, controls = estimate.figures, estimate.controls
    if isinstance(controls, ContinuousControls):
        budget = f", token_budget {controls.token_budget}" if controls.token_budget else ""
        return f"max_active {controls.max_active}{budget}"
    iterations = ""
    if isinstance(controls, RraControls):
        iterations = f"decode_iterations {controls.decode_iterations}, "
        if controls.encode_chunk:
            iterations += f"encode_chunk {controls.encode_chunk}, "
    return (f"encode_batch {figures.encode_batch}, {iterations}"
            f"decode_micro_batches {estimate.deployment.num_groups}")
