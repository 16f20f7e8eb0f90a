"""The forecasts that a run began with: kept in its folder, and read again by the next command."""

from dataclasses import replace

import numpy as np
import pytest
from problems import toy_problem

from xgpt.core.controls import Admission, Forecasting
from xgpt.core.problem import QueryLengths
from xrunner.files.forecasts import FORECASTS_FILE, keep_forecasts, load_forecasts

PAIRS = np.stack([np.arange(1, 41), np.arange(40, 0, -1)], axis=1)
ROWS = np.array([3, 4, 9])


def keep(folder, forecast, *, is_continued=False, pairs=PAIRS, **keys):
    problem = toy_problem(pairs=pairs)
    problem = replace(problem, **keys, adjustment=replace(problem.adjustment, admission=Admission(
        forecast=forecast)))
    queries = QueryLengths(inputs=PAIRS[:, 0], outputs=PAIRS[:, 1],
                           most_outputs=np.full(40, 64))
    return keep_forecasts(folder, problem, queries, ROWS, is_continued=is_continued)


def test_forecasts_of_the_requests_that_run_are_kept(tmp_path):
    asked = Forecasting(kind="class", width=8, accuracy=1, use="least")
    assert keep(tmp_path, asked) == ""
    kept = load_forecasts(tmp_path)
    assert kept.forecasting == asked
    assert kept.forecasts.tolist() == [[33, 36, 40], [33, 36, 40], [25, 28, 32]]
    assert kept.admitted.tolist() == [33, 33, 25]
    assert kept.forecaster().beyond(1, 39, 64) == 40


def test_a_continued_run_goes_on_by_what_it_began_with_while_the_kind_is_the_same(tmp_path):
    asked = Forecasting(kind="mean", bins=1)
    keep(tmp_path, asked)
    before = (tmp_path / FORECASTS_FILE).read_bytes()
    keep(tmp_path, asked, is_continued=True, pairs=PAIRS[:5])
    assert (tmp_path / FORECASTS_FILE).read_bytes() == before
    keep(tmp_path, Forecasting(kind="mean", bins=2), is_continued=True)
    assert load_forecasts(tmp_path).forecasting.bins == 2
    keep(tmp_path, asked, pairs=PAIRS[:5])  # another run
    assert load_forecasts(tmp_path).known.counts.sum() == 5
    keep(tmp_path, Forecasting(), is_continued=True)
    assert load_forecasts(tmp_path) is None


def test_what_the_run_has_finished_counts_when_it_goes_on(tmp_path):
    asked = Forecasting(kind="mean", bins=1)
    assert "requests begin at their caps" in keep(tmp_path, asked, observes=True)
    kept, results = load_forecasts(tmp_path), tmp_path / "results.jsonl"
    assert kept.admitted is None and kept.forecaster(results).first(5, 64) == 64
    results.write_text('{"input_tokens": 3, "output_tokens": 12}\n')
    assert kept.forecaster(results).first(5, 64) == 12


@pytest.mark.parametrize("torn", [b"", b"PK\x03\x04torn"])
def test_a_torn_file_is_made_again(tmp_path, torn):
    (tmp_path / FORECASTS_FILE).write_bytes(torn)
    assert load_forecasts(tmp_path) is None
    keep(tmp_path, Forecasting(kind="known"), is_continued=True)
    assert load_forecasts(tmp_path).admitted.tolist() == [37, 36, 31]
