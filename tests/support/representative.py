"""Which cases of an exhaustive test run always, and which with `-m slow` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], is_always: Callable[[Any], bool]) -> list[Any]:
    """The cases, as parameters; those that do not run always are slow."""
    def own(case: Any) -> Any:
        return case if isinstance(case, tuple) else (case,)

    return [pytest.param(*own(case), marks=() if is_always(case) else pytest.mark.slow)
            for case in cases]
