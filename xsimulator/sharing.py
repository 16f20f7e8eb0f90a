"""Shared prefixes in a plan: each is encoded once, and held once for all its requests.

Plans spread a prefix evenly over its job: every request encodes and holds its own tokens and an
equal share of all prefixes. Decode steps read whole contexts. Prefixes that live between their
requests need memory of their own (`forest`)."""

from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from xgpt.core.controls import Adjustment
from xgpt.core.lengths import FloatArray, IntArray, JointLengths, Lengths
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem, QueryLengths
from xrunner.rules.order import apart, run_order, window_of
from xrunner.rules.routing import expected_tokens, replica_shares, units_of

STRETCHES = 4  # chosen: parts of a long job that are replayed


class Sharing:
    """The shared prefixes of a job's requests. `queries`: these in the order of a run. `own`:
    tokens of each input that no prefix holds, [requests]. `each`: tokens of all prefixes, by the
    number of requests. `forest`: most tokens of prefixes that live at a time, from the first of
    their requests to the last.

    `attended`: [tokens] number of inputs and prefixes of each length less those whose tokens are
    there before, for each request. Times its attention this is the mean attention of encoding."""

    def __init__(self, queries: QueryLengths, order: IntArray) -> None:
        """queries: those that can run. order: in which they are run."""
        self.queries, prefixes, count = queries.take(order), queries.prefixes, len(queries.inputs)
        assert prefixes is not None and self.queries.prefixes is not None
        self._inputs, (first, last) = queries.inputs, self.queries.prefixes.lives
        used, ends, tokens = last >= 0, prefixes.ends, prefixes.own_tokens
        self.own: IntArray = queries.inputs - prefixes.shared
        self.each = float(tokens[used].sum()) / count
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, first[used], tokens[used])
        np.subtract.at(change, last[used] + 1, tokens[used])
        self.forest = int(np.cumsum(change).max())
        self.attended = np.zeros(int(queries.inputs.max()) + 1)
        for sizes, sign in ((queries.inputs, 1), (prefixes.shared, -1), (ends[used], 1),
                            ((ends - tokens)[used], -1)):
            self.attended += sign * np.bincount(sizes, minlength=len(self.attended)) / count
        self.attended = self.attended[1:]
        self._held, self._size = np.cumsum(np.sort(tokens[used])), prefixes.block_tokens
        self._sums = np.concatenate([[0], np.cumsum(self.queries.encoded)])
        self._most = cache(lambda size: int((self._sums[size:] - self._sums[:-size]).max()))

    def lengths(self, given: JointLengths, more: float = 0.0) -> JointLengths:
        """Own tokens of inputs, `more` longer, with the outputs of the distribution `given`."""
        low, part = int(more), more % 1
        counts = np.bincount(self.own + low, minlength=1) / len(self.own)
        pmf = (np.append((1 - part) * counts, 0.0) + np.append(0.0, part * counts))[1:]
        pairs = given.pairs
        if pairs is not None and np.array_equal(pairs[:, 0], self._inputs):
            pairs = np.stack([self.own + round(more), pairs[:, 1]], axis=1)
        else:
            pairs = None
        return replace(given, inputs=Lengths(pmf=pmf), pairs=pairs)

    def most_encoded(self, requests: FloatArray) -> FloatArray:
        """Most tokens that so many consecutive requests encode."""
        sizes, place = np.unique(np.clip(np.ceil(requests), 1, len(self.own)).astype(np.int64),
                                 return_inverse=True)
        return np.array([self._most(size) for size in sizes.tolist()], float)[place]


    def slack(self, requests: FloatArray | float, kv_tokens: FloatArray | float) -> FloatArray:
        """Tokens of KV blocks that are not full, at most, if so many requests and prefixes of
        `kv_tokens` lie in them (xrunner.engine.kv.Room)."""
        most = np.searchsorted(self._held, kv_tokens, side="right")
        return np.asarray(2 * (requests * self._size + most * (self._size - 1)))

    def of_replica(self, problem: Problem, copies: int) -> QueryLengths:
        """The requests of one of so many equal replicas, in the order of a run."""
        known = self.queries
        if copies == 1:
            return known
        tokens = expected_tokens(known.inputs, known.most_outputs, problem.lengths.outputs.mean,
                                 np.full(len(known.inputs), known.outputs is not None))
        routing = problem.adjustment.routing
        units = units_of(tokens, known.prefixes, copies, routing)
        return known.take(np.array(max(replica_shares(tokens, copies, routing, units=units),
                                       key=len)))


def sharing_of(problem: Problem) -> Sharing | None:
    """The shared prefixes of a problem's requests; None where none of its policies shares any."""
    known = problem.queries
    if known is None or known.prefixes is None or not any(
            row.shares_prefixes for row in able_policies(problem.fixed)):
        return None
    return _sharing(known, problem.adjustment, problem.seed)


@lru_cache(maxsize=8)
def _sharing(known: QueryLengths, asked: Adjustment, seed: int) -> Sharing | None:
    runs = np.flatnonzero(known.most_outputs >= 1)
    known = known.take(runs)
    # where the order is left open, it is the input's
    order = np.arange(len(runs)) if asked.order == "auto" else run_order(
        asked.order, window_of(asked, 1, known.prefixes), known, seed)
    return Sharing(known, order) if len(runs) else None


def stretches(total: int, count: int) -> IntArray:
    """Places of `count` of `total` requests in order, in STRETCHES of consecutive ones that are
    evenly spread. These share as much as in the whole job; single ones would share less."""
    each = -(-count // STRETCHES)
    middles = (np.arange(STRETCHES) + 0.5) * total / STRETCHES
    first = np.clip(middles - each / 2, 0, total - each).astype(np.int64)
    return np.asarray(np.add.outer(first, np.arange(each)).ravel()[:count])


def repeated(queries: QueryLengths, count: int, rng: np.random.Generator) -> QueryLengths:
    """`count` requests of a job as they follow one another. It is run again and again, or of a
    longer one stretches are taken. `queries`: its requests in the order of the run.

    Every tree of prefixes is new once in a run of the job, at a random place. So prefixes are
    encoded as often as in the job in the mean, but evenly spread over time."""
    prefixes, total = queries.prefixes, len(queries.inputs)
    assert prefixes is not None
    runs, rows = np.divmod(stretches(total, count) if count < total else np.arange(count), total)
    tops, own = prefixes.nodes[rows], prefixes[rows]
    while len(above := np.flatnonzero((tops >= 0) & (prefixes.parents[tops] >= 0))):
        tops[above] = prefixes.parents[tops[above]]
    renewed = rng.integers(total, size=len(prefixes.ends))[tops]
    return replace(queries.take(rows), prefixes=apart(own, runs + (rows >= renewed)))
