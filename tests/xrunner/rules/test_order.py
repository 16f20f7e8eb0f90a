"""The order in which requests are run, and the file that a resume goes by."""

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.controls import ORDERS, Adjustment
from xgpt.core.errors import XgptError
from xgpt.core.problem import QueryLengths
from xrunner.files.order_file import ORDER_FILE, save_order, saved_order
from xrunner.rules.order import LEAST_SHUFFLED, WINDOW, run_order, window_of


def lengths_of(inputs, **given) -> QueryLengths:
    inputs = np.array(inputs, np.int64)
    return QueryLengths(inputs=inputs, **{"most_outputs": inputs * 0 + 9, **given})


KEYS = {"shortest-input": lambda own: own.inputs, "longest-input": lambda own: -own.inputs,
        "shortest-output": lambda own: own.forecasts[:, 1],
        "longest-output": lambda own: -own.forecasts[:, 1],
        "deadline": lambda own: own.deadlines_s, "input": lambda own: 0 * own.inputs}


ROWS = st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1.0, 2.0, np.inf]))


@given(st.lists(ROWS, max_size=60), st.integers(0, 70), st.integers(0, 2**63 - 1),
       st.sampled_from(ORDERS))
def test_each_request_is_run_once_within_its_window_and_equals_keep_their_order(
        rows, window, seed, name):
    inputs, outputs, deadlines_s = np.array(rows).reshape(-1, 3).T
    own = lengths_of(inputs, forecasts=np.stack([inputs, outputs, outputs + 1], axis=1),
                     deadlines_s=deadlines_s)
    order = run_order(name, window, own, seed).tolist()
    size = window or max(len(rows), 1)
    assert sorted(order) == list(range(len(rows)))
    assert all(place // size == at // size for at, place in enumerate(order))
    if name in KEYS:
        key = KEYS[name](own)
        assert all(a // size < b // size or (key[a], a) < (key[b], b)
                   for a, b in zip(order, order[1:], strict=False))


def test_random_order_is_that_of_the_seed():
    own, source = lengths_of([3] * 130), random.Random(7)
    windows = [list(range(0, 50)), list(range(50, 100)), list(range(100, 130))]
    for part in windows:
        source.shuffle(part)
    assert run_order("random", 50, own, 7).tolist() == [*chain(*windows)]


def test_outputs_are_forecasts_or_known_or_the_most():
    own = lengths_of([5, 5, 5], most_outputs=np.array([1, 3, 2]))
    assert run_order("longest-output", 0, own, 0).tolist() == [1, 2, 0]
    known = lengths_of([5, 5, 5], outputs=np.array([2, 1, 3]))
    assert run_order("longest-output", 0, known, 0).tolist() == [2, 0, 1]
    assert run_order("shortest-output", 2, known, 0).tolist() == [1, 0, 2]


def test_without_deadlines_the_order_is_the_inputs():
    assert run_order("deadline", 0, lengths_of([3, 1, 2]), 0).tolist() == [0, 1, 2]


def test_usual_windows():
    assert window_of(Adjustment(order="longest-output"), 20) == WINDOW
    assert window_of(Adjustment(order="random"), 20) == 320
    assert window_of(Adjustment(order="random"), 1) == LEAST_SHUFFLED
    assert window_of(Adjustment(order="random", window=7), 20) == 7
    assert window_of(Adjustment(order="shortest-input", window=0), 20) == 0


def test_an_order_is_read_as_it_was_saved(tmp_path):
    order = np.random.default_rng(0).permutation(200_000)
    save_order(tmp_path, order)
    assert list(saved_order(tmp_path, len(order))) == order.tolist()
    assert np.load(tmp_path / ORDER_FILE).dtype == np.dtype("<i8")
    save_order(tmp_path, np.arange(5))
    assert not (tmp_path / ORDER_FILE).exists() and list(saved_order(tmp_path, 5)) == [*range(5)]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, -3], [0, 1, 2**40], [0, 1, 2, 3]])
def test_a_damaged_order_loses_no_request(tmp_path, order):
    np.save(tmp_path / ORDER_FILE, np.array(order))
    with pytest.raises(XgptError, match=r"each of the 3 requests once: remove it"):
        saved_order(tmp_path, 3)
    (tmp_path / ORDER_FILE).write_bytes(b"torn")
    with pytest.raises(XgptError, match="remove it"):
        saved_order(tmp_path, 3)
