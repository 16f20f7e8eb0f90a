"""Figures on the forecasts of a run: how many came true."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xgpt.core.controls import CLASS, FORECAST_VALUES
from xgpt.core.lengths import IntArray
from xgpt.report.output import QueryColumns
from xgpt.requests.spool import Spool
from xrunner.files.forecasts import KeptForecasts, load_forecasts

MOST_JUDGED = 100_000  # chosen: first requests that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFigures:
    """Forecasts against the outputs that came. Shares of the requests: `coverage`, which ended
    within least and most (of classes: the right ones); `outgrown`, which wrote more than admission
    counted with. `mean_error_tokens`: of the expected output."""

    kind: str
    coverage: float
    outgrown: float
    mean_error_tokens: float

    @property
    def sentence(self) -> str:
        """The figures in one sentence."""
        right = "of the classes were right" if self.kind == CLASS else "of the outputs were within"
        return (f"forecasts ({self.kind}): {self.coverage:.0%} {right}, {self.outgrown:.0%} of the "
                f"requests wrote more, the mean error was {self.mean_error_tokens:.0f} tokens")


def forecast_figures(output: Path, queries: QueryColumns) -> ForecastFigures | None:
    """Figures on the forecasts of the run in a folder, whose results are `queries`; None for a run
    that forecast each request at its cap, or has no answer."""
    kept, outputs = load_forecasts(output), queries.counts("output_tokens")[:MOST_JUDGED]
    if kept is None or not outputs.any():
        return None
    rows = _as_made(output, kept, queries) if kept.forecasting.is_learned else (
        kept.forecasts[:len(outputs)])
    has_answer = outputs > 0
    (least, expected, most), came = rows[has_answer].T, outputs[has_answer]
    admitted = rows[has_answer, FORECAST_VALUES.index(kept.forecasting.use)]
    return ForecastFigures(
        kind=kept.forecasting.kind, coverage=float(np.mean((least <= came) & (came <= most))),
        outgrown=float(np.mean(came > admitted)),
        mean_error_tokens=float(np.abs(came - expected).mean()))


def _as_made(output: Path, kept: KeptForecasts, queries: QueryColumns) -> IntArray:
    """Forecasts that were learned from the requests that had ended before each began, [queries,
    3]."""
    inputs, outputs = (queries.counts(name)[:MOST_JUDGED].tolist() for name in (
        "input_tokens", "output_tokens"))
    starts_s = queries.times("encode_start_s")[:MOST_JUDGED]
    ends_s = starts_s + queries.times("latency_s")[:MOST_JUDGED]
    own, caps = kept.forecaster(), Spool(output).most_outputs.tolist()
    ended, rows = np.argsort(ends_s, kind="stable").tolist(), np.zeros((len(inputs), 3), np.int64)
    for query in np.argsort(starts_s, kind="stable").tolist():
        while ended and ends_s[ended[0]] <= starts_s[query]:
            own.ended(inputs[ended[0]], outputs[ended.pop(0)])
        rows[query] = own.forecast(inputs[query], caps[query])
    return rows
