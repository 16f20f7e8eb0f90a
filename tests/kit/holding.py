# owner tb
"""Rules that queries wait in."""

from __future__ import annotations

from typing import Any


def holding(rule: Any, count: int, *sizes: int) -> Any:
    """The rule, once it has taken queries 0, 1 and so on of these sizes."""
    for query in range(count):
        assert rule.submit(query, *sizes) is not False
    return rule
