"""Which cases of an exhaustive test run always, and which with `-m slow` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def some(cases: Iterable[Any], is_always: Callable[[Any], bool]) -> list[Any]:
    """The cases, as parameters; those that do not run always are slow."""
    def own(case: Any) -> Any:
        return case if isinstance(case, tuple) else (case,)

    return [pytest.param(*own(case), marks=() if is_always(case) else pytest.mark.slow)
            for case in cases]


def one_in(count: int, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of each test's cases the first and every `count`-th after it: always the same."""
    seen, kept = Counter[str](), []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % count == 0:
            kept.append(item)
        seen[test] += 1
    return kept
