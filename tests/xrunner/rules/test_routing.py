"""Queries shared out among replicas, given out a few at a time, and taken over."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import estimate_of, toy_problem

from xgpt.core.controls import FIXED, LEAST_TOKENS, ROUND_ROBIN, ROUTINGS
from xgpt.core.prefixes import Prefixes
from xrunner.engine.head import FromSpool
from xrunner.engine.pool_requests import PoolRequests
from xrunner.query import PreparedQuery
from xrunner.rules.routing import (
    LEAST_WAITING,
    Load,
    Paces,
    Recall,
    Router,
    Window,
    expected_tokens,
    recalls,
    replica_shares,
    units_of,
    window_of,
)
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import SlotUse


def test_in_turn_or_to_who_has_the_fewest_tokens():
    tokens = [100.0, 1.0, 1.0, 1.0, 90.0, 5.0]
    assert replica_shares(tokens, 2, ROUND_ROBIN) == [[0, 2, 4], [1, 3, 5]]
    assert replica_shares(tokens, 2, LEAST_TOKENS) == [[0], [1, 2, 3, 4, 5]]
    assert replica_shares([3.0, 3.0, 3.0], 3) == [[0], [1], [2]]  # of several, the first


@given(st.lists(st.integers(1, 500), max_size=200), st.integers(1, 9), st.sampled_from(ROUTINGS))
def test_every_query_has_one_replica_and_shares_keep_the_order(tokens, replicas, routing):
    shares = replica_shares([float(t) for t in tokens], replicas, routing)
    assert sorted(place for share in shares for place in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    if routing == LEAST_TOKENS and tokens:
        loads = [sum(tokens[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(tokens)  # nobody is behind by more than a query


def test_tokens_are_those_expected_unless_more_is_known():
    inputs, most = np.array([10, 10, 10]), np.array([50, 5, 50])
    exact = np.array([False, False, True])
    assert expected_tokens(inputs, most, 20.0, exact).tolist() == [30, 15, 60]
    assert expected_tokens(inputs, most, 0.0).tolist() == [60, 15, 60]  # nothing is expected


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_window_larger_than_a_share_takes_nothing_that_another_begins_with(replicas):
    router = Router([1.0] * 36 * replicas, windows=[Window(waiting=55)] * replicas)
    assert [len(router.top_up(replica, Load(0, 0))) for replica in range(replicas)] == \
        [36] * replicas


@pytest.mark.parametrize(("policy", "config", "waiting", "present", "batch"), [
    ("rra", {"encode_batch": 8, "decode_iterations": 4}, 2 * 8 + 8, 0, 8),
    ("waa-c", {"encode_batch": 2}, 4 * 2, 0, 2),  # a batch for each group of the encode pool
    ("ft", {"encode_batch": 9, "decode_micro_batches": 4}, 9, 0, 9),
    ("orca", {"max_active": 20}, 8, 28, 1),
    ("sarathi", {"max_active": 64, "token_budget": 40}, 16, 80, 1)])
def test_every_kind_of_policy_has_a_window(policy, config, waiting, present, batch):
    estimate = estimate_of(toy_problem(), policy, **config)
    assert window_of(estimate) == Window(waiting=waiting, present=present, batch=batch,
                                         at_work=estimate.figures.decode_batch)


RRA_LIKE = Window(waiting=12, batch=4, at_work=8)  # two batches at work


def paced(*begun: int, window: Window = RRA_LIKE) -> Paces:
    """Replicas that have begun these many of every sum(begun) queries for long."""
    paces = Paces([window] * len(begun))
    for _ in range(60):
        for replica, count in enumerate(begun):
            paces.note_begun(replica, count)
    return paces


def test_a_replica_that_begins_half_as_many_has_twice_the_time():
    quick, slow = paced(4, 2).times()
    assert slow / quick == pytest.approx(2, rel=0.1)
    assert len(set(paced(4, 4, 4).times())) == 1, "who begins first is no quicker"


def called(paces: Paces, *loads: tuple[int, int], window: Window = RRA_LIKE) -> list[Recall]:
    loads_ = [Load(*load) for load in loads]
    return recalls([window] * len(loads), paces, loads_, [0] * len(loads), [False] * len(loads))


@pytest.mark.parametrize(("begun", "loads", "expected"), [
    ((4, 4), ((4, 8), (8, 8)), []), ((4, 4), ((0, 8), (4, 8)), []),  # it would begin no sooner
    ((4, 4), ((0, 8), (8, 8)), [Recall(1, (0,) * 4)]),
    ((4, 4), ((0, 0), (3, 8)), [Recall(1, (0,) * 3)]),  # who is idle begins at once
    ((8, 2), ((5, 8), (12, 8)), [Recall(1, (0,) * 12)]),  # of a replica that is behind
    ((8, 2), ((12, 8), (5, 8)), []),  # not back
    ((8, 2), ((9, 8), (12, 8)), [])])  # while that has enough
def test_what_waits_elsewhere_goes_to_who_would_begin_it_sooner(begun, loads, expected):
    assert called(paced(*begun), *loads) == expected


def test_a_replica_that_has_begun_nothing_yet_is_about_to():
    paces = Paces([RRA_LIKE] * 2)
    paces.note_begun(0, 4)
    assert called(paces, (0, 4), (12, 0)) == []


def test_who_keeps_what_it_was_dealt_is_asked_for_nothing():
    router = Router([1.0] * 20, windows=[Window(waiting=4, batch=4)] * 2, routing=FIXED)
    assert [len(router.top_up(replica, Load(0, 0))) for replica in (0, 1)] == [10, 10]
    for _ in range(10):
        router.note_begun(0, 1)
    assert router.top_up(0, Load(0, 10)) == [] and router.recalls([Load(0, 10), Load(9, 1)]) == []


def test_of_who_has_none_to_give_back_nothing_is_wanted_again():
    router = Router([1.0] * 20, windows=[Window(waiting=12, batch=4)] * 2)
    for replica in (0, 1):
        router.top_up(replica, Load(0, 0))
        router.note_begun(replica, 1)
    loads = [Load(0, 0), Load(9, 1)]
    assert [recall.replica for recall in router.recalls(loads)] == [1]
    assert router.recalls(loads) == [] and not router.is_done, "its answer is awaited"
    router.take_back(1, [])
    assert router.recalls(loads) == [] and router.is_done


@given(st.integers(1, 40), st.integers(2, 4), st.sampled_from([
    RRA_LIKE, Window(waiting=3, present=9, at_work=6), Window(waiting=2, batch=2)]),
       st.randoms(use_true_random=False))
def test_every_query_is_begun_once_however_answers_cross(count, replicas, window, chance):
    """Replicas that begin and end queries, and answer what is wanted of them, as it comes."""
    pick = chance.randrange
    router = Router([1.0] * count, windows=[window] * replicas)
    waits: list[list[int]] = [[] for _ in range(replicas)]
    active, begun, wanted = [0] * replicas, list[int](), dict[int, int]()

    def supply(replica: int) -> None:
        waits[replica] += router.top_up(replica, Load(len(waits[replica]), active[replica]))

    for replica in range(replicas):
        supply(replica)
    for turn in range(20 * count):
        by_chance = turn < 5 * count
        replica = pick(replicas) if by_chance else turn % replicas
        if replica in wanted and not (by_chance and pick(2)):
            places = waits[replica][max(len(waits[replica]) - wanted.pop(replica), 0):]
            del waits[replica][len(waits[replica]) - len(places):]
            router.take_back(replica, places)
            for other in range(replicas):
                if router.num_left(other):
                    supply(other)
        elif waits[replica] and not (by_chance and pick(2)):
            begun.append(waits[replica].pop(0))
            active[replica] += 1
            router.note_begun(replica, 1)
        elif active[replica]:
            active[replica] -= 1
        supply(replica)
        for recall in router.recalls([Load(len(own), n) for own, n in zip(
                waits, active, strict=True)]):
            assert recall.replica not in wanted
            wanted[recall.replica] = len(recall.takers)
    assert sorted(begun) == list(range(count))


class Counted:
    """Queries that count how often each is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return SimpleNamespace(id=str(index), index=index, reserve_tokens=1)


