"""A policy's best configuration under a latency bound: its grid, then every neighbour of the best
points until none is better. What gains are measured against must not be a strawman.

Works for every policy whose configurations are dataclasses: the number of queries first, then other
whole numbers, and the tensor plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from xgpt.cluster import Cluster
from xgpt.lengths import FloatArray
from xgpt.model import ModelSpec
from xgpt.problem import Problem
from xgpt.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.allocation import refuse_plan
from xsimulator.policies.rra import EstimateArrays

MOST_QUERIES = 1 << 16  # considered at a time where the job does not say how many there are
STARTS = 12  # lines of the grid whose best points are refined
REACH = 0.12  # of a value: neighbours on either side, a little more than a grid's step
DENSE = 24  # neighbours on either side that are tried one by one; beyond, distances double
MAX_ROUNDS = 40
_PLAN_FIELDS = ("tp_degree", "tp_gpus")
_DEGREES = (1, 2, 4, 8, 16)


class Policy(Protocol):
    """A closed form and its space."""

    @property
    def problem(self) -> Problem: ...

    @property
    def timing(self) -> TimingSource: ...

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """Configurations that cover the space for these (tp_degree, tp_gpus)."""
        ...

    def evaluate(self, configs: Sequence[Any]) -> EstimateArrays: ...

    def estimate(self, config: Any) -> Estimate: ...


def best(policy: Policy, latency_bound_s: float, *,
         plans: Sequence[tuple[int, int]] | None = None) -> Estimate | None:
    """The configuration of highest throughput among those that fit memory and meet the bound (of
    the problem's kind and quantile); None where no point of the grid does. `plans`: (tp_degree,
    tp_gpus) to consider, by default all that the model and the cluster allow."""
    problem = policy.problem
    if plans is None:
        plans = tensor_plans(problem.model, problem.cluster, policy.timing)
    most = problem.num_queries or MOST_QUERIES
    grid = list(policy.grid(most, plans))
    if not grid:
        return None
    climb = _Climb(policy, latency_bound_s, most)
    scores = climb.scores(grid)
    tops = [climb.top(grid[row]) for row in _starts(grid, scores)]
    found = max(tops, key=climb.score, default=None)
    return None if found is None else policy.estimate(found)


def tensor_plans(model: ModelSpec, cluster: Cluster,
                 timing: TimingSource) -> list[tuple[int, int]]:
    """Every (tp_degree, tp_gpus) that the model and the cluster can hold and `timing` answers
    for."""
    found = []
    for degree in _DEGREES:
        counts = [0] if degree == 1 else range(degree, cluster.num_devices + 1, degree)
        for gpus in counts:
            degrees = {degree} | ({1} if gpus < cluster.num_devices else set())
            if (refuse_plan(model, cluster, degree, gpus) is None
                    and all(map(timing.can_time, degrees))):
                found.append((degree, gpus))
    return found


class _Climb:
    """From a configuration to the best of its neighbours, and on; keeps every score."""

    def __init__(self, policy: Policy, bound_s: float, most_queries: int) -> None:
        self._policy, self._bound_s, self._most = policy, bound_s, most_queries
        self._known: dict[Any, float] = {}

    def score(self, config: Any) -> float:
        """Throughput of an admissible configuration, else 0."""
        return self._known[config]

    def scores(self, configs: Sequence[Any]) -> FloatArray:
        new = [config for config in dict.fromkeys(configs) if config not in self._known]
        if new:
            figures = self._policy.evaluate(new)
            is_admissible = (figures.fits & (figures.latency_s <= self._bound_s)
                             & (figures.present <= self._most + 1e-9))
            found = np.where(is_admissible, figures.throughput_qps, 0.0)
            self._known.update(zip(new, found.tolist(), strict=True))
        return np.array([self._known[config] for config in configs])

    def top(self, config: Any) -> Any:
        """Where no neighbour is better."""
        for _ in range(MAX_ROUNDS):
            around = _neighbours(config)
            best_row = int(self.scores(around).argmax())
            if self.score(around[best_row]) <= self.score(config):
                break
            config = around[best_row]
        return config


def _starts(grid: Sequence[Any], scores: FloatArray) -> list[int]:
    """The best admissible point of each line of the grid, of the STARTS best lines. A line has all
    variables in common but the first, the number of queries."""
    names = [field.name for field in fields(grid[0])]
    of_line: dict[tuple[Any, ...], int] = {}
    for row in np.argsort(-scores, kind="stable").tolist():
        if scores[row] <= 0 or len(of_line) == STARTS:
            break
        of_line.setdefault(tuple(getattr(grid[row], name) for name in names[1:]), row)
    return list(of_line.values())


def _neighbours(config: Any) -> list[Any]:
    """All combinations of nearby values of its variables, itself among them; 0 and None are
    defaults, left alone."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _PLAN_FIELDS}
    names = [name for name, value in values.items() if type(value) is int and value > 0]
    nearby = [[values[name] + step for step in _steps(values[name])] for name in names]
    return [replace(config, **dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*nearby)]


def _steps(value: int) -> list[int]:
    """Steps from `value` to its neighbours, itself among them, none below 1."""
    reach = max(int(value * REACH), 1)
    sizes = list(range(1, min(reach, DENSE) + 1))
    while 2 * sizes[-1] <= reach:
        sizes.append(2 * sizes[-1])
    return [0, *sizes, *(-size for size in sizes if size < value)]
