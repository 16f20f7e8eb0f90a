"""The keys `schedule.batches` and `schedule.system`: how static batches are formed."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from xgpt.core.controls import Batches, StaticControls
from xgpt.core.policies import policies
from xgpt.core.systems import STATIC, SYSTEMS
from xgpt.job.typed import CONFIG, Flag, Reading, choice, is_one_of, number, that, whole

_LARGEST = 1_000_000  # chosen, as of other numbers of requests
_Weight = Annotated[float, number("a weight, a number >= 0", ge=0)]


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """Keys of `schedule.batches`."""

    __pydantic_config__ = CONFIG
    most: Annotated[int, whole(1, _LARGEST)] = 10
    threshold: Annotated[Any, that(
        lambda value: value in ("auto", "none") or (is_one_of(value, int, float) and value > 0),
        "auto, none, or a cost > 0",
        lambda value: None if value == "auto" else float(math.inf if value == "none" else value),
        )] = None
    deadline: _Weight = 0.0
    length: _Weight = 1.0
    growth: Flag = True
    pack: Annotated[Any, that(
        lambda value: value == "none" or (is_one_of(value, int) and 1 <= value <= _LARGEST),
        "none, or a whole number of output tokens >= 1",
        lambda value: None if value == "none" else value)] = None


# fields of the section `schedule`
FIELDS = (("batches", _Batches | None, None),
          ("system", Annotated[str | None, choice(tuple(SYSTEMS))], None))


def batches_of(reading: Reading, own: Any) -> Batches | None:
    """How the section `schedule`, read as `own`, has static batches formed; None: in the input's
    order."""
    if own.system is not None:
        if own.batches is not None:
            reading.reject("schedule.batches", f"not beside system: {own.system}, which sets them")
        if own.policies not in ((), (STATIC,)):
            reading.reject("schedule.policy", f"{STATIC}, or none, beside system, which sets it")
        return SYSTEMS[own.system].settings
    if own.batches is None:
        return None
    static = [row.name for row in policies() if row.load("controls") is StaticControls]
    if not own.policies or {*own.policies} - {*static}:
        reading.reject("schedule.policy", f"{' or '.join(static)}, beside batches")
    if own.batches.deadline == own.batches.length == 0:
        reading.reject("schedule.batches", "a weight above 0 for deadline or length")
    return Batches(**vars(own.batches))
