"""Times at which requests arrive, as lines and traces have them: numbers of seconds, or dates."""

import math
from contextlib import suppress
from datetime import UTC, datetime

WORDS = "a number of seconds, or a date and time such as '2023-11-16 18:17:03.97'"


def arrival_of(value: object) -> float | None:
    """Seconds of a time of arrival (of a date those since 1970; one without a zone is in UTC); None
    if `value` is none."""
    if isinstance(value, str):
        with suppress(ValueError):
            return arrival_of(float(value))
        with suppress(ValueError):
            found = datetime.fromisoformat(value.strip())
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    return None
