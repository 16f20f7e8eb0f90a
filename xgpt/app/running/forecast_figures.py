"""Figures on the forecasts of a run: how many came true."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xgpt.core.controls import CLASS, FORECAST_VALUES
from xgpt.report.output import QueryColumns
from xgpt.requests.spool import Spool
from xrunner.files.forecasts import load_forecasts

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
    own, has_answer, rows = kept.forecasting, outputs > 0, kept.forecasts[:len(outputs)]
    if own.is_learned:  # each from the requests that had ended before it began
        inputs, caps = queries.counts("input_tokens").tolist(), Spool(output).most_outputs.tolist()
        starts_s = queries.times("encode_start_s")[:MOST_JUDGED]
        ends_s = starts_s + queries.times("latency_s")[:MOST_JUDGED]
        forecaster, rows = kept.forecaster(), np.zeros((len(outputs), 3), np.int64)
        ended = np.argsort(ends_s, kind="stable").tolist()
        for query in np.argsort(starts_s, kind="stable").tolist():
            while ended and ends_s[ended[0]] <= starts_s[query]:
                first = ended.pop(0)
                forecaster.ended(inputs[first], int(outputs[first]))
            rows[query] = forecaster.forecast(inputs[query], caps[query])
    (least, expected, most), came = rows[has_answer].T, outputs[has_answer]
    admitted = rows[has_answer, FORECAST_VALUES.index(own.use)]
    return ForecastFigures(
        kind=own.kind, coverage=float(np.mean((least <= came) & (came <= most))),
        outgrown=float(np.mean(came > admitted)),
        mean_error_tokens=float(np.abs(came - expected).mean()))
