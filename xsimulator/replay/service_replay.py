"""Replay of requests that arrive over time, on all replicas of an Estimate."""

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.arrival_routing import ArrivalRouter, router_of
from xrunner.rules.routing import window_of
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import merge_results, replay_together, replayers_of, tokens_of
from xsimulator.replay.step_clock import StepClocks


class ServiceReplayer:
    """Replays arriving requests by one Estimate. The job's routing rule gives each to a replica.
    Shared cores are modelled only for a single replica without `concurrency`."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None) -> None:
        """clocks: tables of step times shared with other replays."""
        self.problem, self.estimate = problem, estimate
        self._replicas = replayers_of(problem, timing, estimate, clocks)

    def run(self, lengths: QueryLengths, arrival_s: ArrayLike, *, concurrency: int | None = None,
            has_steps: bool = True) -> ReplayResult:
        """The result of requests with known outputs that arrive at `arrival_s`, [requests]. With
        `concurrency` so many arrive then; each later one when an answer ends. has_steps: False for
        a result without pools, which is quicker. Raises XgptError for a request that never fits."""
        count = len(lengths.inputs)
        if len(self._replicas) == 1 and concurrency is None:
            alone = self._replicas[0]
            quick = None if has_steps else alone.native(lengths, arrival_s)
            result = alone.run(lengths, arrival_s=arrival_s) if quick is None else (
                quick.results()[0])
            return merge_results([result], [range(count)])
        if concurrency is not None:
            arrival_s = np.where(np.arange(count) < concurrency, arrival_s, np.inf)
        found = replay_together(self._replicas, lengths, self.router(lengths), arrival_s,
                                has_steps=has_steps)
        return merge_results(found.results, found.rows)

    def router(self, lengths: QueryLengths) -> ArrivalRouter:
        """A new router of these requests, by the job's routing."""
        return router_of(self.problem.adjustment.routing, tokens=tokens_of(self.problem, lengths),
                         windows=[window_of(one.estimate) for one in self._replicas],
                         seed=self.problem.seed)
