"""The best schedule of a problem over policies, and what is proved about it (paper section 5).

Each policy's space is searched by branch and bound (xscheduler.spaces.rra, xscheduler.spaces.waa),
one after the other. Bounds hold for step times as they are, monotone or not, within the tolerances
that xsimulator.policies.{rra,waa}_bounds state; the reported gap is what is left between the best
schedule found and the highest bound of any box that was given up.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from xgpt.core.errors import InputError, Mistake
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.schedule_file import schedule_from_flat
from xprofiler.timing import TimingSource
from xscheduler.branch_and_bound import Candidate, Status
from xscheduler.infeasible import explain
from xscheduler.spaces.policy_search import (
    Found,
    PolicySearch,
    RraPolicySearch,
    WaaPolicySearch,
    best_of_roots,
)
from xscheduler.spaces.tensor_plans import tensor_plans, timed_plans

POLICIES = ("rra", "waa-c", "waa-m")  # that are searched
GAP = 0.005
SHORT_OUTPUTS = 150  # tokens in the mean
FREE_GAP = 0.02  # of the search without a latency bound, which is only compared with


def find_schedule(problem: Problem, timing: TimingSource, *, gap: float = GAP,
                  max_nodes: int | None = None, max_seconds: float | None = None
                  ) -> Schedule:
    """The schedule of highest steady-state throughput within the problem's constraint.

    gap: stop once no admissible schedule can be better by more than this share. max_nodes,
    max_seconds: limits of each policy's search; the result's status says when one was hit.
    Raises InfeasibleError naming the tightest latency that can be met, InputError for fixed values
    that the model or cluster cannot hold.
    """
    return Scheduler(problem, timing, gap=gap, max_nodes=max_nodes, max_seconds=max_seconds).find()


class _Best(NamedTuple):
    """A policy's best admissible point."""

    policy: PolicySearch
    found: Found
    candidate: Candidate

    @property
    def plan(self) -> int:
        return self.found.plan_of_root[self.candidate.root]


