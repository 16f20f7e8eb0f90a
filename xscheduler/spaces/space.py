"""What a policy's space of configurations is to the search over policies (xscheduler.search).

A space keeps what it has evaluated, so that several latency bounds share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Status
from xscheduler.admissible import Limit
from xscheduler.branch_and_bound import Box, Candidate, Earlier, Maximisation, NodeResult, Outcome
from xscheduler.spaces.tensor_plans import TensorPlan
from xscheduler.watch import Watch

SMALL_BATCHES = (1, 2, 4)  # among which the tightest latencies are


class Examiner(Protocol):
    """One policy's boxes under one latency bound."""

    roots: list[Box]
    plan_of_root: list[int]  # index of the tensor plan that each root is of
    known: Candidate | None  # the best admissible point that was evaluated under another bound

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]: ...

    def split(self, box: Box) -> list[Box]: ...

    def raise_floor(self, floor_qps: float) -> None:
        """So much is had elsewhere: what is no better is not to be looked into."""


class Tight(NamedTuple):
    """An easy configuration: its latency, and what forbids it apart from that."""

    latency_s: float
    limit: Limit
    throughput_qps: float
    plan: int
    point: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Configurations of a policy that are looked at together, and who evaluates them. `copies`: of
    the model, of which they are those of one."""

    closed_form: Any
    configs: Sequence[Any]
    copies: int = 1


class Space(Protocol):
    """One policy's space of one problem, under any latency bound. A point has the values of the
    control variables `variables`, or of the first of them, under one of `plans`."""

    name: str
    variables: tuple[str, ...]
    problem: Problem
    plans: tuple[TensorPlan, ...]

    @property
    def num_evaluated(self) -> int: ...

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> Examiner:
        """keeps_gap: nothing is left open for what it would take. is_claimed: see Effort."""

    def unproved(self, latency_bound_s: float, gap: float,
                 floor_qps: float) -> tuple[float, int, tuple[int, ...]] | None:
        """(throughput, plan, point) of the best that is found of configurations which no root has
        and nothing is proved of, if that is more than the floor; None where there are none."""

    def most_unproved(self, latency_bound_s: float) -> float:
        """No configuration of those answers more queries/s within the bound; 0: there are none."""

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate: ...

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        """(throughput_qps, latency_s)."""

    def easiest(self) -> list[Tight]:
        """Configurations among which the tightest latencies are."""

    def present(self, tight: Tight) -> float:
        """Queries present at a time in a configuration."""

    def beyond(self, tight: Tight) -> str:
        """In words, sizes of a configuration that the timing source refuses; "" where it cannot
        say."""

    def selection(self, num_queries: int) -> Selection:
        """Configurations all over the space, for a job of so many queries."""


class AllInBoxes:
    """A space whose roots have all its configurations."""

    def unproved(self, latency_bound_s: float, gap: float, floor_qps: float) -> None:
        """See Space."""

    def most_unproved(self, latency_bound_s: float) -> float:
        """See Space."""
        return 0.0


class Searched(NamedTuple):
    """A search's outcome and the tensor plan that each of its roots belongs to."""

    outcome: Outcome
    plan_of_root: tuple[int, ...]

    def with_unproved(self, qps: float, plan: int, point: tuple[int, ...]) -> Searched:
        """The same with a point that no root has, as one of the first of its tensor plan."""
        own, outcome = self.plan_of_root.index(plan), self.outcome
        found = Candidate(objective=qps, root=own, point=point)
        per_root = list(outcome.per_root)
        first, bound = per_root[own]
        per_root[own] = min(filter(None, (first, found)), key=lambda one: one.rank), bound
        status = Status.OPTIMAL if outcome.status is Status.INFEASIBLE else outcome.status
        return self._replace(outcome=replace(
            outcome, status=status, upper_bound=max(outcome.upper_bound, qps),
            best=min(filter(None, (outcome.best, found)), key=lambda one: one.rank),
            per_root=tuple(per_root)))

    def best_of(self, plans: Sequence[int]) -> tuple[Candidate | None, float]:
        """(best candidate, upper bound) over the roots of some tensor plans."""
        own = [self.outcome.per_root[root] for root, plan in enumerate(self.plan_of_root)
               if plan in plans]
        candidates = [best for best, _ in own if best is not None]
        return (min(candidates, key=lambda one: one.rank, default=None),
                max((bound for _, bound in own), default=-np.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes: until no admissible point is better by more than the share `gap`, so
    many boxes were looked at, or the `watch` is over. `keeps_gap`: the gap is what somebody asked
    for, and does not widen however many boxes are looked at."""

    gap: float
    keeps_gap: bool = False
    is_claimed: bool = True
    max_nodes: int | None = None
    watch: Watch | None = None

    def with_gap(self, gap: float) -> Effort:
        """A gap as wide as this, where nobody asked for another."""
        return self if self.keeps_gap or gap <= self.gap else replace(self, gap=gap)


class SpaceSearch:
    """The search of one policy's space under one bound, to the gap of one effort, which can be gone
    on with."""

    def __init__(self, space: Space, latency_bound_s: float, effort: Effort,
                 wider: SpaceSearch | None = None) -> None:
        """wider: a search of this space under no tighter a bound, from whose boxes it begins."""
        self.latency_bound_s = latency_bound_s
        self._examiner = space.examiner(latency_bound_s, effort.gap, 0.0,
                                        keeps_gap=effort.keeps_gap,
                                        is_claimed=effort.is_claimed)
        self._copies = space.problem.copies
        self._search: Maximisation = Maximisation(
            self._examiner.roots, self._examiner.examine, gap=effort.gap,
            keeps_gap=effort.keeps_gap, split=self._examiner.split, known=self._examiner.known,
            earlier=None if wider is None else Earlier(
                wider._search, wider.latency_bound_s == latency_bound_s))

    def go_on(self, effort: Effort, floor_qps: float = 0.0) -> Searched:
        """The best point found until the effort is spent; what is no better than `floor_qps`, had
        elsewhere, is not looked into."""
        watch, copies = effort.watch, self._copies
        self._examiner.raise_floor(floor_qps)
        outcome = self._search.go_on(
            max_nodes=effort.max_nodes, floor=floor_qps,
            ends=None if watch is None else lambda nodes, best, upper: watch.ends(
                nodes, copies * best, copies * upper))
        return Searched(outcome, tuple(self._examiner.plan_of_root))


def search_space(space: Space, latency_bound_s: float, effort: Effort, floor_qps: float = 0.0,
                 wider: SpaceSearch | None = None) -> Searched:
    """The best point within the bound; what is no better than `floor_qps`, had by another policy,
    is not looked into. wider: see SpaceSearch."""
    return SpaceSearch(space, latency_bound_s, effort, wider).go_on(effort, floor_qps)


def words_of(space: Space, plan: int, point: tuple[int, ...]) -> str:
    """A point as it is shown."""
    values = zip(space.variables, point, strict=False)
    names = ", ".join(f"{name} {value}" for name, value in values if value)  # 0: it has none
    own = space.plans[plan]
    return f"{names}, tp_degree {own.tp_degree}, tp_gpus {own.tp_gpus}"
