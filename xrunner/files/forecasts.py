"""Forecasts that requests bring with them, and those that a run began with, which its folder keeps.

    `forecasts.npz`   `asked`: the kind of forecast, as JSON. `forecasts`: [queries, 3] of each
                      query of the spool, unless they are learned while it runs. `edges`, `counts`:
                      known outputs (xrunner.rules.forecast), from which others are made.

A run that is continued goes on by them, as long as the job asks for the same kind."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from xgpt.core.controls import CAP, COLUMN, FORECAST_VALUES, FORECASTS_GROUP, Forecasting
from xgpt.core.engines import load_row, rows_of_others
from xgpt.core.errors import XgptError, shorten
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.system.whole_file import temporary_of
from xgpt.job.job_lengths import finished_lengths
from xgpt.requests.request import Request
from xrunner.rules.forecast import (
    Forecast,
    KnownOutputs,
    LengthForecaster,
    forecaster_of,
    with_forecasts,
)

FORECASTS_FILE = "forecasts.npz"
GivenForecast = Callable[[Request, int], Forecast]  # of a request with so many input tokens


def given_forecast(kind: str) -> GivenForecast:
    """Reads or asks for the forecast of a request, by its column or by the entry point `kind`."""
    if kind == COLUMN:
        return lambda request, tokens: 3 * (request.forecast_tokens or 0,)
    function = load_row(rows_of_others(FORECASTS_GROUP)[kind])

    def forecast(request: Request, tokens: int) -> Forecast:
        found = function(tokens, request.text or "")
        values = 3 * (found,) if isinstance(found, int) else tuple(found)
        if len(values) != 3 or list(values) != sorted(map(int, values)) or values[0] < 1:
            raise XgptError(f"{FORECASTS_GROUP} {kind}: {shorten(found)} is no forecast: it has to "
                            "be output tokens, or (least, expected, most), whole numbers >= 1")
        return values

    return forecast


class KeptForecasts(NamedTuple):
    """The forecasts that a run began with: [queries, 3], none if they are learned while it runs."""

    forecasting: Forecasting
    forecasts: IntArray
    known: KnownOutputs

    @property
    def admitted(self) -> IntArray | None:
        """The tokens of each query's forecast that admission reads, [queries]; None if they are
        learned."""
        return None if self.forecasting.is_learned else self.forecasts[
            :, FORECAST_VALUES.index(self.forecasting.use)].copy()

    def forecaster(self, results: Path | None = None) -> LengthForecaster:
        """A new forecaster, which learns from requests that end, and first from those in
        `results`, results.jsonl of the run so far."""
        own = LengthForecaster(self.forecasting, self.known, learns=True)
        for pair in finished_lengths(results) if results and own.learns else ():
            own.ended(*pair)
        return own


def load_forecasts(output: Path) -> KeptForecasts | None:
    """The forecasts of the run in a folder; None for one that forecasts each request at its cap."""
    try:
        with (output / FORECASTS_FILE).open("rb") as file, np.load(file) as kept:
            return KeptForecasts(Forecasting(**json.loads(str(kept["asked"]))), kept["forecasts"],
                                 KnownOutputs(kept["edges"], kept["counts"]))
    except (OSError, ValueError, EOFError, LookupError, TypeError, BadZipFile):
        return None  # none, or torn by a power cut: the run goes on by new ones


def keep_forecasts(output: Path, problem: Problem, queries: QueryLengths, rows: IntArray, *,
                   is_continued: bool) -> str:
    """Keeps the forecasts that a run begins with, unless it goes on by those in its folder. Returns
    a note for the user, or "". `queries`: all requests of the job. `rows`: those of the run."""
    before, asked = load_forecasts(output), problem.adjustment.admission.forecast
    if is_continued and before is not None and before.forecasting == asked and (
            asked.is_learned or len(before.forecasts) == len(rows)):
        return ""
    path = output / FORECASTS_FILE
    path.unlink(missing_ok=True)
    if asked.kind == CAP:
        return ""
    known, found = forecaster_of(problem, asked).known, with_forecasts(queries, problem, asked)
    assert found.forecasts is not None, f"{asked = }"
    with temporary_of(path).open("wb") as file:
        np.savez(file, asked=json.dumps(asdict(asked)), **known._asdict(),
                 forecasts=found.forecasts[rows[:0] if asked.is_learned else rows])
    temporary_of(path).replace(path)
    return "" if known.counts.any() or not asked.is_learned else (
        f"note: no lengths are known to forecast {asked.kind} from: requests begin at their caps, "
        "until some have finished")
