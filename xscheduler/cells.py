"""The cells of a problem: every policy by every tensor plan, on every number of devices that a copy
of the model may have; and the replays of their points."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from xgpt.core.errors import InputError, XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.copies import has_room, most_copies, problem_on
from xscheduler.space import Cell, Replayed
from xscheduler.tensor_plans import tensor_plans
from xsimulator.replay.figures import steady_replay
from xsimulator.replay.job import planned_queries
from xsimulator.replay.predict import with_watched
from xsimulator.replay.step_clock import StepClocks
from xsimulator.rough.forms import Formulas
from xsimulator.rough.workload import Workload

SEED = 20240427
DRAWN = 4096  # chosen: queries that are drawn at once
FEW_NODES = 4  # chosen: of which every number is looked at


class Replays:
    """Replays of configurations of one part of the cluster, all with the same queries."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._clocks = StepClocks(problem, timing)
        self._rng = np.random.default_rng(SEED)
        self._drawn: tuple[IntArray, IntArray] = np.empty(0, np.int64), np.empty(0, np.int64)
        self.known: dict[Hashable, Replayed] = {}

    def of(self, estimate: Estimate, queries: int) -> Replayed:
        """The steady state in a replay of so many queries."""
        problem = self.problem
        while len(self._drawn[0]) < queries:  # the first are the same, however many are wanted
            more = problem.lengths.sample(DRAWN, self._rng)
            self._drawn = (np.concatenate([self._drawn[0], more[0]]),
                           np.concatenate([self._drawn[1], more[1]]))
        inputs, outputs = (own[:queries] for own in self._drawn)
        if problem.constraint.kind == "sequence":
            outputs = with_watched(outputs, problem.lengths.outputs.quantile(
                problem.constraint.quantile))
        try:
            figures = steady_replay(problem, self.timing, estimate, planned_queries(
                problem, inputs, outputs), self._clocks)
        except XgptError:  # a query that never fits
            figures = None
        return Replayed(estimate, figures, queries)


def cells_of(problem: Problem, timing: TimingSource) -> Iterator[tuple[Cell, Replays]]:
    """Every policy by every tensor plan, on every number of devices that a copy may have."""
    workload = Workload(problem)
    names = names_of(problem)
    for part in parts_of(problem):
        try:
            plans = tensor_plans(part, timing)
        except InputError:
            continue
        formulas, replays = Formulas(part, timing, workload), Replays(part, timing)
        for name in names:
            formula = formulas.of(name)
            for plan in plans:
                if formula.can_lay_out(plan):
                    yield Cell(part, formula, plan), replays


def names_of(problem: Problem) -> list[str]:
    """The policies that are searched."""
    return [row.name for row in able_policies(problem.fixed) if not (
        problem.model.is_encoder_decoder and row.is_decoder_only)]


def parts_of(problem: Problem, *, is_any: bool = False) -> list[Problem]:
    """The problem of one copy, on every number of devices of a node, and of whole nodes: of many
    nodes on the most that so many copies may have. is_any: those that hold no weights, too."""
    cluster, wanted = problem.cluster, problem.fixed.replicas
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    whole = range(1, nodes + 1) if nodes <= FEW_NODES else sorted(
        {nodes // copies for copies in range(1, nodes + 1)})
    sizes = [*range(1, each), *(each * count for count in whole)]
    found = []
    for devices in sizes:
        copies = most_copies(cluster, devices)
        if copies < 1 or devices + (wanted or 1) - 1 > cluster.num_devices:
            continue
        part = problem_on(problem, devices)
        if wanted is not None and copies != wanted:
            share = None if problem.num_queries is None else -(-problem.num_queries // wanted)
            part = replace(part, copies=min(copies, wanted), num_queries=share)
        if problem.num_queries is not None and part.copies > problem.num_queries:
            continue
        if is_any or has_room(part):
            found.append(part)
    return found
