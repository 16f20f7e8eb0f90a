"""Values of stated types as JSON and back: what travels between ranks. Nothing is ever built of
what a message names: the types are the receiver's own, every value is checked against them, and
what does not fit raises ForeignMessage. (A pickle would run what its sender likes.)

A dataclass or a NamedTuple becomes the list of its fields, a mapping the list of its items, an enum
its value. Floats come back as the same ones, infinities too."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from xgpt.core.errors import XgptError

# One of a job of millions of queries, finished at once, stays far below.
MOST_BYTES = 2**28


class ForeignMessage(XgptError):
    """What came is none of ours: another version of xgpt at the other end, or another program."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a message between ranks cannot be read: {why}. Do all ranks run the "
                         "same version of xgpt?")


class Codec(NamedTuple):
    """`encode`: to what JSON holds; `decode`: back, or ForeignMessage."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def to_bytes(value: object, kind: Any) -> bytes:
    """`value`, which is of type `kind`."""
    data = json.dumps(codec(kind).encode(value), separators=(",", ":"),
                      default=operator.index).encode()  # numpy's whole numbers
    assert len(data) <= MOST_BYTES, f"{len(data) = }"
    return data


def from_bytes(data: bytes | bytearray, kind: Any) -> Any:
    """The value of type `kind` that `to_bytes` wrote. Raises ForeignMessage."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise ForeignMessage(f"no JSON: {type(cause).__name__}") from None
    return codec(kind).decode(raw)


@cache
def codec(kind: Any) -> Codec:
    """Of a type: numbers, texts, None, enums, dataclasses, NamedTuples, and tuples, lists, mappings
    and unions of them."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (Union, UnionType):
        return _union(inner)
    if origin is Literal:
        return Codec(_same, partial(_literal, frozenset(inner)))
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return _record(tuple, [codec(one) for one in inner], str(kind))
    if origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return _many(codec(inner[0]), list if origin is list else tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(codec(inner[0]), codec(inner[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Codec(lambda member: member.value, partial(_member, kind))
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        return _dataclass(kind, {one.name: codec(hints[one.name]) for one in fields(kind)})
    assert issubclass(kind, tuple) and hasattr(kind, "_fields"), f"{kind = }"
    return _record(lambda values: kind(*values), [codec(hints[name]) for name in kind._fields],
                   kind.__name__)


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ForeignMessage(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ForeignMessage(f"float expected, not {type(value).__name__}")
    return float(value)


_PLAIN: dict[Any, Codec] = {
    **{kind: Codec(_same, partial(_exactly, kind)) for kind in (int, bool, str, NoneType)},
    None: Codec(_same, partial(_exactly, NoneType)), float: Codec(float, _number)}


def _literal(allowed: frozenset[Any], value: Any) -> Any:
    if type(value) not in (str, int) or value not in allowed:
        raise ForeignMessage(f"one of {sorted(allowed)} expected")
    return value


def _member(kind: type[Enum], value: Any) -> Enum:
    if isinstance(value, (str, int)) and value in kind._value2member_map_:
        return kind(value)
    raise ForeignMessage(f"a {kind.__name__} expected")


def _list(value: Any, length: int | None, what: str) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise ForeignMessage(f"{what}: a list{'' if length is None else f' of {length}'} expected")
    return value


def _many(one: Codec, made: Callable[[Any], Any]) -> Codec:
    if one in (_PLAIN[int], _PLAIN[str]):  # most of what travels
        kind = int if one is _PLAIN[int] else str

        def decode(value: Any) -> Any:
            if not set(map(type, _list(value, None, "several"))) <= {kind}:
                raise ForeignMessage(f"a list of {kind.__name__} expected")
            return made(value)

        return Codec(list, decode)
    return Codec(lambda values: [one.encode(value) for value in values],
                 lambda value: made(one.decode(each) for each in _list(value, None, "several")))


def _record(make: Callable[[Any], Any], parts: Sequence[Codec], name: str) -> Codec:
    return Codec(
        lambda values: [part.encode(value) for part, value in zip(parts, values, strict=True)],
        lambda raw: make([part.decode(value) for part, value in zip(
            parts, _list(raw, len(parts), name), strict=True)]))


def _mapping(key: Codec, value: Codec) -> Codec:
    item = _record(tuple, (key, value), "an item")
    return Codec(lambda mapping: [item.encode(pair) for pair in mapping.items()],
                 lambda raw: dict(item.decode(pair) for pair in _list(raw, None, "a mapping")))


def _dataclass(kind: Any, parts: Mapping[str, Codec]) -> Codec:
    def values_of(value: object) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in parts)

    record = _record(lambda values: kind(**dict(zip(parts, values, strict=True))),
                     list(parts.values()), kind.__name__)
    return Codec(lambda value: record.encode(values_of(value)), record.decode)


def _union(kinds: Sequence[Any]) -> Codec:
    """Of dataclasses, told apart by their names; or of a type and None; or of both."""
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        one = codec(others[0])
        return Codec(lambda value: None if value is None else one.encode(value),
                     lambda raw: None if raw is None else one.decode(raw))
    known = {kind.__name__: codec(kind) for kind in others}

    def encode(value: Any) -> Any:
        if value is None and NoneType in kinds:
            return None
        name = type(value).__name__
        return [name, known[name].encode(value)]

    def decode(raw: Any) -> Any:
        if raw is None and NoneType in kinds:
            return None
        name, content = _list(raw, 2, "one of several")
        if not isinstance(name, str) or name not in known:
            raise ForeignMessage(f"{str(name)[:40]!r} is none of {', '.join(known)}")
        return known[name].decode(content)

    return Codec(encode, decode)
