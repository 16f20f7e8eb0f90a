"""Replay of a whole job by an Estimate, with its rules on its stages.

If there are more ranks than cores, a timing source gives step times with all ranks at work
(`TimingFacts.sharing` times as long as on own cores). In a run some ranks wait and leave their
cores to the others. With k ranks at work on c cores, each works at the rate min(1, c / k). A
stage's slow-down is the mean of that over its own work. It depends on when the others work, so it
is found by ROUNDS replays."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.controls import CAP, forecasting_of
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.forecast import forecaster_of, with_forecasts
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.steps import BatchingRule, EncodingRule, rules_for, set_deadlines, set_forecaster
from xsimulator.replay.event_replay import run
from xsimulator.replay.native_replay import NativeReplay, replay_natively
from xsimulator.replay.pool import HandoverPlan, PoolPlan, ReplicaPlan
from xsimulator.replay.queries import Queries, ReplayJob
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.step_clock import PoolClock, ScaledClock, StepClock, StepClocks

ROUNDS = 4  # chosen: replays for shared cores; one more changes the makespan by less than 1 %


class Replayer:
    """Replays jobs by one Estimate on one replica."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None, *, has_steps: bool = True) -> None:
        """clocks: tables of step times shared with other replays. has_steps: False for results
        without pools and handovers, which take the native replay half the time."""
        self._has_steps, forecasting = has_steps, forecasting_of(estimate.controls)
        self.forecasting = forecasting
        self._forecaster = None if forecasting.kind == CAP else forecaster_of(problem, forecasting)
        self.problem, self.estimate = problem, estimate
        self._pools = estimate.deployment.pools
        self._known_clocks = clocks or StepClocks(problem, timing)
        # (source, target, handover times) of each encode pool
        encoding, decoding = ([pool for pool in self._pools if pool.role == role]
                              for role in ("encode", "decode"))
        self._links = [
            (source, target, self._known_clocks.handovers(source.stages, target.stages))
            for source, target in zip(encoding, cycle(decoding), strict=False)]
        self._sharing = timing.facts.sharing
        self._max_context = 0

    def run(self, queries: QueryLengths, *, arrival_s: ArrayLike = 0.0,
            rules: Sequence[BatchingRule] | None = None,
            clocks: Sequence[PoolClock] | None = None) -> ReplayResult:
        """The result of a replay of requests with known outputs, in this order if they arrive
        together.

        arrival_s: [requests] arrival times. rules, clocks: one for each pool, in place of the
        estimate's. Raises XgptError for a request that never fits into the KV cache."""
        queries = with_forecasts(queries, self.problem, self.forecasting)
        if not self._has_steps and rules is None and clocks is None and (
                found := self.native(queries, arrival_s)):
            return found.results()[0]
        if clocks is None:
            clocks = self.clocks(queries) if rules is not None else (
                self._own_clocks(queries, arrival_s))
        return self._replay_once(queries, arrival_s, rules or self.rules(queries), clocks)

    def rules(self, queries: QueryLengths) -> tuple[BatchingRule, ...]:
        """New rules, one for each pool, which forecast as the job asks, for these requests."""
        rules = rules_for(self.estimate)
        for rule in rules:
            set_deadlines(rule, queries.deadlines_s)
            set_prefixes(rule, queries.prefixes)
            if self._forecaster is not None:
                set_forecaster(rule, self._forecaster)
        return rules

    def native(self, queries: QueryLengths, arrival_s: ArrayLike = 0.0) -> NativeReplay | None:
        """The replay by the native library, without steps; None if the library cannot replay it."""
        queries = with_forecasts(queries, self.problem, self.forecasting)
        job = ReplayJob.of(queries, arrival_s, not self.problem.model.is_encoder_decoder,
                           self.forecasting)
        return replay_natively(job, [self.plans(
            self.rules(queries), self._own_clocks(queries, arrival_s))], has_steps=False)

    def _own_clocks(self, queries: QueryLengths, arrival_s: ArrayLike) -> Sequence[PoolClock]:
        """The pools' clocks, slowed down by earlier replays if cores are shared."""
        clocks = self.clocks(queries)
        if self._sharing <= 1:
            return clocks
        cores = sum(stage.tp_degree for stage in self.estimate.deployment.stages) / self._sharing
        shared = [ScaledClock(clock, [1.0] * len(pool.stages))
                  for clock, pool in zip(clocks, self._pools, strict=True)]
        for _ in range(ROUNDS - 1):
            factors = slow_downs(
                self._replay_once(queries, arrival_s, self.rules(queries), shared),
                self.estimate.deployment.stages, cores)
            shared = [ScaledClock(clock, [slow / self._sharing for slow in own])
                      for clock, own in zip(clocks, factors, strict=True)]
        return shared

    def _replay_once(self, queries: QueryLengths, arrival_s: ArrayLike, own: Sequence[BatchingRule],
              clocks: Sequence[PoolClock]) -> ReplayResult:
        plans, handovers = self.plans(own, clocks)
        gives_token = not self.problem.model.is_encoder_decoder
        return run(Queries(queries, encode_gives_token=gives_token, arrival_s=arrival_s,
                           forecasting=self.forecasting), plans, handovers)

    def plans(self, own: Sequence[BatchingRule],
              clocks: Sequence[PoolClock]) -> ReplicaPlan:
        """The parts of the replica, with these rules and clocks of its pools."""
        plans = {pool.name: PoolPlan(
            name=pool.name, role=pool.role, rule=rule, clock=clock, kv_tokens=pool.kv_tokens,
            stages=tuple(stage.index for stage in pool.stages))
            for pool, rule, clock in zip(self._pools, own, clocks, strict=True)}
        handovers = []
        for source, target, times in self._links:
            rule = plans[source.name].rule
            assert isinstance(rule, EncodingRule), f"{rule = }"
            handovers.append(HandoverPlan(
                seconds=times.seconds, table=times.fetched, release=rule.release,
                source=source.name, target=target.name))
        return ReplicaPlan(tuple(plans.values()), handovers)

    def clocks(self, queries: QueryLengths) -> list[StepClock]:
        """A clock for each pool, for these lengths. Rows of static batches grow to the longest."""
        assert queries.outputs is not None
        most = max(queries.outputs.max(initial=1), queries.most_outputs.max(initial=1))
        longest = int(queries.inputs.max(initial=1) + most) + 1
        self._max_context = max(self._max_context, longest)
        slots = [0] * len(self._pools)
        if any(pool.placement for pool in self._pools):
            slots = [min(rule.group_max_active, len(queries.inputs))
                     for rule in rules_for(self.estimate)]
        return [self._known_clocks.of(pool.stages, self._max_context, pool.role, pool.placement,
                                      own) for pool, own in zip(self._pools, slots, strict=True)]


