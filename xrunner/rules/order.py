"""The order in which a job's requests are run. Requests are sorted within windows of consecutive
ones: that bounds how long a request waits, and how many results wait for an earlier one, since
results are written in the input's order."""

import random
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from xgpt.core.controls import Adjustment, Order
from xgpt.core.lengths import IntArray
from xgpt.core.problem import QueryLengths

WINDOW = 1024  # chosen: requests of a window, if the job names none
SHUFFLED_BATCHES, LEAST_SHUFFLED = 16, 64  # chosen: a random order's: encode batches, requests

# what requests are sorted by, [requests]; None: they keep their order
_KEYS: dict[str, Callable[[QueryLengths], NDArray[np.generic] | None]] = {
    "shortest-input": lambda lengths: lengths.inputs,
    "longest-input": lambda lengths: -lengths.inputs,
    "shortest-output": lambda lengths: lengths.expected_outputs,
    "longest-output": lambda lengths: -lengths.expected_outputs,
    "deadline": lambda lengths: lengths.deadlines_s,
}


def window_of(asked: Adjustment, encode_batch: int) -> int:
    """Number of requests in a window: the number asked for, or the default; 0: the whole job."""
    if asked.window is not None:
        return asked.window
    is_random = asked.order == "random"
    return max(SHUFFLED_BATCHES * encode_batch, LEAST_SHUFFLED) if is_random else WINDOW


def run_order(order: Order, window: int, lengths: QueryLengths, seed: int) -> IntArray:
    """Indices of the requests in the order in which they are run, [requests].

    Each window of `window` requests (0: all of them) is sorted by itself, and equal requests keep
    their order. Requests without a deadline come last. `seed`: of a random order."""
    count = len(lengths.inputs)
    window = window or max(count, 1)
    if order == "random":
        return np.fromiter(_shuffled(count, window, seed), np.int64, count)
    places = np.arange(count)
    key = _KEYS[order](lengths) if order in _KEYS else None
    return places if key is None else np.lexsort((key, places // window))


def _shuffled(count: int, window: int, seed: int) -> Iterator[int]:
    source = random.Random(seed)
    for first in range(0, count, window):
        part = [*range(first, min(first + window, count))]
        source.shuffle(part)
        yield from part
