"""Units at the edges: inside xgpt are only seconds, bytes, FLOPs, tokens and rates per second. And
the number types by which pydantic checks a schedule's file."""

import math
import re
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

KIB, MIB, GIB = 2**10, 2**20, 2**30
_BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
               "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40}
_SECOND_UNITS = {"US": 1e-6, "MS": 1e-3, "S": 1.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
_WRITTEN_OUT = {"SEC": "S", "SECOND": "S", "MINUTE": "MIN", "HR": "H", "HOUR": "H", "DAY": "D"}
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6}
_COUNT = re.compile(r"\s*([0-9]{1,400}(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKM]?)\s*", re.ASCII)
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8 = "int8"
FP8 = "fp8"  # E4M3, for weights alone or both operands; planned for, not executed
EIGHT_BITS = (FP8, INT8)
WEIGHT_BYTES = {**DTYPE_BYTES, INT8: 1, FP8: 1}  # per element, without scales
LOGIT_BYTES = 4  # logits are float32 whatever the model's dtype


def activation_item_bytes(weight_dtype: str, dtype: str, *, is_cpu: bool) -> int:
    """Bytes of an activation in a run of `dtype` with weights of `weight_dtype`. Our runner on a
    CPU multiplies int8 weights by float32; on GPUs activations stay `dtype`, and are narrowed for
    each product."""
    if is_cpu and weight_dtype == INT8:
        return DTYPE_BYTES["float32"]
    return DTYPE_BYTES.get(weight_dtype, DTYPE_BYTES[dtype])


def parse_bytes(text: str | int | float) -> int:
    """`"48 GiB"` -> 51539607552; a bare number is bytes. Raises ValueError."""
    return int(_parse(text, _BYTE_UNITS, "bytes", default="B"))


def parse_seconds(text: str | int | float) -> float:
    """`"90 s"`, `"2 hours"`, `"1 h 30 min"`, `"inf"` -> seconds; a bare number is seconds. Raises
    ValueError."""
    if isinstance(text, str) and text.strip().lower() in ("inf", ".inf", "infinity"):
        return math.inf
    return _parse(text, _SECOND_UNITS, "seconds", default="S")


def parse_count(value: Any) -> Any:
    """The number of `"256"`, `"3e6"`, `"1.2k"` or `"3M"`, whole where it is; what is no text, but a
    whole float, is returned unchanged. Raises ValueError, without words."""
    if not isinstance(value, str):
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if (match := _COUNT.fullmatch(value)) is None:
        raise ValueError
    exact = Decimal(match[1]) * _COUNT_UNITS[match[2]]
    return int(exact) if exact == exact.to_integral_value() else float(exact)


def parse_share(text: str | int | float) -> float:
    """`"15%"` -> 0.15; a bare number is the share itself. Raises ValueError."""
    if isinstance(text, str) and text.strip().endswith("%"):
        return float(text.strip()[:-1]) / 100
    return float(text)


def _parse(text: str | int | float, units: dict[str, int] | dict[str, float], what: str,
           default: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    parts = [(number, _unit(name) or default) for number, name in _NUMBER.findall(str(text))]
    is_sum = all(one in units and other in units and units[one] > units[other]
                 for (_, one), (_, other) in pairwise(parts))  # 1 h 30 min, not 30 min 1 h
    if _NUMBER.sub("", str(text)) or not parts or not is_sum or parts[0][1] not in units:
        raise ValueError(f"{text!r} is not an amount of {what}; units: {', '.join(units)}")
    return math.fsum(float(number) * units[unit] for number, unit in parts)


def _unit(name: str) -> str:
    """`"seconds"`, `"sec"` and `"s"` -> `"S"`."""
    upper = name.upper()
    return _WRITTEN_OUT.get(upper) or _WRITTEN_OUT.get(upper.removesuffix("S"), upper)


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def seconds_up(seconds: float) -> str:
    """0.0064481 -> '0.006449': four digits, rounded up, so that the figure can be used as a limit;
    inf -> 'inf'."""
    if not 0 < seconds < math.inf:
        return f"{seconds:g}"
    digits = 3 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def time_up(seconds: float) -> str:
    """6000.1 -> '1 h 41 min': as `format_seconds`, never less than `seconds`, so that it works as a
    limit itself."""
    if not 120 <= seconds < math.inf:
        return f"{seconds_up(seconds)} s"
    unit_s = 60 if seconds > 3600 - 60 else 1
    return format_seconds(unit_s * math.ceil(seconds / unit_s))


def format_seconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms'; 7261 -> '2 h 1 min'; inf -> 'inf'."""
    if math.isinf(seconds):
        return "inf"
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        whole, part = (f"{hours} h", minutes) if hours else (f"{minutes} min", rest)
        return f"{whole} {part} {'min' if hours else 's'}" if part else whole
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


MAX_COUNT = 2**53  # JSON's other readers hold no larger whole number exactly


def _infinity(value: Any) -> Any:
    """The value of the text "inf", which stands for infinity in JSON; other values as they are."""
    return math.inf if value == "inf" else value


Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Unbounded = Annotated[float, BeforeValidator(_infinity), Field(strict=True, ge=0)]
Gap = Annotated[float, BeforeValidator(_infinity), Field(strict=True, ge=-1e18)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
