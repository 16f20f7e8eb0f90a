"""Replay of a job on several replicas. Requests go to replicas by the runner's own routing rule
(xrunner.rules.routing)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.controls import FIXED
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem, QueryLengths, QueryTimes
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.arrival_routing import ArrivalRouter, JobRouting
from xrunner.rules.forecast import with_forecasts
from xrunner.rules.routing import Router, expected_tokens, replica_shares, units_of, window_of
from xsimulator.replay.event_replay import RoutedReplay, run_routed
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.replay.native_replay import replay_natively
from xsimulator.replay.queries import Queries, ReplayJob
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.step_clock import StepClocks

UNEVEN = 0.02  # chosen: replicas whose ends differ by at most this share end together


class JobReplayer(Protocol):
    """Replays whole jobs by one schedule."""

    @property
    def problem(self) -> Problem: ...

    def run(self, queries: QueryLengths) -> ReplayResult: ...


def replayer_of(problem: Problem, timing: TimingSource, estimate: Estimate,
                clocks: StepClocks | None = None, *, has_steps: bool = True) -> JobReplayer:
    """A replayer of jobs on all replicas of the estimate; clocks, has_steps as of Replayer."""
    if estimate.others:
        return ShapesReplayer(problem, timing, estimate, clocks)
    replayer = Replayer(problem, timing, estimate, clocks, has_steps=has_steps)
    copies = estimate.deployment.replicas
    return replayer if copies == 1 else ReplicasReplayer(replayer, copies)


def replay_steady(problem: Problem, timing: TimingSource, estimate: Estimate, queries: QueryLengths,
                  clocks: StepClocks | None = None) -> tuple[list[ReplayResult], ReplayResult]:
    """(result of each replica, merged result), for steady-state figures. If all replicas are equal,
    one of them is replayed, with these requests as its own. Unequal ones are replayed together."""
    if not estimate.others:
        alone = replay_job(problem, timing, estimate, queries, clocks=clocks)
        return [alone], alone
    routed = ShapesReplayer(problem, timing, estimate, clocks).routed(queries)
    return routed.results, merge_results(routed.results, routed.rows)


class ShapesReplayer:
    """Replays a job on replicas of several shapes together (replay_routed). Shared cores are not
    modelled here."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None) -> None:
        self.problem = problem
        self._copies = replayers_of(problem, timing, estimate, clocks)

    def run(self, queries: QueryLengths) -> ReplayResult:
        """One result of all replicas. Pools and stages are numbered over all replicas."""
        replay = self.routed(queries)
        return merge_results(replay.results, replay.rows)

    def routed(self, queries: QueryLengths) -> RoutedReplay:
        """The replay of each replica, with its requests, in the order of their ranks."""
        return replay_routed(self._copies, queries, self.problem.adjustment.routing)


class ReplicasReplayer:
    """Replays a job on equal replicas.

    The requests are divided as the runner divides them. In a run an idle replica takes requests
    from the others. Here, if the first replay shows that replicas end apart, the last requests of
    late replicas move to early ones by the throughput of each, and all is replayed again. Measured
    against the replay request by request (replay_routed), the end is within 1 % from a
    few hundred requests per replica on."""

    def __init__(self, replayer: Replayer, copies: int) -> None:
        self._replayer, self._copies, self.problem = replayer, copies, replayer.problem

    def run(self, queries: QueryLengths) -> ReplayResult:
        """One result of all replicas. Pools and stages are numbered over all replicas."""
        tokens = tokens_of(self.problem, queries)
        routing = self.problem.adjustment.routing
        shared = queries.prefixes if self._replayer.estimate.shares_prefixes else None
        units = units_of(tokens, shared, self._copies, routing)
        rows = [own for own in replica_shares(tokens, self._copies, routing, units=units) if own]
        results = [self._replayer.run(queries.take(np.array(own))) for own in rows]
        if routing == FIXED:
            return merge_results(results, rows)
        moved = rebalanced(rows, [result.makespan_s for result in results])
        again = [result if own == before else self._replayer.run(queries.take(np.array(own)))
                 for own, before, result in zip(moved, rows, results, strict=True)]
        if max(one.makespan_s for one in again) < max(one.makespan_s for one in results):
            return merge_results(again, moved)
        return merge_results(results, rows)  # too few requests to move


