"""order.npy: the order in which a run takes its requests, int64 [requests], little-endian. It is
made once, as the run begins; a resume goes by it whatever is planned by then. Without the file the
order is the input's."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.system.whole_file import sync_folder, temporary_of

ORDER_FILE = "order.npy"
_AT_A_TIME = 2**16  # chosen


def save_order(output: Path, order: IntArray) -> None:
    """Writes the order of a new run, durably; removes the file if it is the input's."""
    path = output / ORDER_FILE
    if (order == np.arange(len(order))).all():
        path.unlink(missing_ok=True)
        return
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        np.save(file, order.astype("<i8"))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(output)


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
