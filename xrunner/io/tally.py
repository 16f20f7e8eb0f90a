"""Times and tokens of the queries that a run has answered."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrunner.query import FinishedQuery

# figures of one query, of which a run's percentiles are told
TIMES = ("latency", "ttft", "tpot")


class Tally:
    """A column a figure: ten million queries take 320 MB."""

    def __init__(self) -> None:
        self._output_tokens = array("q")
        self._times = {name: array("d") for name in TIMES}

    def add(self, result: FinishedQuery) -> None:
        self._output_tokens.append(len(result.output_ids))
        for name, value in zip(TIMES, (result.latency_s, result.ttft_s, result.tpot_s),
                               strict=True):
            if value is not None:
                self._times[name].append(value)

    def __len__(self) -> int:
        return len(self._output_tokens)

    @property
    def output_tokens(self) -> int:
        return sum(self._output_tokens)

    def percentiles(self) -> dict[str, float | None]:
        return percentiles_of(self._times)


def percentiles_of(times: dict[str, Any]) -> dict[str, float | None]:
    """P50 and P99 of each of TIMES as keys of metrics.json; None of what was never measured."""
    def pair(values: Sequence[float]) -> Sequence[float | None]:
        return np.quantile(values, (0.5, 0.99)).tolist() if len(values) else (None, None)

    return {f"{name}_{label}_s": value for name in TIMES
            for label, value in zip(("p50", "p99"), pair(times[name]), strict=True)}
