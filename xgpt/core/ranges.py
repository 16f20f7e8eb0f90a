"""What the numbers of a schedule may be, for pydantic to check its file by. What a search writes
passes; what somebody's editor or script made of it would otherwise end in a traceback, or run as
something else than it says."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import core_schema

from xgpt.core.policies import policies

MAX_COUNT = 2**53  # JSON's other readers hold no larger whole number exactly


def _infinity(value: Any) -> Any:
    """JSON has none: it stands as the text "inf"."""
    return math.inf if value == "inf" else value


Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Unbounded = Annotated[float, BeforeValidator(_infinity), Field(strict=True, ge=0)]
Gap = Annotated[float, BeforeValidator(_infinity), Field(strict=True, ge=-1e18)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]


class ByPolicy:
    """Controls of the class that the row of their policy names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.tagged_union_schema(
            {row.name: handler.generate_schema(row.load("controls")) for row in policies()},
            "policy")
