"""The order in which a job's requests are run. Requests are sorted within windows of consecutive
ones: that bounds how long a request waits, and how many results wait for an earlier one, since
results are written in the input's order.

Two orders keep requests together that share a prefix. `prefix` takes the prefixes depth first,
those first whose requests write most per encoded token (BatchLLM, arXiv 2412.03594). `blend` mixes
prefixes that compute with such that read the KV cache (BlendServe, arXiv 2411.16102)."""

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.controls import SHARING_ORDERS, Adjustment, Order
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import QueryLengths

WINDOW = 1024  # chosen: requests of a window, if the job names none
SHUFFLED_BATCHES, LEAST_SHUFFLED = 16, 64  # chosen: a random order's: encode batches, requests
# chosen: an order of prefixes takes the smallest window, from so many requests on, that keeps so
# much of what the whole job as one window saves
LEAST_SHARED, _KEPT = 64, 0.98
# chosen: `blend` moves a prefix out of its group if their densities differ by this factor, and as
# long as so much of the saved tokens is lost in all
_FAR, _LOST = 2.0, 0.01

# what requests are sorted by, [requests]; None: they keep their order
_KEYS: dict[str, Callable[[QueryLengths], NDArray[np.generic] | None]] = {
    "shortest-input": lambda lengths: lengths.inputs,
    "longest-input": lambda lengths: -lengths.inputs,
    "shortest-output": lambda lengths: lengths.expected_outputs,
    "longest-output": lambda lengths: -lengths.expected_outputs,
    "deadline": lambda lengths: lengths.deadlines_s,
}


def window_of(asked: Adjustment, encode_batch: int, prefixes: Prefixes | None = None) -> int:
    """Number of requests in a window: the number asked for, or the default; 0: the whole job.
    `prefixes`: of the job's requests."""
    if asked.window is not None:
        return asked.window
    if asked.order in SHARING_ORDERS:
        return 0 if prefixes is None else shared_window(prefixes)
    is_random = asked.order == "random"
    return max(SHUFFLED_BATCHES * encode_batch, LEAST_SHUFFLED) if is_random else WINDOW


