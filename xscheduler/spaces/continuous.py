"""The space of a continuously batching policy: max_active x token_budget under every tensor plan,
and its lines examined for branch and bound.

A root is a line: a tensor plan with a range of token budgets, over every max_active. Least work
bounds it (xsimulator.policies.continuous.bounds): on a line the bound is that of its best point, so
that nothing would be gained by splitting it. The closed form rests on walks, which cost as much for
one configuration as for many, so points of many lines are evaluated together: around the place
where the bound has its best, where the latency meets its bound, then neighbours of the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple, cast

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, crowding_or_pace
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.continuous_points import Key, Point, around, far, is_admissible, near
from xscheduler.spaces.least_latency import quickest
from xscheduler.spaces.space import AllInBoxes, Selection, Tight
from xscheduler.spaces.tensor_plans import TensorPlan, spread_sizes
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.bounds import ContinuousBounds, Lines
from xsimulator.policies.continuous.closed_form import Continuous
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.continuous.plan_limits import PlanLimits

MOST_ACTIVE, MOST_BUDGET = 1 << 16, 1 << 20
FIRST_LINES = 8  # in which points are looked at before any other, so that there are some
LINES_TOGETHER = 32  # whose points are evaluated at once
MOST_LINES = 128  # in which points are looked at; the others keep their bounds
ROUNDS = 3  # of looking where the latency meets its bound
WORTH = 0.93  # of the best found: what a line needs to be looked at once more
CLIMBERS, CLIMBS = 4, 10  # points whose neighbours are looked at, and how often those of the best
PLAN_WORTH = 0.8  # of the best found: the same, of the best under another tensor plan
KEPT_LIMITS = 8  # latency bounds of which what is proved of all lines is kept
STEEP_GAP = 0.015  # from it on the closest neighbours, which bring less, are not looked at
SELECTED_PLANS = 6  # for a job of few queries
DESCENTS = 16  # tensor plans that are looked into where nothing at all keeps the bounds


class _Line(NamedTuple):
    """Token budgets from `least` to `most` of one tensor plan; points have `budget`."""

    plan: int
    budget: int
    least: int
    most: int


class ContinuousSpace(AllInBoxes):
    """See xscheduler.spaces.space.Space."""

    variables = ("max_active", "token_budget")

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        self.name, self.problem, self.plans = name, problem, tuple(plans)
        self.form = cast(Continuous, make_policy(name, problem, timing))
        self.bounds = ContinuousBounds(self.form)
        self._points: dict[tuple[int, ...], Point] = {}  # evaluated so far
        self._limits = Limits.of(problem.constraint, queries=problem.num_queries or math.inf)
        most = min(problem.num_queries or MOST_ACTIVE, MOST_ACTIVE)
        given = problem.fixed.max_active
        self.active = (1, most) if given is None else (given, given)
        # by latency bound: the floor, and what `limits` says above it
        self._known_limits: dict[float, tuple[float, FloatArray, FloatArray]] = {}
        budgets = self.budgets = _budgets_of(self.form)
        self.num_budgets = len(budgets)  # lines of each plan, one after the other
        self.lines = [_Line(plan, *own) for plan in range(len(plans)) for own in budgets]
        self._plan_of = np.repeat(np.arange(len(plans)), len(budgets))
        self.stages = [len(self.form.plans.both(*plan).stages) for plan in plans]
        self._of_plan = cache(partial(_limits_of_plan, self))

    @property
    def num_evaluated(self) -> int:
        return len(self._points)

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> ContinuousExaminer:
        return ContinuousExaminer(self, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def config(self, plan: int, point: tuple[int, ...]) -> ContinuousConfig:
        return ContinuousConfig(max_active=point[0], token_budget=point[1],
                                tp_degree=self.plans[plan].tp_degree,
                                tp_gpus=self.plans[plan].tp_gpus)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.form.estimate(self.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        own = self.evaluate([(plan, *point)])[0]
        return own.throughput_qps, own.latency_s

    def evaluate(self, keys: Sequence[tuple[int, ...]]) -> list[Point]:
        """The figures of each (plan, max_active, token_budget)."""
        new = [key for key in dict.fromkeys(keys) if key not in self._points]
        if new:
            figures = self.form.evaluate([self.config(key[0], key[1:]) for key in new])
            limits = crowding_or_pace(figures, self._limits)
            self._points.update(zip(new, map(
                Point, figures.throughput_qps.tolist(), figures.latency_s.tolist(),
                map(Limit, limits.tolist())), strict=True))
        return [self._points[key] for key in keys]

    def limits(self, latency_bound_s: float,
               floor_qps: float = 0.0) -> tuple[FloatArray, FloatArray]:
        """[lines] throughput that no point within the bound exceeds, and the max_active at which
        that would be. Of a line that is no better than `floor_qps` under any bound no more is
        said."""
        if math.isinf(latency_bound_s):
            return self._free_limits
        known = self._known_limits.get(latency_bound_s)
        if known is None or known[0] > floor_qps:
            qps, active = (own.copy() for own in self._free_limits)
            rows = np.flatnonzero(qps > floor_qps)
            qps[rows], active[rows] = self._limits_of(rows, latency_bound_s)
            known = self._known_limits[latency_bound_s] = floor_qps, qps, active
            if len(self._known_limits) > KEPT_LIMITS:
                del self._known_limits[next(iter(self._known_limits))]
        return known[1:]

    @cached_property
    def roots(self) -> list[Box]:
        """A box of each line."""
        first, last = self.active
        return [Box(root=root, lower=(first, line.least), upper=(last, line.most))
                for root, line in enumerate(self.lines)]

    @cached_property
    def _free_limits(self) -> tuple[FloatArray, FloatArray]:
        return self._limits_of(np.arange(len(self.lines)), math.inf)

    def _limits_of(self, rows: IntArray, latency_bound_s: float) -> tuple[FloatArray, FloatArray]:
        qps, active = (np.zeros(len(rows)) for _ in range(2))
        of_plan = self._plan_of[rows]
        for plan in np.unique(of_plan).tolist():
            places = np.flatnonzero(of_plan == plan)
            qps[places], active[places] = self._of_plan(plan).limit(
                rows[places] - plan * self.num_budgets, latency_bound_s)
        return qps, active

    def beyond(self, tight: Tight) -> str:
        return ""

    def present(self, tight: Tight) -> float:
        return float(self.form.evaluate([self.config(tight.plan, tight.point)]).present[0])

    def easiest(self) -> list[Tight]:
        budgets = sorted({budget for budget, _, _ in self.budgets})
        budgets = budgets[len(budgets) // 2::max(len(budgets) // 4, 1)]
        keys = [(plan, min(max(active, self.active[0]), self.active[1]), budget)
                for plan, stages in enumerate(self.stages) for budget in budgets
                for active in (1, stages)]
        keys = list(dict.fromkeys([*keys, *quickest(self, dict(enumerate(self.stages)), 0.0)]))
        return [Tight(point.latency_s, point.limit, point.throughput_qps, key[0], key[1:])
                for key, point in zip(keys, self.evaluate(keys), strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """Numbers of queries a quarter apart and a few budgets, under the tensor plans that promise
        most."""
        limit, _ = self.limits(self.problem.constraint.latency_s)
        best = np.zeros(len(self.plans))
        np.maximum.at(best, [line.plan for line in self.lines], limit)
        plans = np.argsort(-best, kind="stable")[:SELECTED_PLANS].tolist()
        sizes = spread_sizes(num_queries, self.problem.fixed.max_active, set())
        budgets = [budget for budget, _, _ in self.budgets][::2]
        return Selection(closed_form=self.form, configs=[
            self.config(plan, (size, budget)) for plan in plans for budget in budgets
            for size in sizes])


class ContinuousExaminer:
    """Examines lines under one latency bound."""

    def __init__(self, space: ContinuousSpace, latency_bound_s: float, *, gap: float,
                 floor_qps: float) -> None:
        """`floor_qps`: throughput found elsewhere; what is no better is not looked into."""
        self._space, self._bound_s, self._gap = space, latency_bound_s, gap
        self._best_qps, self.known = floor_qps, None
        self.roots = space.roots
        self.plan_of_root = [line.plan for line in space.lines]
        self._limit, self._active = np.empty(0), np.empty(0)  # [lines] once asked for
        self._num_looked_at = 0
        self._own_qps, self._climbed_qps = 0.0, 0.0  # of this policy; the same when last climbed
        # of each line: figures by max_active and token_budget
        self._seen: list[dict[tuple[int, int], Point]] = [{} for _ in space.lines]
        # by line: (-throughput, point) of its best admissible point; of equals the smaller
        self._bests: dict[int, tuple[float, tuple[int, int]]] = {}

    def raise_floor(self, floor_qps: float) -> None:
        self._best_qps = max(self._best_qps, floor_qps)

    def split(self, box: Box) -> list[Box]:
        """A line is looked into whole, once it is its turn."""
        return [box]

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        """Bounds of all lines and a few points at first, then points of those given, the most
        promising first."""
        if not len(self._limit):
            self._limit, self._active = self._space.limits(
                self._bound_s, self._best_qps * (1 + self._gap))
            self._look((row, around(self._active[row], self._space.active)) for row in np.argsort(
                -self._limit, kind="stable")[:FIRST_LINES].tolist()
                if self._limit[row] > self._best_qps * (1 + self._gap))
            limits, active = self._limit.tolist(), self._active.tolist()
            return [self._bounded(box, limits[box.root], active[box.root]) for box in boxes]
        rows = sorted((box.root for box in boxes), key=lambda row: -self._limit[row])
        rows = rows[:max(MOST_LINES - self._num_looked_at, 0)]
        self._num_looked_at += len(rows)
        for begin in range(0, len(rows), LINES_TOGETHER):
            lines = [row for row in rows[begin:begin + LINES_TOGETHER]
                     if self._limit[row] > self._best_qps * (1 + self._gap)]
            self._look((row, around(self._active[row], self._space.active)) for row in lines)
            for _ in range(ROUNDS):
                lines = [row for row in lines if self._is_worth(row)]
                self._look((row, self._frontier(row)) for row in lines)
        if self._best_qps <= 0:  # nor elsewhere: the quickest tell whether anything is
            self._evaluate(_quickest(self._space, rows, self._bound_s))
        # also from what is below that of another policy: neighbours may be better by a third
        top = self._climb() if self._own_qps > self._climbed_qps else None
        self._climbed_qps = self._own_qps
        return [self._result(box, top if place == 0 else None)
                for place, box in enumerate(boxes)]

    def _bounded(self, box: Box, limit: float, active: float) -> NodeResult:
        if limit > 0:
            return NodeResult(upper_bound=limit, box=box, is_settled=False, reason="",
                              best=self._candidate(box.root))
        reason = Limit.MEMORY if active <= 0 else Limit.LATENCY
        return NodeResult(box=box, reason=reason.words)

    def _is_worth(self, row: int) -> bool:
        """A better point may still be near those of this line that were looked at."""
        best, limit = self._best(row), self._limit[row]
        own = limit if best is None else self._seen[row][best].throughput_qps
        return limit > self._best_qps * (1 + self._gap) and own >= WORTH * self._own_qps

    def _frontier(self, row: int) -> list[int]:
        """Values of max_active around the best of a line, and where the latency, linear between
        those seen, meets its bound."""
        seen, best = self._seen[row], self._best(row)
        tried = sorted(active for active, _ in seen)
        if best is None:
            return [max(round(tried[0] * share), self._space.active[0])
                    for share in (0.15, 0.3, 0.6)]
        at = tried.index(best[0])
        below, above = tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)]
        slow = seen[above, best[1]].latency_s
        found = [math.isqrt(below * best[0]), math.isqrt(best[0] * above)]
        if above > best[0] and self._bound_s < slow < math.inf:
            quick = seen[best].latency_s
            share = (self._bound_s - quick) / (slow - quick) if slow > quick else 0.0
            middle = math.floor(best[0] + share * (above - best[0]))
            found = [max(middle - 1, best[0]), middle, min(middle + 1, above)]
        elif above == best[0]:  # nothing forbids more
            found.append(min(math.ceil(1.5 * above), self._space.active[1]))
        return found

    def _look(self, asked: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Evaluates points of lines, by their max_active."""
        lines = self._space.lines
        self._evaluate([(row, active, lines[row].budget) for row, values in asked
                        for active in values])

    def _evaluate(self, asked: Sequence[tuple[int, int, int]]) -> None:
        """Evaluates points (line, max_active, token_budget), those that are new together."""
        new = [each for each in dict.fromkeys(asked) if each[1:] not in self._seen[each[0]]]
        lines = self._space.lines
        points = self._space.evaluate([(lines[row].plan, *point) for row, *point in new])
        for (row, active, budget), figures in zip(new, points, strict=True):
            self._seen[row][active, budget] = figures
            if is_admissible(figures, self._bound_s):
                self._own_qps = max(self._own_qps, figures.throughput_qps)
                own = -figures.throughput_qps, (active, budget)
                self._bests[row] = min(self._bests.get(row, own), own)
        self._best_qps = max(self._best_qps, self._own_qps)

    def _best(self, row: int) -> tuple[int, int] | None:
        """The best admissible point of a line."""
        best = self._bests.get(row)
        return None if best is None else best[1]

    def _climb(self) -> Candidate | None:
        """The best of the neighbours of the best points, and so on until none is better."""
        tops = sorted((negative, row, best) for row, (negative, best) in self._bests.items())
        seen_plans: set[int] = set()
        beside: list[tuple[int, int, int]] = []
        for place, (negative, row, best) in enumerate(tops):
            plan = self._space.lines[row].plan
            worth = PLAN_WORTH if plan not in seen_plans else WORTH if place < CLIMBERS else 2.0
            seen_plans.add(plan)
            if -negative >= worth * self._own_qps:
                beside += self._beside(row, *far(best))
        self._evaluate(beside)  # together: a walk costs as much for one as for many
        for _ in range(CLIMBS if self._gap < STEEP_GAP else 0):
            own_qps = self._own_qps
            top = self._top()
            if top is not None:
                self._evaluate(self._beside(top.root, *near(top.point)))
            if self._own_qps == own_qps:
                break
        return self._top()

    def _top(self) -> Candidate | None:
        """The best point seen; of equals that of the first line."""
        row = min(self._bests, key=lambda row: (self._bests[row][0], row), default=None)
        return None if row is None else self._candidate(row)

    def _beside(self, row: int, active: Sequence[int],
                budgets: Sequence[int]) -> list[tuple[int, int, int]]:
        """(line, max_active, token_budget) of all these values that the plan of a line has."""
        (first, last), lines = self._space.active, self._space.lines
        begin = lines[row].plan * self._space.num_budgets
        own = [(k, lines[k]) for k in range(begin, begin + self._space.num_budgets)]
        return [(k, min(max(value, first), last), budget) for budget in sorted({*budgets})
                for k, line in own if line.least <= budget <= line.most
                for value in sorted({*active})]

    def _candidate(self, row: int) -> Candidate | None:
        point = self._best(row)
        return None if point is None else Candidate(
            objective=self._seen[row][point].throughput_qps, root=row, point=point)

    def _result(self, box: Box, top: Candidate | None) -> NodeResult:
        """`top`: a candidate, of whichever line, that is not to be forgotten."""
        best, limit = top or self._candidate(box.root), float(self._limit[box.root])
        return NodeResult(upper_bound=limit, best=best, box=box,
                          reason="bounded by the least work of a query")


