"""Replay of a job by several copies of the model: each replays its share of the queries.

Which copy takes which query is said by the rule that the runner routes by
(xrunner.rules.routing)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from xgpt.core.controls import FIXED
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem, QueryLengths, QueryTimes
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.routing import deal, expected_tokens
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.routed import RoutedReplay, replay_routed
from xsimulator.replay.step_clock import StepClocks

APART = 0.02  # chosen: share by which the ends of copies may differ, and count as one


class JobReplayer(Protocol):
    """Replays whole jobs by one schedule."""

    @property
    def problem(self) -> Problem: ...

    def run(self, queries: QueryLengths) -> ReplayResult: ...


def replayer_of(problem: Problem, timing: TimingSource, estimate: Estimate,
                clocks: StepClocks | None = None, *, has_steps: bool = True) -> JobReplayer:
    """Replays jobs by all copies that the estimate has (clocks, has_steps: see Replayer)."""
    if estimate.others:
        return ShapesReplayer(problem, timing, estimate, clocks)
    replayer = Replayer(problem, timing, estimate, clocks, has_steps=has_steps)
    copies = estimate.deployment.replicas
    return replayer if copies == 1 else CopiesReplayer(replayer, copies)


def replay_steady(problem: Problem, timing: TimingSource, estimate: Estimate, queries: QueryLengths,
                  clocks: StepClocks | None = None) -> tuple[list[ReplayResult], ReplayResult]:
    """(each copy's, all as one) for figures of the steady state: of copies that are alike by one of
    them, whose queries these are, and of unlike ones by all together."""
    if not estimate.others:
        alone = replay_job(problem, timing, estimate, queries, clocks=clocks)
        return [alone], alone
    routed = ShapesReplayer(problem, timing, estimate, clocks).routed(queries)
    return routed.results, joined(routed.results, routed.rows)


class ShapesReplayer:
    """Replays a job by copies of several shapes, all at once (xsimulator.replay.routed). Cores that
    ranks share are not shared here: no stage is slowed down for them."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate,
                 clocks: StepClocks | None = None) -> None:
        self.problem = problem
        known = clocks or StepClocks(problem, timing)
        self._copies = [one for shape in estimate.shapes for one in [
            Replayer(problem, timing, shape.one_copy, known)] * shape.deployment.replicas]

    def run(self, queries: QueryLengths) -> ReplayResult:
        """The copies' results as one: pools and stages are numbered over all copies."""
        replay = self.routed(queries)
        return joined(replay.results, replay.rows)

    def routed(self, queries: QueryLengths) -> RoutedReplay:
        """What each copy did of them, in the order of the copies' ranks."""
        return replay_routed(self._copies, queries, self.problem.adjustment.routing)


class CopiesReplayer:
    """Replays a job by so many copies that are all like the one of `replayer`.

    The queries are dealt as the runner deals them. There a copy whose share has run dry takes over
    from the others, and in the end what has not begun is called back: here, where the first replay
    shows that copies end apart, the last queries of those that are late go to those that are early,
    by the pace of each, and all is replayed again. (Of equal copies that ends as it does query by
    query, xsimulator.replay.routed, within 1 % from a few hundred queries a copy on.)"""

    def __init__(self, replayer: Replayer, copies: int) -> None:
        self._replayer, self._copies, self.problem = replayer, copies, replayer.problem

    def run(self, queries: QueryLengths) -> ReplayResult:
        """The copies' results as one: pools and stages are numbered over all copies."""
        assert queries.outputs is not None
        tokens = expected_tokens(
            queries.inputs, queries.most_outputs, self.problem.lengths.outputs.mean,
            queries.outputs == queries.most_outputs)
        rows = [own for own in deal(tokens, self._copies, self.problem.adjustment.routing)
                if own]
        results = [self._replayer.run(queries.take(np.array(own))) for own in rows]
        if self.problem.adjustment.routing == FIXED:
            return joined(results, rows)
        moved = taken_over(rows, [result.makespan_s for result in results])
        again = [result if own == before else self._replayer.run(queries.take(np.array(own)))
                 for own, before, result in zip(moved, rows, results, strict=True)]
        if max(one.makespan_s for one in again) < max(one.makespan_s for one in results):
            return joined(again, moved)
        return joined(results, rows)  # so few that none was left to be taken over


def taken_over(rows: Sequence[list[int]], ends_s: Sequence[float]) -> list[list[int]]:
    """The copies' queries after those that are early have taken over from those that are late.
    ends_s: [copies] when each would have ended; all end together if each keeps its pace."""
    if max(ends_s) <= (1 + APART) * min(ends_s):
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
    kept[paces.index(max(paces))] += left  # what rounding left
    return kept


def joined(results: Sequence[ReplayResult], rows: Sequence[Sequence[int]]) -> ReplayResult:
    """What copies did of one job as one result. rows: [copies] the places of their queries in it,
    in the order in which each took them up."""
    order = np.argsort(np.concatenate([np.asarray(own, np.int64) for own in rows]), kind="stable")

    def column(name: str) -> FloatArray:
        columns = [getattr(result.times, name) for result in results]
        return np.asarray(np.concatenate(columns)[order])

    firsts = [0, *accumulate(sum(len(pool.stages) for pool in one.pools) for one in results)]
    return ReplayResult(
        pools=tuple(replace(pool, name=_name(pool.name, copy), stages=tuple(
            firsts[copy] + stage for stage in pool.stages))
            for copy, result in enumerate(results) for pool in result.pools),
        handovers=tuple(replace(one, source=_name(one.source, copy), target=_name(one.target, copy))
                        for copy, result in enumerate(results) for one in result.handovers),
        times=QueryTimes(**{name: column(name) for name in (
            "arrival_s", "start_s", "first_token_s", "last_token_s")}),
        output_tokens=np.concatenate([result.output_tokens for result in results])[order],
        preemptions=sum(result.preemptions for result in results))


def _name(pool: str, copy: int) -> str:
    return f"copy {copy + 1}" if pool == "all" else f"copy {copy + 1}, {pool}"