def test_queries_come_in_their_order_and_no_more_wait_than_need_to():
    count, queries, told, waiting = 5 * LEAST_WAITING, Counted(), list[int](), list[Any]()
    requests = SimpleNamespace(num_waiting=0)

    def submit(query: Any) -> bool:
        waiting.append(query)
        requests.num_waiting = len(waiting)
        return True

    head: Any = SimpleNamespace(requests=requests, submit=submit)
    order = np.random.default_rng(3).permutation(count).tolist()
    supply = FromSpool(queries, iter(order), count, least=10, begin=told.extend)
    taken, most = [], 0
    while True:
        supply.look(head)
        most = max(most, len(waiting))
        if not waiting:
            break
        assert supply.is_open or len(queries.read) == count
        taken += [query.index for query in waiting[:1000]]
        del waiting[:1000]
        requests.num_waiting = len(waiting)
    assert taken == queries.read == told == order and supply.close(head)
    assert most == 2 * LEAST_WAITING


def test_a_group_gets_no_more_slots_than_there_are_queries():
    rule = RraRule(encode_batch=4, decode_iterations=5, num_groups=2, max_active=12, kv_tokens=999)
    found = []
    for count in (5, 50):
        requests = PoolRequests(SlotUse.COMPACTED, None)
        for i in range(count):
            requests.add(PreparedQuery(index=i, id=f"q{i}", input_ids=(1, 2, 3), max_new_tokens=5))
        found.append(requests.start_message(rule))
    assert [message.slots for message in found] == [5, 6]
    assert found[0].capacity == 3 + 5, "input and most output of a query"


