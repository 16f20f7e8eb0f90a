"""Upper bound, in requests/s, on the throughput of one replica (docs/bound.md derives it).

Symbols. Means over requests: L = input tokens, D = decode iterations, c = context tokens of a
decoded row. d = decode iterations of a request of the latency limit's quantile, T = the limit
(xsimulator.demand). Of a pool of stages: G = groups, n = decode steps/s, m = rows that the G groups
decode in a cycle of tau = G / n seconds. Then throughput = m / (D tau), and

    tau >= G W_s(m / G)       Each stage s works all groups' steps, and all encoding.
    tau >= sum of P_s(m / G)  A group's step passes all stages.
    T   >= own encoding + d intervals + the encoding of others that falls into them;
    m c <= tokens of KV cache beside the weights.

W and P are convex functions below the step times (xsimulator.convex_steps). So no mix of steps has
a mean below them. m runs over a grid: for m between m1 and m2 the throughput is at most m2 / (D
tau(m1)). So nothing is assumed between grid points. G is any real number."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from heapq import heapify, heappush, heapreplace
from typing import Literal

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.allocation import can_hold, pool_ranks
from xsimulator.convex_steps import ROWS
from xsimulator.demand import Demand
from xsimulator.plans import StagePlan, StagePlans
from xsimulator.pool_bound import PoolBound
from xsimulator.sharing import sharing_of
from xsimulator.stage_times import HandoverCost
from xsimulator.step_bounds import attention_lines
from xsimulator.two_pool_bound import TwoPoolBound

Kind = Literal["one pool", "two pools"]
SPLITS = 8  # chosen: of the range of the share of encoding that the decode pool takes over


def kind_of(name: str) -> Kind:
    """The kind of a policy's pools."""
    return "two pools" if len(policy(name).pools) > 1 else "one pool"


class UpperBound:
    """Upper bounds on the throughput for the tensor plans of one problem. Their tables are kept."""

    def __init__(self, problem: Problem, timing: TimingSource,
                 plans: StagePlans | None = None) -> None:
        self.problem = problem
        self.demand, sharing = Demand(problem), sharing_of(problem)
        shared = self.demand if sharing is None else Demand(problem, sharing)
        self._plans = plans or StagePlans(problem, timing)
        lines = cache(lambda layers, degree: attention_lines(layers, degree, self.demand))
        self._pool = cache(lambda plan: PoolBound(plan, problem, self.demand, lines))
        # two pools share no prefixes
        self._alone = self._pool if sharing is None else cache(
            lambda plan: PoolBound(plan, problem, shared, lines))

    def of_plan(self, plan: tuple[int, int], kind: Kind, latency_s: float | None = None, *,
                cutoff_qps: float = 0.0) -> float:
        """Upper bound, requests/s, on schedules of this (tp_degree, tp_gpus), at least
        `cutoff_qps`. A plan that the model or the cluster refuses has the bound `cutoff_qps`.
        latency_s: limit in place of the problem's."""
        limit_s = self.problem.constraint.latency_s if latency_s is None else latency_s
        if kind == "one pool":
            try:
                pool = self._alone(self._plans.both(*plan))
            except InputError:
                return cutoff_qps
            return max(pool.alone_qps(limit_s), cutoff_qps)
        pools = [(self._pool(encode), self._pool(decode), HandoverCost(
            self.problem, self._plans.timing, encode.stages, decode.stages))
            for encode, decode in self._divisions(*plan)]
        # the highest rates first, so that the others fall below the cutoff
        for encoding, decoding, link in sorted(pools, key=lambda own: -min(
                own[0].steps.most_encode_qps, own[1].most_decode_qps)):
            cutoff_qps = max(cutoff_qps, self._divided_qps(
                encoding, decoding, link, limit_s, cutoff_qps))
        return cutoff_qps

    def of_two_pools(self, degrees: Iterable[int], latency_s: float) -> float:
        """Upper bound, requests/s, on two pools over all divisions of devices and layers, with
        groups of these degrees. Quicker and looser than one bound for each division."""
        return self._shared.qps(tuple(sorted(set(degrees))), latency_s)

    @cached_property
    def _shared(self) -> TwoPoolBound:
        return TwoPoolBound(self.problem, self._plans, self._pool)

    def _divisions(self, degree: int, gpus: int) -> Iterable[tuple[StagePlan, StagePlan]]:
        """Yields the (encode, decode) pools for every number of encoding devices."""
        problem = self.problem
        for count in range(1, problem.cluster.num_devices):
            ranks = pool_ranks(problem.cluster, count, degree, gpus)
            if ranks is not None and can_hold(problem.model, *ranks):
                yield (self._plans.pool(ranks[0], "encode"),
                       self._plans.pool(ranks[1], "decode", len(ranks[0])))

    def _divided_qps(self, encoding: PoolBound, decoding: PoolBound, link: HandoverCost,
                     limit_s: float, cutoff_qps: float) -> float:
        """Upper bound, requests/s, on two pools whose decode pool may encode any share. The range
        of shares is split where the bound is highest, until it is at most `cutoff_qps`."""
        if min(encoding.room_tokens, decoding.room_tokens) <= 0:
            return 0.0
        batches = ROWS[::4]  # a coarse grid is enough: its fixed costs are small
        moved_s = link.seconds(batches * self.demand.inputs)
        busy_s, path_s = encoding.steps.encode_s(batches)
        # the last entry: batches beyond the grid, without their fixed costs
        rates = np.append(batches[1:] / np.maximum(busy_s, moved_s)[1:],
                          encoding.steps.most_encode_qps)
        left_s = limit_s - path_s - moved_s

        def within(low: float, high: float) -> tuple[float, float, float]:
            curve = decoding.curve(low)
            # a request that the decode pool encodes waits for no handover
            spare_s = left_s
            if high:
                spare_s = np.maximum(left_s, limit_s - decoding.steps.encode_watched_s)
            place = np.searchsorted(curve.latency_s, spare_s, side="right")
            decoded = np.append(0.0, np.maximum.accumulate(curve.qps))[place]
            encoded = rates / (1 - high) if high < 1 else np.full_like(rates, np.inf)
            return -float(np.minimum(encoded, decoded).max()), low, high

        ranges = [within(0.0, 0.0), within(0.0, 1.0)]
        heapify(ranges)
        for _ in range(SPLITS):
            qps, low, high = ranges[0]
            if -qps <= cutoff_qps or low == high or -qps <= -within(low, low)[0]:
                break
            heapreplace(ranges, within(low, (low + high) / 2))
            heappush(ranges, within((low + high) / 2, high))
        return -ranges[0][0]
