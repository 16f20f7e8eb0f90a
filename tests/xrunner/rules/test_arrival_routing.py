"""Routing of requests that arrive over time: each rule by hand, and what all keep."""

import pytest

from xgpt.core.controls import ARRIVAL_ROUTINGS
from xrunner.rules.arrival_routing import router_of
from xrunner.rules.routing import AWAY, Load, Window

WINDOWS = [Window(waiting=1, present=3)] * 2  # two active, one waiting
TOKENS = [60, 10, 20, 30, 40]


def chosen(routing: str, loads: list[Load], count: int = 5) -> list[int | None]:
    """Replicas of requests that arrive together and of which none begins."""
    router, loads, found = router_of(routing, tokens=TOKENS, windows=WINDOWS, seed=3), [*loads], []
    for request in range(count):
        replica = router.arrived(request, loads)
        found.append(replica)
        if replica is not None:
            loads[replica] = Load(loads[replica].waiting + 1, loads[replica].active)
    return found


@pytest.mark.parametrize(("routing", "replicas"), [
    ("round-robin", [0, 1, 0, 1, 0]),
    ("least-queries", [1, 1, 0, 1, 0]),  # two are active at the first
    ("least-tokens", [0, 1, 1, 1, 0]),   # 60 | 10 + 20 + 30, and the first of equals
    ("fixed", [0, 1, 1, 1, 0]),
    ("deferred", [1, 1, 0, 1, None])])   # three at each, the last waits
def test_each_rule_by_hand(routing, replicas):
    assert chosen(routing, [Load(0, 2), Load(0, 0)]) == replicas


def test_a_waiting_request_goes_where_a_window_lacks_one():
    router = router_of("deferred", tokens=TOKENS, windows=WINDOWS, seed=3)
    full = [Load(1, 2), Load(1, 2)]
    assert [router.arrived(request, full) for request in (2, 1)] == [None, None]
    assert router.next(full) is None
    router.done(1, 0)
    assert router.next([Load(1, 2), Load(1, 1)]) == (2, 1), "in the order of arrival"
    assert router.next(full) is None
    assert router.next([Load(0, 2), Load(0, 1)]) == (1, 1), "to the one with fewer requests"


def test_tokens_count_until_a_request_is_done():
    router = router_of("least-tokens", tokens=TOKENS, windows=WINDOWS, seed=3)
    idle = [Load(0, 0)] * 2
    assert router.arrived(0, idle) == 0 and router.arrived(3, idle) == 1
    router.begun(0, 0)
    assert router.arrived(1, idle) == 1
    router.done(0, 0)
    assert router.arrived(2, idle) == 0


def test_random_choices_follow_the_seed_and_use_all_replicas():
    found = [[router_of("random", tokens=[1] * 100, windows=WINDOWS, seed=seed).arrived(
        request, [Load(0, 0)] * 2) for request in range(100)] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2] and 35 < sum(found[0]) < 65


@pytest.mark.parametrize("routing", ARRIVAL_ROUTINGS)
def test_a_replica_that_is_away_gets_nothing(routing):
    assert 0 not in chosen(routing, [AWAY, Load(0, 0)])
