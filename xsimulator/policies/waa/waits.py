"""Iterations between a query's arrival in WAA's decode pool and its last token, and the latency of
queries that are encoded in two ways (xsimulator.policies.waa.closed_form)."""

from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xsimulator.occupancy import QueryFlow
from xsimulator.policies.waa.chunk_rates import ChunkRates
from xsimulator.policies.waa.pool_times import root

_ACCURACY = 1e-6  # of seconds


class Waits:
    """Those of one problem's queries, for the bound on latency."""

    def __init__(self, problem: Problem, flow: QueryFlow) -> None:
        self._constraint, self._outputs = problem.constraint, problem.lengths.outputs
        self._flow = flow

    @cached_property
    def iterations(self) -> float:
        """So many pass between arrival and last token: of the output length at the bound's
        quantile, or that quantile over all queries."""
        if self._constraint.kind == "sequence":
            longest = self._flow.iterations_of(self._outputs.quantile(self._constraint.quantile))
            return longest + 0.5 if longest > 0 else 0.0
        ends, shares = self._until
        return float(np.interp(self._constraint.quantile, shares, ends))

    @cached_property
    def _until(self) -> tuple[FloatArray, FloatArray]:
        """(numbers of iterations, the share of the queries that wait for no more): D + U with U
        uniform over one, whose distribution function is linear between these."""
        ends = np.array([self._flow.iterations_of(int(k)) + 1 for k in self._outputs.support],
                        float)
        return ends, np.cumsum(self._outputs.pmf)

    def either_way(self, found: ChunkRates,
                   handed_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds [configs] of the bound's latency where both pools encode, and by the slower way;
        `handed_s`: of those that are handed over."""
        latency, slower = handed_s.copy(), handed_s.copy()
        rows = np.flatnonzero((found.share > 0) & np.isfinite(handed_s))
        if not len(rows):
            return latency, slower
        handed_s, share, every = handed_s[rows], found.share[rows], found.rates.iteration_s[rows]
        # who is encoded in chunks goes on in its group's next step
        taken_s = found.bounded_taken_s[rows] + max(self.iterations - 0.5, 0.0) * every
        slower[rows] = np.maximum(handed_s, taken_s)
        if self._constraint.kind == "sequence":
            latency[rows] = (1 - share) * handed_s + share * taken_s
            return latency, slower
        ends, shares = self._until
        quicker = np.minimum(handed_s, taken_s)

        def lacking(over_s: FloatArray) -> FloatArray:
            """Of the quantile, those within so much more than the quicker way's latency."""
            handed, taken = (np.interp(
                self.iterations + (quicker + over_s - own_s) / every, ends, shares)
                for own_s in (handed_s, taken_s))
            return np.asarray(self._constraint.quantile - (1 - share) * handed - share * taken)

        most = slower[rows] - quicker
        latency[rows] = quicker + root(lacking, most, np.minimum(lacking(most), 0.0), _ACCURACY)
        return latency, slower