class Scheduler:
    """Searches one problem, under one latency bound after the other if wanted: what was evaluated
    for one serves the next."""

    def __init__(self, problem: Problem, timing: TimingSource, *, gap: float = GAP,
                 max_nodes: int | None = None, max_seconds: float | None = None) -> None:
        """See find_schedule."""
        self.problem = problem
        self._gap, self._max_nodes, self._max_seconds = gap, max_nodes, max_seconds
        plans = timed_plans(tensor_plans(problem.model, problem.cluster, problem.fixed),
                            problem.cluster, timing)
        self._policies: list[PolicySearch] = []
        for name in _policies_of(problem):
            own: PolicySearch = (
                RraPolicySearch(problem, timing, plans) if name == "rra" else
                WaaPolicySearch(name, problem, timing, plans))
            if own.plans:
                self._policies.append(own)
        if not self._policies:
            raise InputError([Mistake(
                file="schedule", line=None, key="schedule.policy", value=problem.fixed.policy,
                allowed=f"rra: cluster {problem.cluster.name} ({problem.cluster.num_devices} x "
                        f"{problem.cluster.device.name}) cannot be divided into an encode and a "
                        "decode pool for this model and tensor plan")])
        self._free: dict[str, Found] = {}

    def find(self, latency_bound_s: float | None = None, *, compares: bool = True) -> Schedule:
        """The best schedule within a bound, by default the problem's. `compares`: also with the
        best without a bound. Raises InfeasibleError."""
        began = time.monotonic()
        bound_s = (self.problem.constraint.latency_s if latency_bound_s is None
                   else latency_bound_s)
        results = self._search_all(bound_s)
        bests = [self._best(policy, results[policy.name]) for policy in self._policies]
        admissible = [best for best in bests if best is not None]
        if not admissible:
            is_proved = all(found.outcome.status is Status.INFEASIBLE
                            for found in results.values())
            raise explain(self._policies, bound_s, is_proved=is_proved)
        # of equals the policy that comes first
        best = max(admissible, key=lambda one: one.candidate.objective)
        upper = max(found.outcome.upper_bound for found in results.values())
        estimate = best.policy.estimate(best.plan, best.candidate.point)
        nodes = sum(policy.num_evaluated for policy in self._policies)
        seconds = time.monotonic() - began
        free = self._unbounded(bound_s, results) if compares else None
        constraint = self.problem.constraint
        return schedule_from_flat(
            estimate=estimate, latency_bound_s=bound_s, constraint_kind=constraint.kind,
            quantile=constraint.quantile, status=_status(results, upper, best), bound_qps=upper,
            gap=upper / estimate.figures.throughput_qps - 1,
            nodes=nodes, seconds=seconds, fingerprint=self.problem.fingerprint,
            unbounded_qps=None if free is None else free.candidate.objective,
            rejected=self._rejected(best, results, free, bound_s),
            pruned=_pruned(results))

    def _search_all(self, bound_s: float) -> dict[str, Found]:
        """Each policy in turn. One that is shown not to win is not searched to its own best: its
        runner-up is the best seen, and its upper bound says how much better it may be."""
        results: dict[str, Found] = {}
        # what is likely to win comes first, for it spares the others' searches: WAA where outputs
        # are short (paper section 4.1). A wrong guess costs time alone.
        is_short = self.problem.lengths.outputs.mean <= SHORT_OUTPUTS
        for policy in reversed(self._policies) if is_short else self._policies:
            floor = max((found.outcome.best.objective for found in results.values()
                         if found.outcome.best is not None), default=0.0)
            results[policy.name] = self._search(policy, bound_s, self._gap, floor)
        return results

    def _search(self, policy: PolicySearch, bound_s: float, gap: float,
                floor_qps: float = 0.0) -> Found:
        return policy.search(bound_s, gap=gap, max_nodes=self._max_nodes,
                             max_seconds=self._max_seconds, floor_qps=floor_qps)

    def _best(self, policy: PolicySearch, found: Found) -> _Best | None:
        best = found.outcome.best
        return None if best is None else _Best(policy, found, best)

    def _unbounded(self, bound_s: float, results: dict[str, Found]) -> _Best | None:
        """The best without a latency bound, of any policy."""
        if math.isinf(bound_s):
            self._free.update(results)
        found: list[_Best | None] = []
        for policy in self._policies:
            if policy.name not in self._free:
                floor = max((one.candidate.objective for one in found if one), default=0.0)
                self._free[policy.name] = self._search(policy, math.inf, FREE_GAP, floor)
            found += [self._best(policy, self._free[policy.name]),
                      self._best(policy, results[policy.name])]
        return max((best for best in found if best is not None),
                   key=lambda one: one.candidate.objective, default=None)

    def _rejected(self, best: _Best, results: dict[str, Found], free: _Best | None,
                  bound_s: float) -> tuple[Rejected, ...]:
        """The best of each other policy, of each other tensor-parallel degree of this one, and what
        the latency bound excluded."""
        rows = []
        for policy in self._policies:
            if policy is not best.policy:
                found = results[policy.name]
                rows.append(self._row(f"policy {policy.name}", policy, found,
                                      range(len(policy.plans)), best))
        own = best.policy
        chosen = own.plans[best.plan].tp_degree
        for degree in sorted({plan.tp_degree for plan in own.plans} - {chosen}):
            plans = [k for k, plan in enumerate(own.plans) if plan.tp_degree == degree]
            rows.append(self._row(f"tp_degree {degree}", own, best.found, plans, best))
        if free is not None and free.candidate.objective > best.candidate.objective:
            point = free.candidate.point
            qps, latency_s = free.policy.figures(free.plan, point)
            rows.append(Rejected(
                label=f"without a latency bound: {free.policy.name}, "
                      f"{free.policy.words(free.plan, point)}",
                throughput_qps=qps, latency_s=latency_s, reason=f"latency above {bound_s:g} s"))
        return tuple(rows)

    def _row(self, label: str, policy: PolicySearch, found: Found, plans: range | list[int],
             best: _Best) -> Rejected:
        candidate, upper = best_of_roots(found, plans)
        if candidate is None:
            is_proved = upper == -math.inf
            return Rejected(label=label, throughput_qps=None, latency_s=None,
                            reason="no admissible schedule" if is_proved else
                            f"not looked into: no more than {upper:.4g} queries/s")
        plan = found.plan_of_root[candidate.root]
        qps, latency_s = policy.figures(plan, candidate.point)
        lost = 1 - qps / best.candidate.objective
        reason = (f"lower throughput by {lost:.1%}: no more than {max(upper, qps):.4g} queries/s"
                  if lost > 0 else "no better")
        return Rejected(label=f"{label}: {policy.words(plan, candidate.point)}", reason=reason,
                        throughput_qps=qps, latency_s=latency_s)


def _policies_of(problem: Problem) -> tuple[str, ...]:
    fixed = problem.fixed
    if fixed.policy is None:
        # a variable of RRA's alone is a wish for it
        return POLICIES if fixed.decode_iterations is None else ("rra",)
    if fixed.policy not in POLICIES:
        raise InputError([Mistake(
            file="schedule", line=None, key="schedule.policy", value=fixed.policy,
            allowed=f"{', '.join(POLICIES)} (or left out): baselines are not searched; "
                    "`xgpt simulate` finds their best")])
    return (fixed.policy,)


def _status(results: dict[str, Found], upper: float, best: _Best) -> str:
    if any(found.outcome.status is Status.LIMIT for found in results.values()):
        return Status.LIMIT.value
    is_closed = upper <= best.candidate.objective * (1 + 1e-9)
    status = Status.OPTIMAL if is_closed else Status.WITHIN_GAP
    return str(status.value)


def _pruned(results: dict[str, Found]) -> tuple[tuple[str, int], ...]:
    """Boxes given up, by policy and reason."""
    return tuple((f"{name}: {reason}", count) for name, found in results.items()
                 for reason, count in found.outcome.closed)