def replay_job(problem: Problem, timing: TimingSource, estimate: Estimate, queries: QueryLengths,
               *, rules: Sequence[BatchingRule] | None = None,
               clocks: StepClocks | None = None) -> ReplayResult:
    """The result of one replay of a job; arguments as of Replayer."""
    return Replayer(problem, timing, estimate, clocks).run(queries, rules=rules)


def planned_queries(problem: Problem, inputs: IntArray, outputs: IntArray) -> QueryLengths:
    """Requests of these lengths, each of which reserves the planned output tokens."""
    inputs = np.asarray(inputs, np.int64)
    return QueryLengths(inputs=inputs, outputs=np.asarray(outputs, np.int64),
                        most_outputs=np.full(inputs.shape, planned_outputs(problem)))


def planned_outputs(problem: Problem) -> int:
    """Output tokens that a request without its own limit reserves."""
    return max(problem.lengths.outputs.max, problem.default_max_tokens)


def slow_downs(result: ReplayResult, stages: Sequence[StageAssignment],
               cores: float) -> list[list[float]]:
    """[pools][stages] factor by which shared cores make each stage slower, if its steps lie in time
    as in `result`. cores: number of ranks that can work at once."""
    degrees = {stage.index: stage.tp_degree for stage in stages}
    times, progress = _progress(result.pools, degrees, cores)
    factors = []
    for pool in result.pools:
        busy = (pool.end_s - pool.start_s).sum(axis=0)
        done = (np.interp(pool.end_s, times, progress)
                - np.interp(pool.start_s, times, progress)).sum(axis=0)
        factors.append([float(b / d) if d > 0 else 1.0 for b, d in zip(busy, done, strict=True)])
    return factors


def _progress(pools: Sequence[PoolRecords], degrees: dict[int, int],
              cores: float) -> tuple[FloatArray, FloatArray]:
    """(times, seconds of work that an always busy rank has done by each)."""
    starts = np.concatenate([pool.start_s.ravel() for pool in pools])
    ends = np.concatenate([pool.end_s.ravel() for pool in pools])
    width = np.concatenate([np.tile([degrees[stage] for stage in pool.stages], len(pool.end_s))
                            for pool in pools]).astype(float)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    at_work = np.cumsum(np.concatenate([width, -width])[order])[:-1]
    times = times[order]
    rate = 1 / np.maximum(at_work / cores, 1.0)
    return times, np.concatenate([[0.0], np.cumsum(np.diff(times) * rate)])
