"""The longest context among the queries of a micro-batch: what attention over padded caches charges
each of them.

Symbols: D = decode iterations a query needs, k = iteration of a query, from 1 on."""

from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths

MAX_CONTEXT_BINS = 512  # resolution of the histograms of contexts
MAX_DOUBLINGS = 12  # maxima are tabulated over 1, 2, 4, ... 4096 queries
MAX_PAIRS = 4096  # observed (input, output) pairs used for the histograms; more are thinned out


class LongestContext:
    """Expected maxima, from a histogram of the contexts at each decode iteration of a query."""

    def __init__(self, lengths: JointLengths, survival: FloatArray, iterations_fewer: int) -> None:
        """`survival`: [D max] P(D >= k); D is `iterations_fewer` less than the output tokens."""
        self._lengths, self._survival, self._fewer = lengths, survival, iterations_fewer

    @cached_property
    def _histogram(self) -> tuple[FloatArray, float]:
        """([D max, bins] P(D >= k, context in bin), width of a bin in tokens)."""
        steps = len(self._survival)
        top = self._lengths.inputs.max + steps
        width = -(-top // MAX_CONTEXT_BINS)
        histogram = np.zeros((steps, top // width + 1))
        pairs = self._lengths.pairs
        if pairs is None:
            support, weights = self._lengths.inputs.support, self._lengths.inputs.pmf
            for k in range(1, steps + 1):
                histogram[k - 1] = self._survival[k - 1] * np.bincount(
                    (support + k) // width, weights, minlength=histogram.shape[1])
        else:
            thinned = pairs[:: -(-len(pairs) // MAX_PAIRS)]
            iterations = thinned[:, 1] - self._fewer
            for k in range(1, steps + 1):
                present = thinned[iterations >= k, 0]
                histogram[k - 1] = np.bincount(
                    (present + k) // width, minlength=histogram.shape[1]) / len(thinned)
        return histogram, float(width)

    def expected(self, n_d: int, at: IntArray) -> FloatArray:
        """[len(at), doublings + 1] expected largest context among 2^k queries active at each of
        the rising iterations `at` (0..N_D - 1) of a phase."""
        histogram, width = self._histogram
        mass = np.zeros((len(at), histogram.shape[1]))  # [iterations, bins]
        for begin in range(0, len(histogram), n_d):
            known = at[begin + at < len(histogram)]
            mass[: len(known)] += histogram[begin + known]
        total = mass.sum(axis=1, keepdims=True)
        below = np.cumsum(mass, axis=1) / np.where(total > 0, total, 1.0)
        top = width * (mass.shape[1] - 0.5)  # upper half of the last bin is never reached
        columns = []
        for _ in range(MAX_DOUBLINGS + 1):
            # E[max] = top - sum of F(x)^m over the bins' edges; squaring doubles m
            columns.append(top - width * below[:, :-1].sum(axis=1))
            below = below * below
        return np.where(total > 0, np.stack(columns, axis=1), 0.0)


def expected_maximum(table: FloatArray, queries: FloatArray) -> FloatArray:
    """Largest context among `queries` [..., rows], by a table [rows, doublings + 1] of
    LongestContext.expected; linear in the logarithm of the number."""
    position = np.clip(np.log2(np.maximum(queries, 1.0)), 0, table.shape[-1] - 1)
    lower = np.minimum(position.astype(np.int64), table.shape[-1] - 2)
    at = np.arange(len(table)) * table.shape[-1] + lower
    left, right = table.take(at), table.take(at + 1)
    return np.asarray(left + (position - lower) * (right - left))
