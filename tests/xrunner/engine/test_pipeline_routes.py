"""Who sends to whom: every rank gets each message exactly once, whatever the degrees."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from toy_runs import pool_of, split_stages

from xrunner.engine.pipeline import ALONE, Route, routes


def routes_of(degrees: tuple[int, ...]) -> dict[int, Route]:
    return routes([pool_of(split_stages(12, len(degrees), degrees=degrees))])


@pytest.mark.parametrize("degrees", [d for n in (1, 2, 3) for d in product((1, 2, 3, 4), repeat=n)])
def test_every_rank_has_one_sender_that_knows_of_it(degrees):
    found = routes_of(degrees)
    assert sorted(found) == list(range(sum(degrees)))
    takes_steps = [taker for r in found.values() for taker in (*r.peers, *r.following)]
    assert sorted(takes_steps) == list(range(1, sum(degrees))), "all but the head, once each"
    for rank, route in found.items():
        assert rank == route.rank
        for taker in (*route.peers, *route.following):
            assert found[taker].steps_from == rank
            assert found[taker].stage - route.stage == (taker in route.following)
        for taker in route.encoded_to:
            assert found[taker].encoded_from == rank
    takes_encoded = [taker for r in found.values() for taker in r.encoded_to]
    assert sorted(takes_encoded) == [r.rank for r in found.values() if r.stage < len(degrees) - 1]
    for route in found.values():  # no rank sends more than its share
        if route.following:
            here, there = degrees[route.stage], degrees[route.stage + 1]
            assert there // here <= len(route.following) <= -(-there // here)


def test_tokens_go_from_the_last_stages_first_rank_to_the_head():
    found = routes_of((2, 1, 3))
    assert [r.rank for r in found.values() if r.tokens_to is not None] == [3]
    assert found[3].tokens_to == 0 and found[0].tokens_from == 3
    assert found[0].encoded_from == 3, "the head waits for one rank alone"
    assert {r.rank: r.steps_from for r in found.values()} == {0: None, 1: 0, 2: 0, 3: 2, 4: 2, 5: 2}
    assert routes_of((2, 4))[0].following == (2, 4) and routes_of((2, 4))[1].following == (3, 5)


def test_a_rank_alone_sends_nothing():
    assert routes_of((1,)) == {0: replace(ALONE, pool="both")}
