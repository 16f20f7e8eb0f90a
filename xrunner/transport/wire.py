"""Values of stated types as JSON and back: what travels between ranks. Nothing is ever built of
what a message names: the types are the receiver's own, pydantic checks every value against them,
and what does not fit raises ForeignMessage. (A pickle would run what its sender likes.)"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from xgpt.core.errors import XgptError

# One of a job of millions of queries, finished at once, stays far below.
MOST_BYTES = 2**28


class ForeignMessage(XgptError):
    """What came is none of ours: another version of xgpt at the other end, or another program."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a message between ranks cannot be read: {why}. Do all ranks run the "
                         "same version of xgpt?")


def to_bytes(value: object, kind: Any) -> bytes:
    """`value`, which is of type `kind`."""
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
    """Of the tuple that `kind` alone is in: a dataclass by itself takes no settings."""
    return TypeAdapter(tuple[kind], config=ConfigDict(
        strict=True, extra="forbid", ser_json_inf_nan="constants"))


def _plain(value: Any) -> Any:
    """Of numpy's numbers, and of token ids that lie in a file."""
    return value.item() if hasattr(value, "item") else list(value)
