"""The rounds of a static batch (xsimulator.policies.static.closed_form): how many there are,
and when the batch is done. M is the largest number of decode iterations that a query of the batch
needs."""

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray

EXACT_ROUNDS = 3  # by recurrence, until rounds follow each other evenly
NODES = 7  # iterations at which later rounds are evaluated; lines between them
TIE_LEVELS = (np.arange(8) + 0.5) / 8  # quantiles of M at which the last group's place is taken
SCATTER_Z, SCATTER_WEIGHT = np.polynomial.hermite_e.hermegauss(5)
PLACES = 4  # of a query in its batch
BISECTIONS = 18
ROUNDING = 1e-13  # of a share of all batches: sums of it differ by less, whoever else is in them


class BatchTimeline(NamedTuple):
    """A batch has this timeline [configs, ...], from its start on the first stage."""

    queries: FloatArray  # [configs]
    groups: FloatArray  # [configs]
    encodes: FloatArray  # [configs] encode steps
    encode_s: FloatArray  # [configs] until its last encode step leaves the last stage
    begin_s: FloatArray  # [configs, EXACT_ROUNDS + 1] of the first group's step in round 1, 2, ...
    later_s: FloatArray  # [configs, NODES] r(u) of the rounds after those
    spread_s: FloatArray  # [configs, EXACT_ROUNDS + 1] from that until the last group's turn
    place_s: FloatArray  # [configs] between the starts of successive encode steps

    def first_token_s(self, *, is_decoded: bool) -> FloatArray:
        """A query in the middle of the batch has its first token so long [configs] after the start
        of its own encoding: when its group's first round begins or, `is_decoded`, its second."""
        at = int(is_decoded)
        taken_up = self.begin_s[:, at] + 0.5 * self.spread_s[:, at]
        return np.asarray(taken_up - (self.encodes - 1) / 2 * self.place_s)


