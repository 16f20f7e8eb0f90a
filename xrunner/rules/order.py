"""In which order queries are taken up: the input's, or at random within windows of it.

Inputs that are sorted, or grouped by their kind, and outputs that go with them make neighbouring
batches unlike (paper section 5.2: input lengths randomised across batches). Results are written in
the input's order all the same, so those of a window wait until its first queries are done: that is
why the order is random within windows, and not over the whole job."""

import random
from collections.abc import Collection, Iterator
from itertools import islice

WINDOW_BATCHES = 16  # encode batches in a window of the usual size
LEAST_WINDOW = 64


def window_of(asked: bool | int, encode_batch: int) -> int:
    """Queries of a window: as many as are asked for, or (True) the usual; 1 for none."""
    if isinstance(asked, bool):
        return max(WINDOW_BATCHES * encode_batch, LEAST_WINDOW) if asked else 1
    return max(asked, 1)


def run_order(count: int, window: int, seed: int, *, first: int = 0,
              without: Collection[int] = frozenset()) -> list[int]:
    """Places in the input, of those from `first` on and not `without` (the others are answered), in
    the order in which they are taken up. No place leaves its window."""
    return list(in_run_order(count, window, seed, first=first, without=without))


def in_run_order(count: int, window: int, seed: int, *, first: int = 0,
                 without: Collection[int] = frozenset()) -> Iterator[int]:
    """Yields the same places, a window's in memory at once."""
    places = (place for place in range(first, count) if place not in without)
    source = random.Random(seed)
    if window <= 1:
        yield from places
        return
    while part := list(islice(places, window)):
        source.shuffle(part)
        yield from part
