"""Times at which requests arrive, as lines and traces have them: numbers of seconds, or dates."""

import math
from datetime import UTC, datetime

WORDS = "a number of seconds, or a date and time such as '2023-11-16 18:17:03.97'"


def arrival_of(value: object) -> float | None:
    """Seconds of a time of arrival (of a date those since 1970; one without a zone is in UTC); None
    if `value` is none."""
    if type(value) in (int, float):
        return float(value) if math.isfinite(value) else None  # type: ignore[arg-type]
    if not isinstance(value, str):
        return None
    text = value.strip()
    try:
        return arrival_of(float(text))
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
