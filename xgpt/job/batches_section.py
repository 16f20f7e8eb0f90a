"""The keys `schedule.batches` and `schedule.system`: how static batches are formed."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from xgpt.core.controls import Batches, StaticControls
from xgpt.core.policies import policies
from xgpt.core.systems import STATIC, system, system_names
from xgpt.job.typed import CONFIG, Flag, Reading, choice, is_one_of, number, that, whole

_MOST = 1_000_000  # chosen, as of other numbers of requests
_LARGEST = 1e18
_Weight = Annotated[float, number("a weight, a number >= 0", ge=0)]


@dataclass(frozen=True, kw_only=True)
class BatchesSection:
    """Keys of `schedule.batches`."""

    __pydantic_config__ = CONFIG
    most: Annotated[int, whole(1, _MOST)] = 10
    threshold: Annotated[Any, that(
        lambda value: value in ("auto", "none") or (
            is_one_of(value, int, float) and 0 < value <= _LARGEST),
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
FIELDS = (("batches", BatchesSection | None, None),
          ("system", Annotated[str | None, choice(system_names)], None))


def batches_of(reading: Reading, own: Any) -> Batches | None:
    """How the section `schedule`, read as `own`, has static batches formed; None: in the input's
    order."""
    if own.batches is None and own.system is None:
        return None
    if own.batches is not None and own.system is not None:
        reading.reject("schedule.batches", f"not beside system: {own.system}, which sets them")
    if own.system is None:
        static = [row.name for row in policies() if row.load("controls") is StaticControls]
        if not own.policies or {*own.policies} - {*static}:
            reading.reject("schedule.policy", f"{' or '.join(static)}, beside batches")
        if own.batches.deadline == own.batches.length == 0:
            reading.reject("schedule.batches", "a weight above 0 for deadline or length")
        return Batches(**vars(own.batches))
    if own.policies not in ((), (STATIC,)):
        reading.reject("schedule.policy", f"{STATIC}, or none, beside system, which sets it")
    return system(own.system).settings
