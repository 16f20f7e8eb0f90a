"""Forecasts of output lengths against brute force: first ones, new ones, classes, and learning."""

from dataclasses import replace

import numpy as np
import pytest
from problems import toy_problem

from xgpt.core.controls import Forecasting
from xgpt.core.problem import UNLIMITED, QueryLengths
from xrunner.rules.forecast import forecaster_of, known_outputs, with_forecasts

RNG = np.random.default_rng(7)
INPUTS = RNG.integers(1, 400, 600)
PAIRS = np.stack([INPUTS, np.clip(INPUTS // 4 + RNG.integers(1, 90, 600), 1, 180)], axis=1)
CAP = 256


def forecaster(kind, pairs=PAIRS, *, learns=False, **keys):
    return forecaster_of(toy_problem(pairs=pairs), Forecasting(kind=kind, **keys), learns=learns)


def queries_of(pairs, caps=CAP):
    return QueryLengths(inputs=pairs[:, 0], outputs=pairs[:, 1],
                        most_outputs=np.full(len(pairs), caps))


@pytest.mark.parametrize("bins", [1, 3, 8])
def test_a_new_forecast_is_the_mean_of_the_longer_known_outputs_of_like_inputs(bins):
    found = forecaster("distribution", bins=bins)
    own = found.bins_of(PAIRS[:, 0])
    for query in range(0, 600, 7):
        outputs = PAIRS[own == own[query], 1]
        for written in range(0, outputs.max(), 9):
            longer = outputs[outputs > written]
            assert found.beyond(INPUTS[query], written, CAP) == pytest.approx(
                longer.mean(), abs=0.5 + 1e-9)
        assert found.beyond(INPUTS[query], outputs.max(), CAP) == CAP
        assert found.beyond(INPUTS[query], 199, 200) == 200


def test_a_new_forecast_is_above_what_is_written_and_at_most_the_cap():
    found = forecaster("mean", bins=5)
    for tokens in (1, 120, 399, 5000):
        for written in range(CAP):
            assert written < found.beyond(tokens, written, CAP) <= CAP


def test_ranges_of_inputs_have_about_equally_many_requests():
    known = known_outputs(toy_problem(pairs=PAIRS).lengths, 8, True)
    assert known.counts.sum(axis=1) == pytest.approx(75, abs=6)
    same = np.array([[12, n] for n in range(1, 20)])
    assert len(known_outputs(toy_problem(pairs=same).lengths, 8, True).counts) == 1


def test_independent_lengths_have_one_range_with_the_means_of_their_distribution():
    problem = toy_problem()
    found, lengths = forecaster_of(problem, Forecasting(kind="distribution")), problem.lengths
    assert len(found.beyond_table) == 1
    for written in range(lengths.outputs.max):
        pmf = lengths.outputs.pmf[written:]
        expected = pmf @ np.arange(written + 1, lengths.outputs.max + 1) / pmf.sum()
        assert found.beyond(33, written, CAP) == pytest.approx(expected, abs=0.5 + 1e-9)


def test_the_table_and_the_ranges_are_those_of_single_forecasts():
    found = forecaster("mean", bins=4)
    table, rows = found.beyond_table, found.bins_of(INPUTS)
    for query in range(0, 600, 11):
        for written in (0, 50, table.shape[1] - 1):
            assert min(table[rows[query], written], CAP) == found.beyond(
                INPUTS[query], written, CAP)
    assert (table[:, -1] == UNLIMITED).all()


@pytest.mark.parametrize("use", ["least", "expected", "most"])
@pytest.mark.parametrize(("kind", "keys"), [
    ("cap", {}), ("distribution", {}), ("mean", {}), ("class", {"width": 30}), ("column", {})])
def test_first_forecasts_are_those_made_of_the_whole_job_at_once(kind, keys, use):
    found = forecaster(kind, use=use, **keys)
    queries = queries_of(PAIRS, 70)
    at_once = found.forecasts(queries, seed=0)
    assert at_once.shape == (600, 3) and at_once.min() >= 1 and at_once.max() <= 70
    assert (np.diff(at_once, axis=1) >= 0).all()
    assert [found.first(tokens, 70) for tokens in INPUTS] == at_once[:, found.value].tolist()


def test_each_kind_of_forecast():
    queries, mean = queries_of(PAIRS), PAIRS[:, 1].mean()
    for kind, row in (("cap", (CAP, CAP, CAP)), ("distribution", (1, round(mean), CAP)),
                      ("mean", (round(mean),) * 3)):
        assert forecaster(kind, bins=1).forecasts(queries, seed=0)[5].tolist() == list(row)
    known = forecaster("known").forecasts(queries, seed=0)
    assert (known == PAIRS[:, 1, None]).all()
    classes = (PAIRS[:, 1] - 1) // 30
    most = np.bincount(classes).argmax()
    assert forecaster("class", bins=1, width=30).forecasts(queries, seed=0)[5].tolist() == [
        30 * most + 1, 30 * most + 15, 30 * most + 30]


@pytest.mark.parametrize("accuracy", [0.5, 0.749, 1.0])
def test_a_simulated_class_is_right_as_often_as_stated_and_else_a_neighbour(accuracy):
    many = np.concatenate([PAIRS] * 20)
    many[:, 1] = np.random.default_rng(1).integers(1, CAP + 1, len(many))
    found = forecaster("class", width=20, accuracy=accuracy).forecasts(queries_of(many), seed=3)
    least, middle, most = found.T
    away = (least - 1) // 20 - (many[:, 1] - 1) // 20
    assert (np.abs(away) <= 1).all() and (least % 20 == 1).all()
    assert ((most == least + 19) | (most == CAP)).all() and (middle <= most).all()
    right = away == 0
    assert ((least <= many[:, 1]) & (many[:, 1] <= most) == right).all()
    assert right.mean() == pytest.approx(accuracy, abs=0.012)
    again = forecaster("class", width=20, accuracy=accuracy).forecasts(queries_of(many), seed=3)
    assert (again == found).all()


def test_of_a_single_class_all_are_right():
    found = forecaster("class", width=CAP, accuracy=0.1).forecasts(queries_of(PAIRS), seed=0)
    assert (found == [1, CAP // 2, CAP]).all()


@pytest.mark.parametrize(("kind", "keys"), [("mean", {}), ("class", {"width": 25})])
def test_what_is_learned_of_a_job_is_what_a_job_of_these_lengths_begins_with(kind, keys):
    problem = replace(toy_problem(pairs=PAIRS), observes=True)  # outputs are caps until then
    asked = Forecasting(kind=kind, bins=4, **keys)
    learning = forecaster_of(problem, asked, learns=True)
    assert learning.first(100, CAP) == CAP == learning.beyond(100, 3, CAP)
    for tokens, written in PAIRS.tolist():
        learning.ended(tokens, written)
        learning.first(tokens, CAP)
    ended = forecaster_of(replace(problem, learned=toy_problem(pairs=PAIRS).lengths), asked)
    for tokens in range(1, 500, 9):
        assert learning.first(tokens, CAP) == ended.first(tokens, CAP)
        for written in (0, 33, 170, 200):
            assert learning.beyond(tokens, written, CAP) == ended.beyond(tokens, written, CAP)


def test_nothing_is_learned_by_a_forecaster_that_does_not_learn():
    problem = replace(toy_problem(pairs=PAIRS), observes=True)
    for asked, learns in ((Forecasting(kind="mean"), False), (Forecasting(kind="cap"), True)):
        found = forecaster_of(problem, asked, learns=learns)
        found.ended(10, 20)
        assert found.first(10, CAP) == CAP


def test_a_job_that_is_forecast_at_its_caps_has_no_forecasts_and_given_ones_stay():
    problem, queries = toy_problem(pairs=PAIRS), queries_of(PAIRS)
    assert with_forecasts(queries, problem, Forecasting()).forecasts is None
    given = replace(queries, forecasts=np.ones((600, 3), np.int64))
    assert with_forecasts(given, problem, Forecasting(kind="mean")) is given
    assert with_forecasts(queries, problem, Forecasting(kind="known")).forecasts is not None
