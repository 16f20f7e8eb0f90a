"""What the lengths of a problem's queries say of those at work: how long they stay, what they hold.

Symbols: D = decode iterations of a query (its output tokens, one fewer where encoding gives the
first), S(k) = P(D >= k), N_D = decode iterations of a phase of RRA, c(D) = ceil(D / N_D), the
phases that a query stays."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, JointLengths, ndtri
from xgpt.core.problem import Problem

BLOCKS = np.array([0.0, 0.08, 0.25, 0.5, 0.75, 1.0])  # chosen: parts of a phase taken together


def expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    return np.where(many > 1, ndtri((many - 0.375) / (many + 0.25)), 0.0)


class Phase(NamedTuple):
    """A phase of N_D iterations in steady state, of each query that is encoded in it.

    `widths`, `active`: [blocks] iterations of a block, and queries active in it in the mean.
    `mean_phases`: E[c(D)]. `reserved`, `reserved_variance`: tokens of KV right after encoding.
    `most_phases`: of the longest query."""

    widths: FloatArray
    active: FloatArray
    mean_phases: float
    reserved: float
    reserved_variance: float
    most_phases: int


class Workload:
    """The lengths of one problem's queries, as the rough formulas ask for them."""

    def __init__(self, problem: Problem) -> None:
        lengths: JointLengths = problem.lengths
        self.inputs, self.outputs = lengths.inputs, lengths.outputs
        self.fewer = 0 if problem.model.is_encoder_decoder else 1
        most_output = max(problem.default_max_tokens, lengths.outputs.max)
        self.longest = lengths.inputs.max + most_output  # tokens that the longest query reserves
        pmf, mean = lengths.outputs.pmf, lengths.mean_input_given_output()
        square = lengths.mean_input_given_output(power=2)
        self.survival = np.minimum(self._tail(pmf), 1.0)  # S(k), k = 1 ..
        self.iterations = max(float(self.survival.sum()), 1e-9)  # E[D]
        self.most_iterations = len(self.survival)
        # variance of the number of queries at work over its mean, where each comes by itself
        self.coming_and_going = float((self.survival * (1 - self.survival)).sum()) / max(
            self.iterations, 1e-9)
        self.decoding_share = float(self.survival[0])  # of queries, with more than one token
        count = np.arange(1, self.most_iterations + 1)
        # tokens of KV that a decoded row reads, over all iterations of all queries
        read = self._tail(pmf * mean) + self.survival * count
        read_square = (self._tail(pmf * square) + 2 * count * self._tail(pmf * mean)
                       + self.survival * count**2)
        self.context = float(read.sum()) / self.iterations
        self.context_std = math.sqrt(max(
            float(read_square.sum()) / self.iterations - self.context**2, 0.0))
        self._reserve = np.stack([self._tail(pmf * (mean + most_output)), self._tail(pmf * (
            square + 2 * most_output * mean + most_output**2))])
        # of all queries, those that end with their first token too
        self.reserve = float(pmf @ mean) + most_output
        self.reserve_square = float(pmf @ (square + 2 * most_output * mean + most_output**2))
        # of those at work, among which long outputs, and the inputs beside them, count more
        stay = pmf * np.maximum(lengths.outputs.support - self.fewer, 1e-9)
        self.reserve_at_work = float(stay @ mean / stay.sum()) + most_output
        self._until = np.concatenate([[0.0], np.cumsum(self.survival)])
        self._below = np.minimum(np.concatenate([[0.0], np.cumsum(pmf)])[self.fewer:], 1.0)
        bound = problem.constraint
        # D of the latency bound's query, and that of a query of the bound's length alone
        self.watched = max(self.outputs.quantile(bound.quantile) - self.fewer, 0)
        self.phase = cache(self._find_phase)

    def charged_context(self, rows: FloatArray, *, is_padded: bool) -> FloatArray:
        """[...] tokens that each of so many rows decoded together is charged: its own in the mean,
        or where a kernel pads the longest's."""
        if not is_padded:
            return np.full(np.shape(rows), self.context)
        longest = self.context + self.context_std * expected_maximum_z(np.asarray(rows, float))
        return np.minimum(longest, self.inputs.max + self.most_iterations)

    def rounds(self, batch: FloatArray, least: int = 0) -> FloatArray:
        """[configs] expected largest D of so many queries, of which one has at least `least`."""
        sizes, place = np.unique(batch, return_inverse=True)
        not_done = 1 - self._below[None, :-1] ** sizes[:, None]
        not_done[:, :least] = 1.0
        return np.asarray(not_done.sum(axis=1)[place])

    def _find_phase(self, iterations: int) -> Phase:
        phases = -(-self.most_iterations // iterations)
        begins = np.arange(phases)[:, None] * iterations
        edges = np.unique(np.round(BLOCKS * iterations))
        until = self._until[np.minimum(begins + edges.astype(np.int64), self.most_iterations)]
        widths = np.diff(edges)
        active = np.diff(until, axis=1).sum(axis=0) / widths
        entering = self.survival[begins[:, 0]]  # in the phase of their encoding, and each later
        reserve, square = self._reserve[:, begins[:, 0]].copy()
        reserve[0], square[0] = self.reserve, self.reserve_square
        return Phase(widths, active, float(entering.sum()), float(reserve.sum()),
                     max(float((square - reserve**2).sum()), 0.0), phases)

    def _tail(self, per_output: FloatArray) -> FloatArray:
        """[D] sums over all D >= k, k = 1 .., of what is given by output length."""
        tail = np.cumsum(per_output[::-1])[::-1][self.fewer:]
        return tail if tail.size else np.zeros(1)
