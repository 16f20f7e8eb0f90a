"""Replay of requests that arrive over time, on all replicas of an Estimate."""

from numpy.typing import ArrayLike

from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.job import Replayer
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import merge_results
from xsimulator.replay.step_clock import StepClocks


class ServiceReplayer:
    """Replays arriving requests by one Estimate. The job's routing rule gives each to a replica."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None) -> None:
        """clocks: tables of step times shared with other replays."""
        self.problem, self.estimate = problem, estimate
        self._replayer = Replayer(problem, timing, estimate.one_copy, clocks)

    def run(self, lengths: QueryLengths, arrival_s: ArrayLike, *, concurrency: int | None = None,
            has_steps: bool = True) -> ReplayResult:
        """The result of requests with known outputs that arrive at `arrival_s`, [requests]. With
        `concurrency` requests come from so many clients instead, who each send the next one when an
        answer has come. has_steps: False for a result without pools, which is quicker. Raises
        XgptError for a request that never fits."""
        assert concurrency is None and self.estimate.deployment.replicas == 1
        found = self._replayer.run(lengths, arrival_s=arrival_s)
        return merge_results([found], [range(len(lengths.inputs))])
