"""Typed values as JSON, and their collective exchange between ranks. The receiver's own types
decide: pydantic checks every value, and a misfit raises ForeignMessage. (A pickle would run
whatever its sender likes.) `comm` is mpi4py's, and calls with it are collective."""

from functools import cache
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from xgpt.core.errors import XgptError

# chosen: far above a job of millions of requests that finish at once
MOST_BYTES = 2**28


class ForeignMessage(XgptError):
    """A message of another version of xgpt, or of another program."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a message between ranks cannot be read: {why}. Do all ranks run the "
                         "same version of xgpt?")


def to_bytes(value: object, kind: Any) -> bytes:
    """JSON of `value`, which is of type `kind`."""
    data = _adapter(kind).dump_json((value,), exclude_defaults=True, fallback=_plain,
                                    warnings=False)  # the receiver checks
    assert len(data) <= MOST_BYTES, f"{len(data) = }"
    return data


def from_bytes(data: bytes | bytearray, kind: Any) -> Any:
    """The value of type `kind` that `to_bytes` wrote. Raises ForeignMessage."""
    try:
        return _adapter(kind).validate_json(data)[0]
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise ForeignMessage(f"{where}: {first['msg']}" if where else first["msg"]) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[tuple[Any]]:
    """Adapter of a tuple with one `kind`: settings do not apply to a bare dataclass."""
    return TypeAdapter(tuple[kind], config=ConfigDict(
        strict=True, extra="forbid", ser_json_inf_nan="constants"))


def _plain(value: Any) -> Any:
    """Plain numbers of numpy's, and lists of token ids that lie in a file."""
    return value.item() if hasattr(value, "item") else list(value)


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
    """The first rank's `value`, of type `kind`, on every rank; other ranks' values are ignored."""
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