def _quickest(space: ContinuousSpace, rows: Sequence[int], bound_s: float) -> list[Key]:
    """(line, max_active, token_budget) of the quickest points of the plans of some lines."""
    plans = list(dict.fromkeys(space.lines[row].plan for row in rows))[:DESCENTS]
    return [(plan * space.num_budgets + place, active, budget) for plan, active, budget in quickest(
                space, {plan: space.stages[plan] for plan in plans}, bound_s)
            for place, (_, least, most) in enumerate(space.budgets) if least <= budget <= most]


def _budgets_of(form: Continuous) -> list[tuple[int, int, int]]:
    """(token budget, and the least and most of its range)."""
    nodes = form.filling.budgets
    if nodes == (0,):
        return [(0, 0, 0)]
    if (given := form.problem.fixed.token_budget) is not None:
        return [(given, given, given)]
    return [(node, 1 if place == 0 else node, up - 1) for place, (node, up) in enumerate(
        zip(nodes, (*nodes[1:], MOST_BUDGET), strict=True))]


def _limits_of_plan(space: ContinuousSpace, plan: int) -> PlanLimits:
    first = plan * space.num_budgets
    lines = space.lines[first:first + space.num_budgets]
    least, most = (np.array(own, float) for own in zip(*(
        (line.least, line.most) for line in lines), strict=True))
    return PlanLimits(space.bounds, space.form.plans.both(*space.plans[plan]), Lines(
        np.full(len(lines), float(space.active[1])), least, most))
