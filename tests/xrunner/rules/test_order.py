"""The order in which requests are run, and the file that a resume goes by."""

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.controls import ORDERS, Adjustment
from xgpt.core.errors import XgptError
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import QueryLengths
from xrunner.files.order_file import ORDER_FILE, save_order, saved_order
from xrunner.rules.order import (
    LEAST_SHARED,
    LEAST_SHUFFLED,
    WINDOW,
    run_order,
    saved_tokens,
    shared_window,
    window_of,
)


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


def forest(parents, ends, nodes) -> Prefixes:
    return Prefixes(parents=np.array(parents, int), ends=np.array(ends, int),
                    nodes=np.array(nodes, int))


def shared(prefixes: Prefixes, outputs, own=10) -> QueryLengths:
    """Requests of `own` tokens after their prefixes."""
    return lengths_of(prefixes.shared + own, most_outputs=np.array(outputs), prefixes=prefixes)


def test_depth_first_and_groups_that_write_most_per_encoded_token_first():
    """Prefix 1 continues 0, which another request has alone. Request 5 shares nothing."""
    prefixes = forest([-1, 0, -1], [100, 150, 100], [1, 2, 0, 2, 1, -1])
    own = shared(prefixes, [4, 30, 4, 30, 4, 1])
    # outputs over encoded tokens: 12 of 180, 60 of 120, 1 of 10
    assert run_order("prefix", 0, own, 0).tolist() == [1, 3, 5, 0, 4, 2]
    assert run_order("prefix", 3, own, 0).tolist() == [1, 0, 2, 3, 5, 4]


@given(st.integers(0, 2**32 - 1), st.integers(0, 70))
def test_orders_of_prefixes_save_what_their_windows_allow(seed, window):
    """Each prefix is encoded once a window if a request finds what the one before it has."""
    rng = np.random.default_rng(seed)
    parents, ends = [-1], [int(rng.integers(1, 90))]
    for node in range(1, int(rng.integers(1, 9))):
        parents.append(int(rng.integers(-1, node)))
        ends.append((ends[parents[-1]] if parents[-1] >= 0 else 0) + int(rng.integers(1, 90)))
    prefixes = forest(parents, ends, rng.integers(-1, len(ends), int(rng.integers(1, 60))))
    own = shared(prefixes, rng.integers(1, 50, len(prefixes.nodes)))
    order = run_order("prefix", window, own, 0)
    size, saved, before = window or len(order), 0, ()
    for place, node in enumerate(prefixes.nodes[order]):
        chain = prefixes.chain(node)
        if place % size:
            saved += sum(int(prefixes.own_tokens[one]) for one in chain if one in before)
        before = chain
    groups = {one for node in prefixes.nodes for one in prefixes.chain(node)}
    most = prefixes.shared.sum() - sum(prefixes.own_tokens[one] for one in groups)
    assert saved_tokens(prefixes, len(order)) == most
    whole = {(place // size, one) for place, node in enumerate(prefixes.nodes)
             for one in prefixes.chain(node)}
    allowed = prefixes.shared.sum() - sum(prefixes.own_tokens[one] for _, one in whole)
    assert saved_tokens(prefixes, size) == allowed
    assert saved == allowed


def test_a_window_is_as_small_as_keeps_the_saving():
    system = forest([-1], [500], np.zeros(1000))
    assert shared_window(system) == LEAST_SHARED
    documents = forest([-1] * 20, [500] * 20, np.arange(1000) % 20)
    assert shared_window(documents) == 0, "windows of half the job save 97 %"
    halves = np.where(np.arange(1000) < 500, np.arange(1000) % 10, 10 + np.arange(1000) % 10)
    assert shared_window(forest(documents.parents, documents.ends, halves)) == 512
    asked = Adjustment(order="prefix")
    assert window_of(asked, 20, system) == LEAST_SHARED and window_of(asked, 20) == 0
    assert window_of(Adjustment(order="blend", window=9), 20, system) == 9


def test_blend_takes_groups_from_both_ends():
    """Prefix 0 computes (outputs of one token), prefix 1 reads the cache (long outputs)."""
    prefixes = forest([-1, -1], [100, 100], [0] * 6 + [1] * 6)
    order = run_order("blend", 0, shared(prefixes, [1] * 6 + [200] * 6), 0)
    assert order.tolist()[:2] == [0, 11], "the densest, and the one that reads most"
    groups = (order < 6).tolist()
    assert groups != sorted(groups, reverse=True) and order[order < 6].tolist() == [*range(6)]


def test_a_prefix_leaves_its_group_only_for_a_hundredth_of_the_saving():
    """Below a short prefix lie one that computes and one that reads. Others read, too."""
    for top, is_divided in ((1, True), (400, False)):
        prefixes = forest([-1, 0, 0, -1], [top, top + 400, top + 400, 300],
                          [1] * 5 + [2] * 5 + [3] * 5)
        own = shared(prefixes, [1] * 5 + [300] * 5 + [60] * 5)
        # densities of 1, 3, and of 0 as a whole fall in this order
        assert run_order("blend", 0, own, 0)[0] == (0 if is_divided else 10)