class Rounds:
    """The rounds follow from one distribution of D, the decode iterations a query needs."""

    def __init__(self, below: FloatArray) -> None:
        """`below` is P(D <= k), k = 0 .. max D [max D + 1]."""
        self.below, first = below, EXACT_ROUNDS + 1
        # decode steps are evaluated at these iterations, from the first after the exact rounds
        self.nodes = np.linspace(first, max(len(below) - 1, first + 1), NODES)
        gap, later = self.nodes[1] - self.nodes[0], np.arange(first, len(below))
        # for the later rounds r(u) = shares @ r(nodes), [max D - EXACT_ROUNDS, NODES]
        self.node_shares = np.maximum(1 - np.abs(later[:, None] - self.nodes) / gap, 0.0)

    def not_done(self, queries: FloatArray) -> FloatArray:
        """Of so many queries P(M >= u) is this, u = 1 .. max D [configs, max D]."""
        sizes, index = np.unique(queries, return_inverse=True)
        return np.asarray(np.take(1 - self.below[:-1] ** sizes[:, None], index, axis=0))

    def expected_s(self, batch: BatchTimeline, not_done: FloatArray) -> FloatArray:
        """So long passes from a batch's start until its last token is taken up; not_done:
        [configs, max D]."""
        exact, later = not_done[:, :EXACT_ROUNDS], not_done[:, EXACT_ROUNDS:]
        gaps = np.diff(batch.begin_s, axis=1)[:, :exact.shape[1]]
        rounds_s = (exact * gaps).sum(axis=1)
        if later.shape[1]:
            rounds_s = rounds_s + ((later @ self.node_shares) * batch.later_s).sum(axis=1)
        # the place in the round after the M-th: its spread, round by round
        spread_s = batch.spread_s[:, 0] + (
            exact * np.diff(batch.spread_s, axis=1)[:, :exact.shape[1]]).sum(axis=1)
        place_s = self._last_place(batch) * spread_s
        return np.asarray(batch.begin_s[:, 0] + rounds_s + place_s, dtype=np.float64)

    def _last_place(self, batch: BatchTimeline) -> FloatArray:
        """The last group with a query of D = M has this place in its round [configs]: 0 first, 1
        last.

        With x = F(M)^B/G and y = F(M - 1)^B/G for one group, P(none after group g) given M is
        (x^(g+1) y^(G-1-g) - y^G) / (x^G - y^G); the sum over g is a geometric one."""
        groups, rows = batch.groups[:, None], (batch.queries / batch.groups)[:, None]
        place = np.searchsorted(self.below, TIE_LEVELS ** (1 / batch.queries[:, None]))
        place = np.minimum(place, len(self.below) - 1)
        x = self.below[place] ** rows
        y = np.where(place > 0, self.below[place - 1], 0.0) ** rows
        whole, before = x**groups, y**groups
        is_apart = whole - before > 1e-12
        gap = np.where(is_apart, x - y, 1.0)
        passed = x * y * (x ** (groups - 1) - y ** (groups - 1)) / gap
        mean = np.where(is_apart, ((groups - 1) * whole - passed)
                        / np.where(is_apart, whole - before, 1.0), (groups - 1) / 2)
        return np.asarray(mean.mean(axis=1) / np.maximum(batch.groups - 1, 1.0))

    def with_output_s(self, batch: BatchTimeline, iterations: int) -> FloatArray:
        """A query that needs `iterations`, among others of any length, is expected to take so
        long."""
        not_done = self.not_done(batch.queries - 1)
        not_done[:, :max(iterations, 0)] = 1.0
        before_s = (batch.encodes - 1) / 2 * batch.place_s
        return np.asarray(self.expected_s(batch, not_done) - before_s)

    def quantile_s(self, batch: BatchTimeline, quantile: float, scatter: FloatArray) -> FloatArray:
        """The quantile of all latencies, by bisection on their distribution. scatter: [configs]
        standard deviation of the seconds that a batch's encoding takes."""
        iterations, ends = self._ends_s(batch)
        places = (np.arange(PLACES) + 0.5) / PLACES
        # [configs, places, scatter] what a latency has besides its batch's rounds
        shift = (scatter[:, None, None] * SCATTER_Z - ((batch.encodes - 1) * batch.place_s)[
            :, None, None] * places[:, None]).reshape(len(scatter), -1)
        weight = np.tile(SCATTER_WEIGHT / SCATTER_WEIGHT.sum(), PLACES) / PLACES
        low, high = ends[:, 0] + shift.min(axis=1), ends[:, -1] + shift.max(axis=1)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            done = self._done_by(middle[:, None] - shift, iterations, ends, batch.queries)
            is_enough = done @ weight >= quantile - ROUNDING
            low = np.where(is_enough, low, middle)
            high = np.where(is_enough, middle, high)
        return np.asarray(high, dtype=np.float64)

    def _ends_s(self, batch: BatchTimeline) -> tuple[FloatArray, FloatArray]:
        """Batches of such values of M [points] are done then [configs, points], both rising."""
        exact = min(EXACT_ROUNDS, len(self.below) - 1)
        begins = batch.begin_s[:, :exact + 1]
        iterations = np.arange(exact + 1, dtype=float)
        if len(self.node_shares):
            points = np.unique(np.linspace(1, len(self.node_shares), NODES).astype(int))
            sums = np.cumsum(self.node_shares, axis=0)[points - 1]
            begins = np.concatenate([begins, begins[:, -1:] + batch.later_s @ sums.T], axis=1)
            iterations = np.concatenate([iterations, EXACT_ROUNDS + points])
        spread_s = batch.spread_s[:, np.minimum(np.arange(len(iterations)), EXACT_ROUNDS)]
        return iterations, begins + self._last_place(batch)[:, None] * spread_s

    def _done_by(self, time_s: FloatArray, iterations: FloatArray, ends: FloatArray,
                 queries: FloatArray) -> FloatArray:
        """A batch of so many queries is done by then with this chance [configs, ...]."""
        reached = np.full(time_s.shape, iterations[0])
        for point in range(len(iterations) - 1):
            begin, end = ends[:, point, None], ends[:, point + 1, None]
            share = np.clip((time_s - begin) / np.maximum(end - begin, 1e-300), 0.0, 1.0)
            reached += share * (iterations[point + 1] - iterations[point])
        index: IntArray = np.where(np.isfinite(reached), reached + 1e-9, 0.0).astype(np.int64)
        chance = self.below[index] ** queries[:, None]
        return np.asarray(np.where(time_s < ends[:, :1], 0.0, chance), dtype=np.float64)

    @staticmethod
    def pushed(free: FloatArray, step: FloatArray, count: FloatArray) -> FloatArray:
        """The stages end then [configs, stages] after `count` steps that wait for no tokens."""
        through = np.cumsum(step, axis=1)
        ends = np.maximum.accumulate(free + step - through, axis=1)
        tail = np.maximum.accumulate(ends + np.maximum(count - 1, 0)[:, None] * step, axis=1)
        return np.asarray(np.where(count[:, None] > 0, tail + through, free), dtype=np.float64)

    @staticmethod
    def advance(free: FloatArray, begin: FloatArray, last: FloatArray, step: FloatArray,
                rest: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """One decode round gives (stages' ends, returns of the first group's and of the last
        group's tokens). `begin` and `last`: [configs] when the first group's step starts and the
        last group's tokens are there; step, rest: [configs, stages] of the slowest group and of all
        others. Along the stages end(s) = max(end(s - 1), free(s)) + step(s) is a running maximum
        (as in xsimulator.pipeline)."""
        through = np.cumsum(step, axis=1)
        head = free + step - through
        head[:, 0] = begin
        ends = np.maximum.accumulate(head, axis=1) + through
        tail = ends - through + rest
        tail[:, 0] = np.maximum(tail[:, 0], last)
        free = np.maximum.accumulate(tail, axis=1) + through
        return free, ends[:, -1], free[:, -1]