def run_order(order: Order, window: int, lengths: QueryLengths, seed: int) -> IntArray:
    """Indices of the requests in the order in which they are run, [requests].

    Each window of `window` requests (0: all of them) is sorted by itself, and equal requests keep
    their order. Requests without a deadline come last. Without shared prefixes `prefix` and `blend`
    are the input's order. `seed`: of a random order."""
    count = len(lengths.inputs)
    window = window or max(count, 1)
    if order == "random":
        return np.fromiter(_shuffled(count, window, seed), np.int64, count)
    places = np.arange(count)
    if order in SHARING_ORDERS and lengths.prefixes is not None:
        own = in_windows(lengths.prefixes, window)
        return (_depth_first if order == "prefix" else _blended)(lengths, own, window)
    key = _KEYS[order](lengths) if order in _KEYS else None
    return places if key is None else np.lexsort((key, places // window))


def _shuffled(count: int, window: int, seed: int) -> Iterator[int]:
    source = random.Random(seed)
    for first in range(0, count, window):
        part = [*range(first, min(first + window, count))]
        source.shuffle(part)
        yield from part


def in_windows(prefixes: Prefixes, window: int) -> Prefixes:
    """The forest of requests that share within windows of `window` requests only."""
    return apart(prefixes, np.arange(len(prefixes.nodes)) // window)


def apart(prefixes: Prefixes, parts: IntArray) -> Prefixes:
    """The forest of requests that share within their part only: each prefix is there once for each
    part that has a request of it. `parts`: of each request, [requests]."""
    count = len(prefixes.ends)
    own = np.where(prefixes.nodes >= 0, parts * count + prefixes.nodes, -1)

    def above(pairs: IntArray) -> IntArray:
        parents = prefixes.parents[pairs % count]
        return np.where(parents >= 0, pairs - pairs % count + parents, -1)

    pairs, more = own[:0], np.unique(own[own >= 0])
    while len(more):
        pairs = np.union1d(pairs, more)
        more = np.unique(above(more))
        more = more[more >= 0]
    parents, nodes = (np.where(wanted >= 0, np.searchsorted(pairs, wanted), -1)
                      for wanted in (above(pairs), own))
    return replace(prefixes, parents=parents, ends=prefixes.ends[pairs % count], nodes=nodes)


def saved_tokens(prefixes: Prefixes, window: int) -> int:
    """Input tokens that need not be encoded if requests share within windows only."""
    return int(prefixes.shared.sum() - in_windows(prefixes, window).own_tokens.sum())


def shared_window(prefixes: Prefixes) -> int:
    """The smallest window, LEAST_SHARED requests times a power of two, that saves nearly what the
    whole job as one window saves; 0: none does."""
    count = max(len(prefixes.nodes), 1)
    least, windows = _KEPT * saved_tokens(prefixes, count), [
        LEAST_SHARED << one for one in range(((count - 1) // LEAST_SHARED).bit_length())]
    enough = [*takewhile(lambda one: saved_tokens(prefixes, one) >= least, windows[::-1])]
    return enough[-1] if enough else 0


class Forest:
    """Prefixes, and below them the requests. Its parts are the prefixes, then the requests."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.own_tokens, requests = prefixes.own_tokens, len(prefixes.nodes)
        self.parents: list[int] = [*prefixes.parents.tolist(), *prefixes.nodes.tolist()]
        self.is_top = np.array(self.parents, int) < 0
        self.sizes = self.below(np.ones(requests))  # [parts] requests
        self._firsts = self.parts(np.arange(requests), prefixes.lives[0])

    def below(self, of_requests: ArrayLike, of_prefixes: ArrayLike = 0.0) -> FloatArray:
        """[parts] sum of the values of each part and of all below it."""
        found = self.parts(of_requests, of_prefixes).tolist()
        for part in range(len(found) - 1, -1, -1):
            if (above := self.parents[part]) >= 0:
                found[above] += found[part]
        return np.array(found)

    def above(self, values: FloatArray, join: Callable[[float, float], float]) -> FloatArray:
        """[parts] what `join` makes of the value above and that of each part, from the top on."""
        found = values.tolist()
        for part, above in enumerate(self.parents):
            if above >= 0:
                found[part] = join(found[above], found[part])
        return np.array(found, values.dtype)

    def parts(self, of_requests: ArrayLike, of_prefixes: ArrayLike) -> FloatArray:
        """[parts] values."""
        return np.append(np.broadcast_to(of_prefixes, len(self.own_tokens)), of_requests)

    def depth_first(self, keys: FloatArray, window: int) -> IntArray:
        """Indices of the requests, window by window and depth first. Parts with one parent come by
        falling key, equal ones by their first request."""
        depths, sizes = self.above(np.ones(len(keys)), operator.add), self.sizes.tolist()
        places = [0.0] * (len(keys) + 1)  # of the next request; the last: of no parent
        for part in np.lexsort((self._firsts, -keys, self._firsts // window, depths)).tolist():
            above = self.parents[part]
            places[part] = places[above]
            places[above] += sizes[part]
        return np.argsort(places[len(self.own_tokens):-1])


def _depth_first(lengths: QueryLengths, own: Prefixes, window: int) -> IntArray:
    """The order `prefix`. `own`: the forest within windows."""
    forest = Forest(own)
    ratio = forest.below(lengths.expected_outputs) / forest.below(
        lengths.inputs - own.shared, own.own_tokens)
    return forest.depth_first(np.where(forest.is_top, ratio, 0.0), window)


def _blended(lengths: QueryLengths, own: Prefixes, window: int) -> IntArray:
    """The order `blend`: by falling density, taken from both ends. A density is the time of
    computing over that of reading the KV cache. Its unit changes no order: here it is tokens
    computed per token read."""
    outputs = np.maximum(lengths.expected_outputs, 1)
    computed = lengths.inputs - own.shared + outputs  # but for shared tokens
    read = outputs * (lengths.inputs + outputs / 2)  # in all decode steps

    def density(forest: Forest) -> FloatArray:
        return forest.below(computed, forest.own_tokens) / forest.below(read)

    whole = Forest(own)
    forest = Forest(_divided(own, whole, density(whole)))
    rows = forest.depth_first(density(forest), window)
    each = forest.above(forest.parts(computed, forest.own_tokens) / forest.sizes, operator.add)
    parts = [rows[first:first + window] for first in range(0, len(rows), window)]
    return np.concatenate([rows[:0], *[part[_from_both_ends(
        each[len(own.ends) + part], read[part])] for part in parts]])


def _divided(own: Prefixes, forest: Forest, density: FloatArray) -> Prefixes:
    """The prefixes `own`, where those unlike their group are groups of their own: the ones that
    cost the fewest tokens. `density`: [parts]."""
    unlike = abs(np.log(density / forest.above(density, lambda group, _: group)))
    far = np.flatnonzero(unlike[:len(own.ends)] >= np.log(_FAR))
    far = far[np.argsort(own.ends[own.parents[far]], kind="stable")]
    lost, parents = np.cumsum(own.ends[own.parents[far]]), own.parents.copy()
    parents[far[lost <= _LOST * (own.shared.sum() - own.own_tokens.sum())]] = -1
    return replace(own, parents=parents)


def _from_both_ends(computed: FloatArray, read: FloatArray) -> list[int]:
    """Places of requests that are sorted by falling density. They come from the dense end while
    those so far are no denser than all, else from the other. So both ends share the memory M as in
    BlendServe: M_L d_L + M_R d_R = M d."""
    surplus = (computed - computed.sum() / read.sum() * read).tolist()
    first, last, balance, found = 0, len(surplus) - 1, 0.0, list[int]()
    while first <= last:
        is_dense = balance <= 0
        found.append(first if is_dense else last)
        balance += surplus[found[-1]]
        first, last = first + is_dense, last - (not is_dense)
    return found
