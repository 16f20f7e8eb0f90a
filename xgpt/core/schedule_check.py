"""Whether a schedule that was read from a file can be one: types, ranges and what must agree, with
every mistake by its key. What a search writes passes; what somebody's editor or script made of it
would otherwise end in a traceback, or run as something else than it says."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from xgpt.core.controls import Controls, WaaControls
from xgpt.core.deployment import Deployment
from xgpt.core.errors import Mistake
from xgpt.core.schedule import Schedule

MAX_COUNT = 2**53  # JSON's other readers hold no larger whole number exactly
# at least 1 of each; other counts may be 0
_POSITIVE = frozenset({
    "encode_batch", "decode_iterations", "decode_micro_batches", "encode_micro_batches",
    "max_active", "max_in_system", "token_budget", "num_groups", "tp_degree", "replicas"})
_MAY_BE_INFINITE = frozenset({
    "limit_s", "bound_qps", "gap", "unbounded_qps", "latency_s", "ttft_s", "tpot_s", "factor",
    "expected_s", "with_margin_s"})
_MAY_BE_NEGATIVE = frozenset({"gap", "cost"})
_SHARES = frozenset({"adjustment", "quantile"})
Wrong = tuple[str, object, str]  # key, value, what is allowed


_MOST_WHOLE = 2**63


def mistakes_in(schedule: Schedule, file: object) -> list[Mistake]:
    """What is wrong with a schedule of `file`; empty for one that can be executed."""
    found = list(_of(Schedule, schedule, ""))
    if not found:  # what must agree is told of values that are possible each
        for place, shape in enumerate((schedule.estimate, *schedule.estimate.others), start=-1):
            of = "" if place < 0 else f"others[{place}]."
            found += [(f"{of}{key}", value, allowed) for key, value, allowed in (
                *_of_deployment(shape.deployment), *_of_chunks(shape.controls))]
            if shape.others and place >= 0:
                found.append((f"{of}others", len(shape.others), "none: others stand beside the "
                              "first copies"))
        if not any(bound.metric == "latency" for bound in schedule.bounds):
            found.append(("bounds", None, "one of them on the latency"))
    return [Mistake(file=str(file), line=None, key=key.removeprefix(".estimate").removeprefix("."),
                    value=value, allowed=allowed) for key, value, allowed in found]


def _of(kind: Any, value: Any, key: str) -> Iterator[Wrong]:
    """What is wrong with a value that is to be of a kind, and with its parts."""
    name = key.rpartition(".")[2].partition("[")[0]
    options = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) in (Union, UnionType):
        if value is not None:
            yield from _of(options[0], value, key)
    elif get_origin(kind) is Literal:
        if value not in options:
            yield key, value, f"one of {', '.join(map(str, options))}"
    elif get_origin(kind) is tuple:
        kinds = [options[0]] * len(value) if options[-1] is Ellipsis else options
        for index, (each, one) in enumerate(zip(kinds, value, strict=True)):
            yield from _of(each, one, f"{key}[{index}]")
    elif is_dataclass(value):
        hints = get_type_hints(type(value))
        for field in fields(value):
            yield from _of(hints[field.name], getattr(value, field.name), f"{key}.{field.name}")
    elif (allowed := _allowed(kind, name)) is not None and not _is_in_range(kind, name, value):
        yield key, value, allowed


def _allowed(kind: Any, name: str) -> str | None:
    """A scalar's range in words; None for what has none."""
    if kind is int:
        return f"a whole number from {1 if name in _POSITIVE else 0} to {MAX_COUNT}"
    if kind is float and name in _SHARES:
        return "a number from 0 to 1"
    if kind is float:
        return (("a number" if name in _MAY_BE_NEGATIVE else "a number >= 0")
                + (', or "inf"' if name in _MAY_BE_INFINITE else ""))
    return {str: "text", bool: "true or false"}.get(kind)


def _is_in_range(kind: Any, name: str, value: object) -> bool:
    if kind in (str, bool):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if (isinstance(value, int) and abs(value) > _MOST_WHOLE) or math.isnan(value):
        return False  # such a whole number is none that a float can be compared with
    if kind is int:
        return value == value // 1 and (name in _POSITIVE) <= value <= MAX_COUNT
    if name in _SHARES:
        return 0 <= value <= 1
    return ((value >= 0 or name in _MAY_BE_NEGATIVE)
            and (math.isfinite(value) or name in _MAY_BE_INFINITE))


def _of_chunks(controls: Controls) -> Iterator[Wrong]:
    """A decode pool that is to encode inputs, and is never left any."""
    if isinstance(controls, WaaControls) and controls.encode_chunk:
        for name in ("planned_active", "stock_tokens"):
            if not getattr(controls, name):
                yield f"controls.{name}", 0, "at least 1 where encode_chunk is not 0"


def _of_deployment(deployment: Deployment) -> Iterator[Wrong]:
    """Ranks that are named twice, phases that no pool or two of them work, and layers that are left
    out or held twice in a pool."""
    roles = sorted(pool.role for pool in deployment.pools)
    if roles not in (["both"], ["decode", "encode"]):
        yield ("deployment.pools", roles,
               "one pool of the role both, or one that encodes and one that decodes")
    ranks = [rank for pool in deployment.pools for stage in pool.stages for rank in stage.ranks]
    if sorted(ranks) != list(range(len(ranks))):
        yield "deployment.pools", ranks, "each rank from 0 on in one stage"
    for number, pool in enumerate(deployment.pools):
        for first, count in (("first_layer", "num_layers"),
                             ("first_encoder_layer", "num_encoder_layers")):
            expected = 0
            for index, stage in enumerate(pool.stages):
                if getattr(stage, count) and getattr(stage, first) != expected:
                    yield (f"deployment.pools[{number}].stages[{index}].{first}",
                           getattr(stage, first),
                           f"{expected}: a stage begins where the one before it ends")
                expected += getattr(stage, count)
