"""order.npy: the order in which a run takes its requests, int64 [requests], little-endian.
arrivals.npy: when they arrive, by the run's clock, float64 [requests]. Both are made once, as the
run begins; a resume goes by them whatever is planned by then. Without order.npy the order is the
input's."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.system.whole_file import sync_folder, temporary_of

ORDER_FILE, ARRIVALS_FILE = "order.npy", "arrivals.npy"
_AT_A_TIME = 2**16  # chosen


def save_order(output: Path, order: IntArray) -> None:
    """Writes the order of a new run, durably; removes the file if it is the input's."""
    path = output / ORDER_FILE
    if (order == np.arange(len(order))).all():
        path.unlink(missing_ok=True)
        return
    _save(path, order.astype("<i8"))


def save_arrivals(output: Path, arrival_s: FloatArray | None) -> None:
    """Writes the arrivals of a new run, durably; removes the file if its requests do not arrive at
    times of their own."""
    if arrival_s is None:
        (output / ARRIVALS_FILE).unlink(missing_ok=True)
    else:
        _save(output / ARRIVALS_FILE, arrival_s.astype("<f8"))


def saved_arrivals(output: Path, num_queries: int) -> FloatArray:
    """[requests] seconds of the run's clock. Raises XgptError for a file without one of each."""
    path = output / ARRIVALS_FILE
    try:
        arrival_s: FloatArray = np.load(path)
        if arrival_s.shape == (num_queries,) and np.isfinite(arrival_s).all():
            return arrival_s
    except (OSError, ValueError, EOFError, TypeError):
        pass
    raise XgptError(f"{path} has no time of each of the {num_queries} requests: `xgpt submit "
                    "--again` starts again, and keeps the answers")


def _save(path: Path, column: IntArray | FloatArray) -> None:
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        np.save(file, column)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def saved_order(output: Path, num_queries: int) -> Iterator[int]:
    """Yields the indices of all requests in the run's order. Raises XgptError for a file that does
    not name each of them once."""
    path = output / ORDER_FILE
    if not path.exists():
        return iter(range(num_queries))
    try:
        order = np.load(path, mmap_mode="r")
        is_whole = order.shape == (num_queries,) and order.max() < num_queries and (
            np.bincount(order, minlength=num_queries) == 1).all()
    except (OSError, ValueError, EOFError, TypeError):
        is_whole = False
    if not is_whole:
        raise XgptError(f"{path} does not name each of the {num_queries} requests once: remove it, "
                        "and the same command goes on in the input's order")
    return (query for first in range(0, num_queries, _AT_A_TIME)
            for query in order[first:first + _AT_A_TIME].tolist())
