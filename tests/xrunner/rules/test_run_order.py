"""Queries taken up at random within windows: a permutation, the same each time, that a stopped run
can go on with; what is written stays in the input's order."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrunner.files.results import ResultWriter, answered, count_results
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.order import LEAST_WINDOW, run_order, window_of


@given(count=st.integers(0, 200), window=st.integers(1, 250), seed=st.integers(0, 2**63 - 1),
       share=st.floats(0, 1))
def test_every_query_is_taken_once_within_its_window(count, window, seed, share):
    first = int(share * count)
    order = run_order(count, window, seed, first=first)
    assert sorted(order) == list(range(first, count))
    assert order == run_order(count, window, seed, first=first)
    assert all((place - first) // window == at // window for at, place in enumerate(order))
    held = set(random.Random(seed).sample(order, len(order) // 3))
    assert sorted(run_order(count, window, seed, first=first, without=held)) == sorted(
        set(order) - held)


def test_a_window_is_shuffled_and_the_seed_decides_how():
    orders = {tuple(run_order(100, 50, seed)) for seed in range(5)}
    assert len(orders) == 5 and tuple(range(100)) not in orders
    assert run_order(5, 1, 3) == [0, 1, 2, 3, 4]


def test_the_usual_window_is_of_some_batches():
    assert window_of(False, 20) == 1
    assert window_of(True, 20) == 320 and window_of(True, 1) == LEAST_WINDOW
    assert window_of(7, 20) == 7


def test_sorted_inputs_make_even_batches_when_shuffled():
    inputs = np.arange(1, 961)
    windows = [run_order(960, window, 0) for window in (1, 960)]
    sums = [inputs[order].reshape(-1, 24).sum(axis=1) for order in windows]
    assert sums[1].std() < 0.3 * sums[0].std()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # closes nothing
def test_runs_that_are_killed_lose_and_double_nothing(tmp_path):
    """Each run takes what is left, finishes out of order, and dies after some of it. Nothing that
    is done is done again."""
    path, count, source = tmp_path / "results.jsonl", 200, random.Random(4)
    runs, ever = 0, list[int]()
    while (done := count_results(path)) < count:
        before = answered(path)
        assert before.written == done and before.total == len(ever)
        order = run_order(count, 16, 9, first=done, without=before.held)
        writer = ResultWriter(path, first_index=done, model="toy")
        # in flight are eight at a time, any of which may be the next to finish
        ended = sorted(range(len(order)), key=lambda at: at + source.uniform(0, 8))
        for at in ended[:source.randrange(40, 80)]:
            writer.write(finished(order[at]))
            ever.append(order[at])
        if runs % 2:
            writer.close()
        runs += 1
    written = [json.loads(line)["index"] for line in path.read_text().splitlines()]
    assert written == list(range(count)) == sorted(ever) and runs > 2


def finished(index: int) -> FinishedQuery:
    query = PreparedQuery(index=index, id=f"id{index}", input_ids=(1,), max_new_tokens=5)
    return FinishedQuery(query=query, output_ids=(4,), finish_reason="length", text="",
                         encode_start_s=0.5, first_token_s=1.75, last_token_s=1.75)
