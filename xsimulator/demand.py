"""Mean demand of a problem's requests, which every schedule has to serve. Symbols as in
xsimulator.bound."""

from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xsimulator.replay.steady_state import ROUNDING
from xsimulator.sharing import Sharing

BATCHES: FloatArray = 2.0 ** np.arange(0, 24, 0.25)  # chosen: grid of batch sizes


class Demand:
    """Mean sizes of a request, and sizes (`watched`) at the latency limit's quantile."""

    def __init__(self, problem: Problem, sharing: Sharing | None = None) -> None:
        """sharing: the prefixes that are encoded once, and here take no memory; None: none."""
        whole, constraint = problem.lengths, problem.constraint
        lengths = whole if sharing is None else sharing.lengths(whole)
        self.lengths, self._fewer = lengths, int(not problem.model.is_encoder_decoder)
        self.attended = None if sharing is None else sharing.attended
        # L: tokens that a request encodes, with its share of the prefixes
        self.inputs = lengths.inputs.mean + (0.0 if sharing is None else sharing.each)
        self._needed = lengths.outputs.support - self._fewer
        pmf, given = lengths.outputs.pmf, lengths.mean_input_given_output()
        mean = float(pmf @ self._needed)
        self.iterations = max(mean, ROUNDING)  # D; 0 in jobs that decode nothing
        # share of the decode steps by the request's output length
        steps = pmf * self._needed / mean if mean > 0 else pmf
        inputs, written = float(steps @ given), float(steps @ (self._needed + 1)) / 2
        # c: tokens of context of a decoded row, and those of them that no other request shares
        self.context = float(steps @ whole.mean_input_given_output()) + written
        self.held = inputs + written
        self.contexts = 2.0, float(whole.inputs.max + self._needed.max() + 1)
        # at least half of the requests above this quantile keep a limit on a share of all
        quantile = constraint.quantile if constraint.kind == "sequence" else (
            2 * constraint.quantile - 1)
        length = lengths.outputs.quantile(max(quantile, 1e-9))
        self.watched = float(length - self._fewer)  # d
        is_long = np.arange(1, len(pmf) + 1) >= length
        long_inputs, others = (float(pmf[own] @ given[own] / pmf[own].sum()) if pmf[own].sum() > 0
                               else self.inputs for own in (is_long, ~is_long))
        # if long outputs are few, the replay that checks the limit gives other requests that length
        self.watched_inputs = min(long_inputs, others)
        # rows that a request of that length displaces, since it needs more memory
        most = problem.default_max_tokens
        self.excess = max((long_inputs + (self.watched + 1) / 2) / self.held,
                          (long_inputs + most) / (inputs + most)) - 1
        self.excess = max(self.excess, 0.0)

    @cached_property
    def turnover(self) -> float:
        """Lower bound on the number of requests, per slot, that begin while a request decodes d
        iterations. If all slots were filled together, half of the first fillings count. Wald's
        equation adds at least d / D - 1 that take the place of others."""
        return max(self.watched / self.iterations - 0.5, 0.0)

    def in_batches(self, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(requests, iterations until the longest is done, at most d) of batches that are decoded
        to their end, with a mean of `rows` rows per step."""
        of_rows, queries, iterations = self._batches
        return np.interp(rows, of_rows, queries), np.interp(rows, of_rows, iterations)

    @cached_property
    def _batches(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[BATCHES] (mean rows of a step, requests, iterations, at most d)."""
        below = np.cumsum(self.lengths.outputs.pmf)[:-1]  # P(length <= k)
        below = np.minimum(below, 1.0)
        longer = 1 - below[None, :] ** BATCHES[:, None]
        longest = longer.sum(axis=1) + 1 - self._fewer
        watched = longer[:, :int(self.watched) + self._fewer - 1].sum(axis=1) + 1 - self._fewer
        longest, watched = (np.maximum(own, self.iterations) for own in (longest, watched))
        rows = BATCHES * self.iterations / longest
        return rows, BATCHES, np.minimum(watched, max(self.watched, 0.0))


