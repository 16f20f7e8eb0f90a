"""Queries shared out among replicas, given out a few at a time, and taken over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_jobs import roofline_of, toy_problem

from xgpt.core.controls import EvenBatches
from xgpt.core.job import LEAST_TOKENS, ROUND_ROBIN, ROUTINGS
from xrunner.rules.routing import (
    Router,
    Window,
    deal,
    expected_tokens,
    rra_window,
    window_of,
)
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.waa.config import WaaConfig


def test_in_turn_or_to_who_has_the_fewest_tokens() -> None:
    tokens = [100.0, 1.0, 1.0, 1.0, 90.0, 5.0]
    assert deal(tokens, 2, ROUND_ROBIN) == [[0, 2, 4], [1, 3, 5]]
    assert deal(tokens, 2, LEAST_TOKENS) == [[0], [1, 2, 3, 4, 5]]
    assert deal([3.0, 3.0, 3.0], 3) == [[0], [1], [2]]  # of several, the first


@given(st.lists(st.integers(1, 500), max_size=200), st.integers(1, 9), st.sampled_from(ROUTINGS))
def test_every_query_has_one_replica_and_shares_keep_the_order(
        tokens: list[int], replicas: int, routing: str) -> None:
    shares = deal([float(t) for t in tokens], replicas, routing)
    assert sorted(place for share in shares for place in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    if routing == LEAST_TOKENS and tokens:
        loads = [sum(tokens[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(tokens)  # nobody is behind by more than a query


def test_tokens_are_those_expected_unless_more_is_known() -> None:
    inputs, most = np.array([10, 10, 10]), np.array([50, 5, 50])
    exact = np.array([False, False, True])
    assert expected_tokens(inputs, most, 20.0, exact).tolist() == [30, 15, 60]
    assert expected_tokens(inputs, most, 0.0).tolist() == [60, 15, 60]  # nothing is expected


def test_a_replica_is_kept_supplied_and_no_more() -> None:
    router = Router([1.0] * 20, replicas=2, window=Window(waiting=3, present=5),
                    routing=ROUND_ROBIN)
    assert router.top_up(0, waiting=0, active=0) == [0, 2, 4, 6, 8]
    assert router.top_up(1, waiting=0, active=0) == [1, 3, 5, 7, 9]
    assert router.top_up(0, waiting=3, active=2) == []
    assert router.top_up(0, waiting=1, active=4) == [10, 12]
    assert (router.num_left(0), router.num_left(1), router.is_empty) == (3, 5, False)


def test_who_has_run_dry_takes_over_from_the_longest_share() -> None:
    router = Router([1.0] * 24, replicas=3, window=Window(waiting=2), routing=ROUND_ROBIN)
    for replica in range(3):
        router.top_up(replica, waiting=0, active=0)
    while router.num_left(0):
        router.top_up(0, waiting=0, active=2)
    router.top_up(1, waiting=0, active=2)
    assert [router.num_left(r) for r in range(3)] == [0, 4, 6]
    # of the third, its next ones; that one has the window's worth waiting besides
    assert router.top_up(0, waiting=0, active=2) == [8, 11]
    assert [router.num_left(r) for r in range(3)] == [0, 4, 4]
    # an even share of what waits: nobody who has more than the other takes from it
    assert router.top_up(0, waiting=1, active=1) == [13]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_window_larger_than_a_share_takes_nothing_that_another_begins_with(replicas: int) -> None:
    router = Router([1.0] * 36 * replicas, replicas=replicas, window=Window(waiting=55))
    assert [len(router.top_up(replica, waiting=0, active=0)) for replica in range(replicas)] == \
        [36] * replicas


def test_the_last_query_goes_to_who_is_idle() -> None:
    router = Router([1.0] * 4, replicas=2, window=Window(waiting=1), routing=ROUND_ROBIN)
    assert router.top_up(0, waiting=0, active=0) == [0]
    assert router.top_up(1, waiting=0, active=0) == [1]
    assert router.top_up(0, waiting=0, active=1) == [2]
    assert router.top_up(0, waiting=0, active=0) == [3] and router.is_empty
    assert router.top_up(1, waiting=0, active=0) == []


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 6), st.integers(0, 8),
       st.randoms(use_true_random=False))
def test_all_are_given_out_whoever_is_quick(count: int, replicas: int, waiting: int, present: int,
                                            chance: object) -> None:
    """Replicas that begin and end queries as it comes; each asks whenever one of its own has."""
    router = Router([1.0] * count, replicas=replicas,
                    window=Window(waiting=waiting, present=present))
    waits = [len(router.top_up(r, waiting=0, active=0)) for r in range(replicas)]
    given_out, active = sum(waits), [0] * replicas
    while given_out < count:
        replica = chance.randrange(replicas)  # type: ignore[attr-defined]
        if waits[replica] and chance.random() < 0.5:  # type: ignore[attr-defined]
            waits[replica], active[replica] = waits[replica] - 1, active[replica] + 1
        else:
            active[replica] = max(active[replica] - 1, 0)
        new = len(router.top_up(replica, waiting=waits[replica], active=active[replica]))
        waits[replica], given_out = waits[replica] + new, given_out + new
    assert given_out == count and router.is_empty


def test_rras_window_holds_two_rounds_at_their_largest() -> None:
    assert rra_window(10, 2, EvenBatches()).waiting == 2 * 10 + 10
    adjusted = EvenBatches(adjustment=0.1, mean_input_tokens=50.0)
    assert rra_window(10, 2, adjusted).waiting == 2 * 20 + 10


@pytest.mark.parametrize(("policy", "config", "waiting", "present"), [
    ("rra", RraConfig(encode_batch=8, decode_iterations=4), 2 * 8 + 8, 0),
    ("waa-c", WaaConfig(encode_batch=2), 4 * 2, 0),  # a batch for each group of the encode pool
    ("ft", StaticConfig(encode_batch=9, decode_micro_batches=4), 9, 0),
    ("orca", ContinuousConfig(max_active=20), 8, 28),
    ("sarathi", ContinuousConfig(max_active=64, token_budget=40), 16, 80)])
def test_every_kind_of_policy_has_a_window(policy: str, config: object, waiting: int,
                                           present: int) -> None:
    problem = toy_problem()
    estimate = make_policy(policy, problem, roofline_of(problem)).estimate(config)
    assert window_of(estimate) == Window(waiting=waiting, present=present)