def rebalanced(rows: Sequence[list[int]], ends_s: Sequence[float]) -> list[list[int]]:
    """[replicas] requests of each replica after moves from late to early ones, so that all end
    together at their present throughputs. ends_s: [replicas] seconds at which each ended before."""
    if max(ends_s) <= (1 + UNEVEN) * min(ends_s):
        return list(rows)
    paces = [len(own) / end_s for own, end_s in zip(rows, ends_s, strict=True)]
    even_s = sum(len(own) for own in rows) / sum(paces)
    wanted = [round(even_s * pace) for pace in paces]
    kept = [own[:max(count, 1)] for own, count in zip(rows, wanted, strict=True)]
    left = [query for own, mine in zip(rows, kept, strict=True) for query in own[len(mine):]]
    for mine, count in zip(kept, wanted, strict=True):
        more = max(count - len(mine), 0)
        mine += left[:more]
        left = left[more:]
    kept[paces.index(max(paces))] += left  # the remainder of rounding
    return kept


def replayers_of(problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None) -> list[Replayer]:
    """The replayer of each replica, in the order of their ranks; one for all of a shape."""
    known = clocks or StepClocks(problem, timing)
    return [one for shape in estimate.shapes for one in [
        Replayer(problem, timing, shape.one_copy, known)] * shape.deployment.replicas]


def replay_together(replayers: Sequence[Replayer], lengths: QueryLengths, router: ArrivalRouter,
                    arrival_s: ArrayLike = 0.0, *, has_steps: bool = True) -> RoutedReplay:
    """The replay of requests on replicas, each by its own replayer, until every one is done.
    arrival_s: one for each request, or one for all; infinite: when an answer ends. has_steps: False
    for results without pools, where that is quicker."""
    first = replayers[0]
    gives_token = not first.problem.model.is_encoder_decoder
    lengths = with_forecasts(lengths, first.problem, first.forecasting)
    plans = {one: one.plans(one.rules(lengths), one.clocks(lengths)) for one in replayers}
    found = replay_natively(ReplayJob.of(lengths, arrival_s, gives_token, first.forecasting),
                            [plans[one] for one in replayers], router, has_steps=has_steps)
    if found is not None:
        return RoutedReplay(found.results(), found.rows(), 0)
    return run_routed(
        Queries(lengths, encode_gives_token=gives_token, arrival_s=arrival_s,
                forecasting=first.forecasting),
        [one.plans(one.rules(lengths), one.clocks(lengths)) for one in replayers], router)


def replay_routed(replayers: Sequence[Replayer], lengths: QueryLengths,
                  routing: str) -> RoutedReplay:
    """The replay of a batch job on replicas, by its routing."""
    estimates = [one.estimate for one in replayers]
    return replay_together(replayers, lengths, JobRouting(Router(
        tokens_of(replayers[0].problem, lengths), windows=[window_of(one) for one in estimates],
        routing=routing, speeds=[one.figures.throughput_qps for one in estimates],
        prefixes=lengths.prefixes if all(one.shares_prefixes for one in estimates) else None)))


def tokens_of(problem: Problem, lengths: QueryLengths) -> FloatArray:
    """[requests] expected tokens of each, by which they are routed."""
    assert lengths.outputs is not None
    return expected_tokens(lengths.inputs, lengths.most_outputs, problem.lengths.outputs.mean,
                           lengths.outputs == lengths.most_outputs)


def merge_results(results: Sequence[ReplayResult],
                  rows: Sequence[Sequence[int] | IntArray]) -> ReplayResult:
    """The results of replicas as one result of the job. rows: [replicas] indices of their requests
    in the job, in the order of each replica."""
    order = np.argsort(np.concatenate([np.asarray(own, np.int64) for own in rows]), kind="stable")

    def column(name: str) -> FloatArray:
        columns = [getattr(result.times, name) for result in results]
        return np.asarray(np.concatenate(columns)[order])

    firsts = [0, *accumulate(sum(len(pool.stages) for pool in one.pools) for one in results)]
    return ReplayResult(
        pools=tuple(replace(pool, name=_name(pool.name, copy), stages=tuple(
            firsts[copy] + stage for stage in pool.stages),
            requests=np.asarray(rows[copy]) if pool.requests is None else pool.requests)
            for copy, result in enumerate(results) for pool in result.pools),
        handovers=tuple(replace(one, source=_name(one.source, copy), target=_name(one.target, copy))
                        for copy, result in enumerate(results) for one in result.handovers),
        times=QueryTimes(**{name: column(name) for name in (
            "arrival_s", "start_s", "first_token_s", "last_token_s")}),
        output_tokens=np.concatenate([result.output_tokens for result in results])[order],
        preemptions=sum(result.preemptions for result in results),
        replicas=[np.asarray(own, np.int64) for own in rows])


def _name(pool: str, copy: int) -> str:
    return f"replica {copy + 1}" if pool == "all" else f"replica {copy + 1}, {pool}"
