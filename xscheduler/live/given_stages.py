"""The best control variables on given stages, without moving a layer.

The planner's search (xscheduler.search) runs over one cell: the stages are those of a schedule, and
the points are those that its caches hold."""

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
from xscheduler.copies import most_copies, problem_for
from xscheduler.evaluator import Evaluator
from xscheduler.feasibility import Feasibility
from xscheduler.margin import Margins
from xscheduler.replays import Replays
from xscheduler.search import SURE, Search
from xscheduler.space import CHUNK, Cell, Point
from xsimulator.allocation import pool_layers
from xsimulator.plans import PoolPairs, StagePlan, StagePlans
from xsimulator.rough.figures import Formula, RoughFigures, point_of
from xsimulator.rough.formulas import Formulas

_PACED: tuple[Metric, ...] = ("latency", "ttft", "tpot")
_LIMITED = ("max_active", "token_budget")  # may only shrink within given caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to go on. reason: why it is not admissible; None if it is. estimate: its figures, if
    they are known."""

    estimate: Estimate | None
    reason: str | None

    @property
    def qps(self) -> float:
        """Throughput of an admissible way, else 0."""
        return self.estimate.figures.throughput_qps if self.estimate and not self.reason else 0.0


class GivenPlans:
    """Stage plans with the layers where a schedule has them (xsimulator.plans.PlanSource)."""

    def __init__(self, problem: Problem, timing: TimingSource, pools: tuple[Pool, ...]) -> None:
        self.problem, self._plans = problem, StagePlans(problem, timing)
        self._ranks = [tuple(stage.ranks for stage in pool.stages) for pool in pools]
        self._devices = pools[0].num_devices
        self._pools = {ranks: self._plans.of_stages(pool.stages, pool.role)
                       for ranks, pool in zip(self._ranks, pools, strict=True)}

    def both(self, tp_degree: int, tp_gpus: int) -> StagePlan:
        """The pool that encodes and decodes."""
        (plan,) = self._pools.values()
        return plan

    def pool(self, ranks: Sequence[tuple[int, ...]], role: Role,
             first_index: int = 0) -> StagePlan:
        """The pool on these ranks."""
        return self._pools.get(tuple(ranks)) or self._plans.pool(ranks, role, first_index)

    def of_stages(self, stages: tuple[StageAssignment, ...], role: Role) -> StagePlan:
        """See PlanSource."""
        return self._plans.of_stages(stages, role)

    def pairs(self, tp_degree: int, tp_gpus: int) -> PoolPairs:
        """The given division into two pools."""
        encode, *rest = self._ranks
        return PoolPairs(self, (tp_degree, tp_gpus),
                         {self._devices: (encode, rest[0])} if rest else {})


class WithinCaches:
    """A policy's rough formula (see Formula) at the points that a run can change to.

    RRA's batches may grow within the memory of their caches. Other policies' sizes may only shrink.
    A run cannot change between chunks and whole batches, which use their slots differently."""

    def __init__(self, own: Formula, now: Estimate, began: Estimate | None,
                 most: Mapping[str, int]) -> None:
        """now: the running schedule. began: the schedule that the caches were made for; None for
        RRA, or if nothing runs yet. most: upper limits of control variables."""
        self.policy, self.problem = own.policy, own.problem
        self._own, self._now, self._began = own, now, began
        self.as_it_is = point_of(now)
        names = policy(own.policy).variable_names
        self._column = {name: names.index(name) for name in names}
        self._most = {name: limit for name, limit in most.items() if name in names}

    def can_allocate(self, plan: tuple[int, int]) -> bool:
        """See Formula."""
        return True

    def points(self, plan: tuple[int, int]) -> IntArray:
        """See Formula."""
        own = self._own.points(plan)
        capped = own.copy()
        for name, most in self._most.items():
            capped[:, self._column[name]] = np.minimum(capped[:, self._column[name]], most)
        if all(self.problem.fixed.value_of(name) in (None, self.as_it_is[column])
               for name, column in self._column.items()):
            capped = np.concatenate([capped, [self.as_it_is]])
        every = np.unique(capped, axis=0)
        return every[self._are_free(every)]

    def _are_free(self, points: IntArray) -> BoolArray:
        free = np.ones(len(points), bool)
        for name, most in self._most.items():
            free &= points[:, self._column[name]] <= most
        if CHUNK in self._column:
            column = self._column[CHUNK]
            chunk, now = points[:, column], self.as_it_is[column]
            is_rra = isinstance(self._now.controls, RraControls)
            free &= (chunk > 0) == (now > 0) if is_rra else chunk == now
        if isinstance(self._now.controls, ContinuousControls):
            free &= points[:, 0] >= self._now.deployment.num_groups
        return free

    def rough(self, plan: tuple[int, int], points: IntArray) -> RoughFigures:
        """See Formula. Points that the run cannot change to need infinite memory."""
        if not len(points):
            return RoughFigures(**{name: np.empty(0) for name in RoughFigures.__slots__})
        found = self._own.rough(plan, points)
        return replace(found, memory_bytes=np.where(self._are_free(points), found.memory_bytes,
                                                    np.inf))

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        """See Formula."""
        return self._own.of_estimate(estimate)

    def estimate(self, plan: tuple[int, int], point: Point) -> Estimate:
        """See Formula."""
        found = self._own.estimate(plan, point)
        if point == self.as_it_is:
            now = self._now.one_copy
            return replace(found, controls=now.controls, deployment=now.deployment,
                           figures=replace(found.figures, memory_bytes=now.figures.memory_bytes))
        if self._began is None:
            return found
        began = self._began.one_copy
        found = replace(found, deployment=began.deployment, figures=replace(
            found.figures, memory_bytes=began.figures.memory_bytes))
        if isinstance(began.controls, WaaControls):
            found = found.changed(max_in_system=min(
                max_in_system(found.controls), max_in_system(began.controls)))
        return found


class GivenStages:
    """Searches one problem on the stages of `now`, for one of its equal copies."""

    def __init__(self, now: Estimate, problem: Problem, timing: TimingSource, *,
                 began: Estimate | None = None, most: Mapping[str, int] | None = None) -> None:
        """began, most: see WithinCaches."""
        self._now, self._timing = now, timing
        part = problem_for(problem, now)
        fixed = part.fixed
        if isinstance(now.controls, RraControls) and fixed.decode_micro_batches is None:
            fixed = replace(fixed, decode_micro_batches=now.controls.decode_micro_batches)
        if isinstance(now.controls, WaaControls) and fixed.encode_chunk is None:
            fixed = replace(fixed, encode_chunk=now.controls.encode_chunk)
        self.problem = replace(part, fixed=replace(fixed, replicas=None))
        limits = dict(most or {})
        if began is not None and isinstance(began.controls, ContinuousControls):
            limits |= {name: value for name in _LIMITED
                       if (value := getattr(began.controls, name)) is not None}
        elif began is not None:
            most_batch = began.figures.encode_batch
            limits["encode_batch"] = min(limits.get("encode_batch", most_batch), most_batch)
        formulas = Formulas(self.problem, timing, plans=GivenPlans(
            self.problem, timing, now.deployment.pools))
        plan = now.deployment.tp_degree, now.deployment.tp_gpus
        self._formula = WithinCaches(formulas.of(now.policy), now, began, limits)
        self._cell = Cell(self.problem, self._formula, plan)
        self._replays = Replays(self.problem, timing)
        self._evaluator = Evaluator(self.problem, timing)
        self._margins_of = cache(self._made_margins)

    def keeps(self, constraint: Constraint, *, has_margin: bool) -> Feasibility:
        """The check of points against a constraint."""
        return Feasibility(constraint, lambda part: self._margins_of(constraint),
                          has_margin=has_margin)

    def _made_margins(self, constraint: Constraint) -> Margins:
        return Margins(replace(self.problem, constraint=constraint), self._evaluator,
                      is_of_job=False)

    def as_it_is(self, constraint: Constraint, *, has_margin: bool) -> Way:
        """Going on with the present control variables."""
        if (reason := self._excluded()) is not None:
            return Way(estimate=None, reason=reason)
        search, keeps = self._search(), self.keeps(constraint, has_margin=has_margin)
        point = self._formula.as_it_is
        found = search.replay(self._cell, point, times=SURE)
        if found.figures is None:
            return Way(estimate=None, reason="queries of these lengths do not fit into its caches, "
                                             "or the profile says nothing about such sizes")
        reason = None
        if not keeps.is_kept(self._cell, point):
            reason = self._broken(constraint, point) or (
                f"latency would be {format_seconds(found.latency_s)}, within the limit of "
                f"{format_seconds(constraint.latency_s)}, but not with the confidence asked for")
        return self._way(point, reason)

    def best(self, constraint: Constraint, *, has_margin: bool,
             most_replays: int | None = None) -> Way:
        """The admissible point with the highest throughput; else the quickest one, with the reason.
        most_replays: for a quick answer."""
        if (reason := self._excluded()) is not None:
            return Way(estimate=None, reason=reason)
        search = self._search(most_replays)
        keeps = self.keeps(constraint, has_margin=has_margin)
        found = search.best(keeps, is_compared=most_replays is not None)
        if found:
            return self._way(found[0].point, None)
        quickest = search.quickest()
        if not quickest:
            return Way(estimate=None, reason=(
                "not even the smallest batch has room in the memory, or times in the profile"))
        best = min(quickest, key=lambda one: one.replayed.latency_s)
        return self._way(best.point, self._out_of_reach(best.point, constraint))

    def _out_of_reach(self, point: Point, constraint: Constraint) -> str:
        """Why no point keeps the constraint, by the point with the least latency."""
        replayed = self._cell.replayed[point]
        if (broken := self._broken(constraint, point)) is None:
            broken = (f"with the confidence asked for the limit of {constraint.latency_s:.4g} s is "
                      "not kept")
        elif replayed.latency_s > constraint.latency_s:
            broken = f"the limit is {constraint.latency_s:.4g} s"
        return (f"the tightest latency on these stages is {replayed.latency_s:.4g} s, with "
                f"{variables_words(replayed.estimate)}; {broken}")

    def _search(self, most_replays: int | None = None) -> Search:
        return Search(self.problem, [(self._cell, self._replays)], most_replays=most_replays)

    def _way(self, point: Point, reason: str | None) -> Way:
        estimate = self._cell.replayed[point].shown(self.problem)
        return Way(estimate=estimate.in_copies(self._now.deployment.replicas), reason=reason)

    def _excluded(self) -> str | None:
        """Why the job rules out the deployed policy or tensor plan; None if it does not."""
        fixed, now = self.problem.fixed, self._now.variables
        for key in ("policy", "tp_degree", "tp_gpus"):
            wanted = getattr(fixed, key)
            if wanted is not None and wanted != now[key]:
                return f"the job fixes {key} {wanted}, deployed is {now[key]}"
        return None

    def _broken(self, constraint: Constraint, point: Point) -> str | None:
        """The limit that a replay misses without a margin, in words; None if it misses none."""
        figures = self._cell.replayed[point].figures
        for metric in _PACED:
            limit_s, seen_s = constraint.limit_s(metric), getattr(figures, f"{metric}_s")
            if seen_s > limit_s:
                return (f"{METRIC_WORDS[metric]} would be {format_seconds(seen_s)}, over the limit "
                        f"of {format_seconds(limit_s)}")
        return None


def fits_the_job(deployed: Estimate, problem: Problem) -> None:
    """Raises InputError if the schedule cannot be deployed for this problem."""
    mistakes = []

    def refuse(key: str, value: object, allowed: str) -> None:
        mistakes.append(Mistake(file="schedule", line=None, key=key, value=value, allowed=allowed))

    if deployed.policy not in replanned_policies():
        refuse("policy", deployed.policy,
               f"one of {', '.join(replanned_policies())}: others have no schedule to change")
    if deployed.others:
        refuse("others", len(deployed.others),
               "none: how to go on is worked out for copies that are alike")
        raise InputError(mistakes)
    deployment, cluster = deployed.deployment, problem.cluster
    ranks = sorted(rank for stage in deployment.stages for rank in stage.ranks)
    fitting = most_copies(cluster, deployment.devices_per_replica)
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
    """The control variables in words."""
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
