"""Times that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from xprofiler.timing import Operator, TimingSource


class Refusing:
    """A source that refuses steps of more rows, as a profile those far beyond what it measured."""

    def __init__(self, source: TimingSource, most_rows: float) -> None:
        self._source, self._most_rows = source, most_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def operator_s(self, operator: Operator, x: Any, y: Any = 0.0, *, tp_degree: int = 1) -> Any:
        seconds = self._source.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.where(np.asarray(x) > self._most_rows, np.inf, seconds)
