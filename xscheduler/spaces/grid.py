"""A policy's best configuration under a latency bound: its grid, then every neighbour of the best
points until none is better. What gains are measured against must not be a strawman.

Works for every policy whose configurations are dataclasses: the number of queries first, then other
whole numbers, and the tensor plan."""

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limits, admissible
from xscheduler.spaces.tensor_plans import MOST_QUERIES, all_tensor_plans
from xsimulator.policies.figures import EstimateArrays

STARTS = 12  # lines of the grid whose best points are refined
WORTH = 0.8  # of the best point's score: what a line needs for its best to be refined
NEAR = 0.98  # of the best score: what a top needs to be refined in small steps
REACH = 0.12  # of a value: neighbours on either side, a little more than a grid's step
DENSE = 24  # of the number of queries, tried one by one; beyond, and of others, steps double
MAX_ROUNDS = 40
AT_FIRST = 64  # configurations of the grid that are scored before any is ruled out
GAIN = 0.1  # most that the best of the grid gains by its neighbours, as a share
_PLAN_FIELDS = ("tp_degree", "tp_gpus")


class GridPolicy(Protocol):
    """A closed form and its grid of configurations."""

    @property
    def problem(self) -> Problem: ...

    @property
    def timing(self) -> TimingSource: ...

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """Configurations that cover the space for these (tp_degree, tp_gpus)."""

    def evaluate(self, configs: Sequence[Any]) -> EstimateArrays: ...

    def estimate(self, config: Any) -> Estimate: ...


@runtime_checkable
class QuicklyBounded(Protocol):
    """A closed form that says quickly what configurations cannot reach."""

    def limits(self, configs: Sequence[Any]) -> tuple[FloatArray, FloatArray]:
        """(throughput_qps, latency_s) that `evaluate` does not better."""


def best(policy: GridPolicy, latency_bound_s: float, *,
         plans: Sequence[tuple[int, int]] | None = None) -> Estimate | None:
    """The configuration of highest throughput among those that fit memory and meet the bound (of
    the problem's kind and quantile); None where no point of the grid does. `plans`: (tp_degree,
    tp_gpus) to consider, by default all that the model and the cluster allow."""
    problem = policy.problem
    if plans is None:
        plans = all_tensor_plans(problem, policy.timing)
    most = problem.num_queries or MOST_QUERIES
    grid = list(policy.grid(most, plans))
    if not grid:
        return None
    climb = _Climb(policy, latency_bound_s, most)
    climb.survey(grid)
    tops = climb.tops([grid[row] for row in _starts(grid, climb.scores(grid))])
    config = max(tops, key=climb.score, default=None)
    return None if config is None else policy.estimate(config)


