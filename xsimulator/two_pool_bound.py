"""Upper bound on two pools over all divisions of the devices and of the layers.

A decode step of n rows takes p(n) seconds through all layers and w(n) device-seconds. Layers on
groups of several degrees lie between the values of these degrees.

Symbols: q = shares of tokens by the size n of their step, M = devices, N = rows that the caches
hold. E = least device-seconds to encode a request, D = its decode iterations, and d = those of a
request of the latency limit's quantile. T = the limit, lambda = throughput in requests/s. Then

    lambda (E + D sum q w(n) / n) <= M        device time
    lambda D sum q p(n) <= N                  rows in the system (Little's law)
    sum q (p(n) - T / d) / n <= 0             mean step, each step counted once

By linear duality no q satisfies all three if there are prices a, b >= 0 such that for every n

    w / n + a p + b (p - T / d) / n  >  (M / lambda - E) / D + a N / (lambda D)"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.convex_steps import HALVINGS, ROWS
from xsimulator.plans import StagePlan, StagePlans
from xsimulator.pool_bound import PoolBound

# chosen: prices a and b, relative to the cheapest step
PRICES: FloatArray = np.concatenate([[0.0], 2.0 ** np.arange(-12, 17, 0.5)])


class TwoPoolBound:
    """The upper bound on two pools for one problem, by the degrees of its groups."""

    def __init__(self, problem: Problem, plans: StagePlans,
                 pool: Callable[[StagePlan], PoolBound]) -> None:
        self._problem, self._plans, self._pool = problem, plans, pool
        self._of_degree = cache(self._bounds_of_degree)

    def qps(self, degrees: tuple[int, ...], latency_s: float) -> float:
        """Upper bound, requests/s, for groups of these degrees within a latency limit."""
        found = [self._of_degree(degree) for degree in degrees]
        rows, path_s, work_s = (np.concatenate([own[kind] for own in found]) for kind in range(3))
        encode_s, encode_watched_s = min(own[3] for own in found), min(own[4] for own in found)
        demand = self._pool(self._whole(degrees[0])).demand
        least_s = (latency_s - encode_watched_s) / max(demand.watched, 1e-9)
        held = self._rows_held()
        if least_s <= 0 or held < 1:
            return 0.0
        devices, iterations = self._problem.cluster.num_devices, demand.iterations
        each = work_s / rows
        scale = float((each / path_s).min())
        late = np.zeros(len(rows)) if math.isinf(least_s) else (path_s - least_s) / rows
        price = PRICES[:, None]
        # [a, b] least left-hand side over all n
        dear = np.array([(each + a * scale * path_s + price * devices * late).min(axis=1)
                         for a in PRICES])

        def may_be(qps: float) -> bool:
            left = (devices / qps - encode_s) / iterations
            room = PRICES * scale * held / (qps * iterations)
            return bool((dear <= (left + room)[:, None]).all())

        low, high = 0.0, devices / max(encode_s, 1e-300)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if may_be(middle) else (low, middle)
        return high

    def _whole(self, degree: int) -> StagePlan:
        return self._plans.pool([tuple(range(degree))], "both")

    def _bounds_of_degree(self, degree: int,
                          ) -> tuple[FloatArray, FloatArray, FloatArray, float, float]:
        """([sizes] rows n, p(n), w(n), then E and the seconds to encode a request of the limit's
        quantile), lower bounds for one degree."""
        steps = self._pool(self._whole(degree)).steps
        path_s = steps.of_share(0.0).at(steps.of_share(0.0).path_s, ROWS[::4])
        # of a step between two sizes: the rows of the larger, the time of the quicker
        rows, path_s = ROWS[4::4], np.minimum(path_s[:-1], path_s[1:])
        return rows, path_s, degree * path_s, degree / steps.most_encode_qps, steps.encode_watched_s

    def _rows_held(self) -> float:
        """N: number of rows whose contexts fit beside the weights of both pools."""
        problem, whole = self._problem, self._whole(1)
        decoder_only = not problem.model.is_encoder_decoder
        token = float(memory.kv_bytes(problem, whole.stages, 1.0)[0])
        free = (problem.cluster.num_devices * memory.capacity_bytes(problem.cluster.device)
                - (1 + decoder_only) * float(whole.weight_bytes[0]))
        return free / token / self._pool(whole).demand.context
