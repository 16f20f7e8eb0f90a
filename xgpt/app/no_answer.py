"""A job that is done, and none of whose queries has an answer: that is no success, however often it
is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError, shorten
from xgpt.requests.choices import parts


def refuse_no_answer(results: Path, facts: Mapping[str, Any]) -> None:
    """Raises XgptError, which carries the `facts` of the run, where every line of its results has
    an error in the place of an answer. Reads no further than to the first answer."""
    count, first = 0, ""
    with results.open(encoding="utf-8") as file:
        for line in file:
            for row in parts(json.loads(line)):
                if not (error := row.get("error")):
                    return
                count += 1
                first = first or str(error.get("message") if isinstance(error, dict) else error)
    if count:
        nothing = XgptError(f"none of the {count} queries has an answer (the `error` of each is in "
                            f"its result); the first: {shorten(first, 200)}")
        nothing.details = facts
        raise nothing