class _Climb:
    """Climbs from configurations to the best of their neighbours, and on; keeps every score."""

    def __init__(self, policy: GridPolicy, bound_s: float, most_queries: int) -> None:
        self._policy = policy
        self._limits = Limits.of(policy.problem.constraint, queries=most_queries,
                                 latency_s=bound_s)
        self._known: dict[Any, float] = {}
        self._limit: dict[Any, float] = {}

    def score(self, config: Any) -> float:
        """Throughput of an admissible configuration, else 0; 0 too for one ruled out by its
        limit."""
        return self._known.get(config, 0.0)

    def scores(self, configs: Sequence[Any]) -> FloatArray:
        return np.array([self.score(config) for config in configs])

    def survey(self, grid: Sequence[Any]) -> None:
        """Scores of all that the best of the grid, refined, may not beat."""
        limits = self.limits(grid)
        order = np.argsort(-limits, kind="stable")
        done, most = 0, 0.0
        while done < len(order) and limits[order[done]] > (1 - GAIN) * most:
            part = [grid[row] for row in order[done:done + max(AT_FIRST, done)].tolist()
                    if limits[row] > (1 - GAIN) * most]
            self._evaluate(part)
            done, most = done + max(AT_FIRST, done), max(most, *map(self.score, part))

    def tops(self, configs: Sequence[Any]) -> list[Any]:
        """The configurations, climbed to from these, that no neighbour betters: in strides first,
        then in small steps from those that come near the best."""
        tops = self._climb(configs, 1)
        most = max(map(self.score, tops), default=0.0)
        return self._climb([top for top in tops if self.score(top) >= NEAR * most], DENSE)

    def _climb(self, configs: Sequence[Any], dense: int) -> list[Any]:
        """Climbs from all together: policies are quicker at many configurations than at a few."""
        tops = list(dict.fromkeys(configs))
        climbing = list(range(len(tops)))
        for _ in range(MAX_ROUNDS):
            around = {row: _neighbours(tops[row], dense) for row in climbing}
            self._look_at([(self.score(tops[row]), around[row]) for row in climbing])
            moved = []
            for row in climbing:
                neighbour = max(around[row], key=self.score)
                if self.score(neighbour) > self.score(tops[row]) and neighbour not in tops:
                    moved.append(row)
                if self.score(neighbour) > self.score(tops[row]):
                    tops[row] = neighbour
            climbing = moved
            if not climbing:
                break
        return list(dict.fromkeys(tops))

    def limits(self, configs: Sequence[Any]) -> FloatArray:
        """What scores do not exceed; infinite where the policy does not say."""
        if not isinstance(self._policy, QuicklyBounded):
            return np.full(len(configs), np.inf)
        new = [config for config in dict.fromkeys(configs) if config not in self._limit]
        if new:
            most, least_s = self._policy.limits(new)
            allowed = np.where(least_s <= self._limits.latency_s, most, 0.0)
            self._limit.update(zip(new, allowed.tolist(), strict=True))
        return np.array([self._limit[config] for config in configs])

    def _look_at(self, groups: Sequence[tuple[float, Sequence[Any]]]) -> None:
        """Scores of each group's configurations that may have more than the score given with it,
        and more than the most promising of them."""
        self.limits([config for _, configs in groups for config in configs])
        ordered = [sorted(configs, key=self._limit_of, reverse=True) for _, configs in groups]
        for begin, end in ((0, AT_FIRST), (AT_FIRST, None)):
            least = [max(score, *map(self.score, configs[:begin])) if begin else score
                     for (score, _), configs in zip(groups, ordered, strict=True)]
            self._evaluate([config for most, configs in zip(least, ordered, strict=True)
                            for config in configs[begin:end] if self._limit_of(config) > most])

    def _limit_of(self, config: Any) -> float:
        return self._limit.get(config, np.inf)

    def _evaluate(self, configs: Sequence[Any]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in self._known]
        if not new:
            return
        figures = self._policy.evaluate(new)
        scores = np.where(admissible(figures, self._limits), figures.throughput_qps, 0.0)
        self._known.update(zip(new, scores.tolist(), strict=True))


def _starts(grid: Sequence[Any], scores: FloatArray) -> list[int]:
    """The best admissible point of each line of the grid, of the STARTS best lines. A line has all
    variables in common but the first, the number of queries."""
    names = [field.name for field in fields(grid[0])]
    of_line: dict[tuple[Any, ...], int] = {}
    for row in np.argsort(-scores, kind="stable").tolist():
        if scores[row] <= WORTH * scores.max() or len(of_line) == STARTS:
            break
        of_line.setdefault(tuple(getattr(grid[row], name) for name in names[1:]), row)
    return list(of_line.values())


def _neighbours(config: Any, dense: int) -> list[Any]:
    """All combinations of nearby values of its variables, itself among them; 0 and None are
    defaults, left alone. `dense`: see _steps, for the number of queries."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _PLAN_FIELDS}
    names = [name for name, value in values.items() if type(value) is int and value > 0]
    nearby = [[values[name] + step for step in _steps(values[name], dense if place == 0 else 1)]
              for place, name in enumerate(names)]
    return [replace(config, **dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*nearby)]


def _steps(value: int, dense: int) -> list[int]:
    """Steps from `value` to its neighbours, itself among them, none below 1: one by one up to
    `dense`, then each twice the one before."""
    reach = max(int(value * REACH), 1)
    sizes = list(range(1, min(reach, dense) + 1))
    while 2 * sizes[-1] <= reach:
        sizes.append(2 * sizes[-1])
    return [0, *sizes, *(-size for size in sizes if size < value)]