def forest(parents, ends, nodes) -> Prefixes:
    return Prefixes(parents=np.array(parents), ends=np.array(ends), nodes=np.array(nodes))


def test_who_shares_a_prefix_goes_to_one_replica_and_counts_it_once():
    """Twelve prefixes of 90 tokens, 4 requests of 10 more each; a thirteenth request is alone."""
    prefixes = forest([-1] * 12, [90] * 12, [*range(12)] * 4 + [-1])
    tokens = np.append(np.full(48, 100.0), 60)
    units = units_of(tokens, prefixes, 2, LEAST_TOKENS)
    assert units is not None and units.tokens.tolist() == [130.0] * 12 + [60.0]
    assert units.again == pytest.approx(48 * 90 / (48 * 10 + 60))
    shares = replica_shares(tokens, 2, units=units)
    groups = [{int(prefixes.nodes[place]) for place in own} for own in shares]
    assert groups == [{0, 2, 4, 6, 8, 10, -1}, {1, 3, 5, 7, 9, 11}]
    assert units_of(tokens, prefixes, 2, ROUND_ROBIN) is None, "dealt as it is asked for"
    assert units_of(tokens, None, 2, LEAST_TOKENS) is None
    nobody = Router(np.zeros(0), windows=[Window(waiting=4)] * 2, prefixes=prefixes[np.arange(0)])
    assert nobody.is_done, "a resume that has none left"


def test_a_prefix_of_more_than_a_quarter_of_a_share_is_divided():
    """A system prompt of all; below it a document of two requests, and 59 of their own."""
    prefixes = forest([-1, 0], [100, 150], [0, 1, *[0] * 58, 1])
    tokens = prefixes.shared + 10.0
    units = units_of(tokens, prefixes, 2, LEAST_TOKENS)
    assert units is not None and units.of.tolist() == [0, 1, *range(2, 60), 1]
    assert units.tokens.tolist() == [10, 70, *[10] * 58], "every replica encodes the prompt"
    assert units.again == pytest.approx(2 * 50 / 610)
    shares = replica_shares(tokens, 2, units=units)
    assert {1, 60} <= {*shares[1]} and [len(own) for own in shares] == [33, 28]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_units_part_no_prefix_that_is_not_divided(seed, replicas):
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, node)) for node in range(int(rng.integers(1, 12)))]
    ends = [0] * len(parents)
    for node, parent in enumerate(parents):
        ends[node] = (ends[parent] if parent >= 0 else 0) + int(rng.integers(1, 90))
    prefixes = forest(parents, ends, rng.integers(-1, len(ends), int(rng.integers(1, 60))))
    tokens = prefixes.shared + rng.integers(1, 40, len(prefixes.nodes)).astype(float)
    router = Router(tokens, windows=[Window(waiting=10**6)] * replicas, prefixes=prefixes)
    shares = [router.top_up(replica, Load(0, 0)) for replica in range(replicas)]
    assert sorted(sum(shares, [])) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    for node in range(len(ends)):
        below = [place for place, own in enumerate(prefixes.nodes)
                 if node in prefixes.chain(own)]
        there = {own for place in below for own in prefixes.chain(prefixes.nodes[place])
                 if node in prefixes.chain(own)}
        size = sum(tokens[place] - prefixes.shared[place] for place in below) + sum(
            int(prefixes.own_tokens[own]) for own in there)
        whole = sum(tokens - prefixes.shared) + sum(prefixes.own_tokens[own] for own in {
            one for each in prefixes.nodes for one in prefixes.chain(each)})
        owners = sum(any(place in share for place in below) for share in shares)
        assert owners <= 1 or size > 0.25 * whole / replicas


@pytest.mark.parametrize(("prefix", "pays"), [(90, True), (900, False)])
def test_a_replica_takes_over_from_the_end_if_it_pays_to_encode_the_prefix_again(prefix, pays):
    """Ten requests of 10 tokens each share a prefix, which is as much as 9 of them, or as 90."""
    prefixes = forest([-1] * 16, [prefix] * 16, np.repeat(np.arange(16), 10))
    router = Router(prefixes.shared + 10.0, windows=[Window(waiting=4)] * 2, prefixes=prefixes)
    assert router.top_up(0, Load(0, 0)) == [0, 1, 2, 3]
    own = [place for _ in range(20) for place in router.top_up(1, Load(0, 0))]
    assert len(own) == 80 and router.num_left(0) == 76
    last = [place for place in range(160) if place not in own][-4:]
    assert router.top_up(1, Load(0, 0)) == (last if pays else [])
