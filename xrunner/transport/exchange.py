"""Values of stated types that all ranks exchange at once, as checked JSON (xrunner.transport.wire).
`comm` is mpi4py's; every call is collective."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrunner.transport.wire import MOST_BYTES, ForeignMessage, from_bytes, to_bytes


def gather(comm: Any, value: object, kind: Any) -> list[Any] | None:
    """Every rank's `value`, of type `kind`, on the first rank; None on the others."""
    data, is_root = to_bytes(value, kind), comm.Get_rank() == 0
    sizes = np.zeros(comm.Get_size(), np.int64) if is_root else None
    comm.Gather(np.array([len(data)], np.int64), sizes, root=0)
    if sizes is None:
        comm.Gatherv(bytearray(data), None, root=0)
        return None
    _check(sizes)
    received = bytearray(int(sizes.sum()))
    comm.Gatherv(bytearray(data), [received, sizes.tolist()], root=0)
    return _divided(received, sizes, kind)


def all_gather(comm: Any, value: object, kind: Any) -> list[Any]:
    """Every rank's `value`, of type `kind`, on every rank."""
    data, sizes = to_bytes(value, kind), np.zeros(comm.Get_size(), np.int64)
    comm.Allgather(np.array([len(data)], np.int64), sizes)
    _check(sizes)
    received = bytearray(int(sizes.sum()))
    comm.Allgatherv(bytearray(data), [received, sizes.tolist()])
    return _divided(received, sizes, kind)


def broadcast(comm: Any, value: object, kind: Any) -> Any:
    """The first rank's `value`, of type `kind`, on every rank; those of the others are not looked
    at."""
    data = bytearray(to_bytes(value, kind)) if comm.Get_rank() == 0 else bytearray()
    size = np.array([len(data)], np.int64)
    comm.Bcast(size, root=0)
    _check(size)
    if not data:
        data = bytearray(int(size[0]))
    comm.Bcast(data, root=0)
    return from_bytes(data, kind)


def _check(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    if not ((sizes > 0) & (sizes <= MOST_BYTES)).all():
        raise ForeignMessage(f"{sizes.tolist()} bytes were announced, of at most {MOST_BYTES}")


def _divided(received: bytearray, sizes: np.ndarray[Any, np.dtype[np.int64]],
             kind: Any) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [from_bytes(received[end - size:end], kind)
            for end, size in zip(ends, sizes.tolist(), strict=True)]
