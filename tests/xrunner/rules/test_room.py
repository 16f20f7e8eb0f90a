"""Room: admission that looks ahead, against requests that grow token by token."""

from collections import deque

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.controls import Admission
from xrunner.rules.room import Room, Rooms, Waiting

RULES = ("greedy", "reserve-static", "reserve-dynamic", "future-peak", "reserve")


def _room(tokens: int, at_work: list[tuple[int, int]], rule: str, **settings) -> Room:
    """A room where requests that hold c tokens are to write r more."""
    room = Room(tokens, Admission(rule=rule, **settings))
    for query, (held, left) in enumerate(at_work):
        room.admit(Waiting(query, held + left, held))
    return room


@pytest.mark.parametrize(("rule", "after_free", "takes"), [
    ("greedy", False, True),            # 70 + 20 + 1 = 91
    ("reserve-static", False, False),   # 36 > 100 - 95
    ("reserve-dynamic", False, False),  # 105 when the first ends
    ("reserve-dynamic", True, True),    # 70 once it has left
    ("future-peak", False, False),      # 105 at that end
])
def test_each_rule_looks_as_far_as_it_says(rule, after_free, takes):
    room = _room(100, [(30, 5), (40, 20)], rule, after_free=after_free)
    assert room.has_room(Waiting(9, 36, 20)) == takes


def _loads(at_work: list[tuple[int, int]]) -> list[int]:
    """Tokens just before each end, with every request grown token by token."""
    loads, step = [], 0
    while any(step <= left for _, left in at_work):
        if any(step == left for _, left in at_work):
            loads.append(sum(held + step for held, left in at_work if left >= step))
        step += 1
    return loads


@pytest.mark.parametrize("seed", range(500))
def test_rules_agree_with_requests_that_grow_token_by_token(seed):
    rng = np.random.default_rng(seed)
    at_work = [(int(held), int(left)) for held, left in zip(
        rng.integers(1, 50, size=rng.integers(1, 9)), rng.integers(1, 40, size=9), strict=False)]
    new = (int(rng.integers(1, 50)), int(rng.integers(1, 40)))
    budget = int(rng.integers(20, 500))
    waiting = Waiting(99, sum(new), new[0])
    everyone, held = [*at_work, new], sum(held for held, _ in at_work)
    is_free_now = held + new[0] + 1 <= budget
    first = min(left for _, left in at_work)
    at_first = sum(held + first for held, _ in at_work) + new[0] + min(first, new[1])
    gone = max(held for held, left in at_work if left == first)
    expected = {
        "greedy": is_free_now, "reserve": sum(map(sum, everyone)) <= budget,
        "reserve-static": is_free_now and sum(new) <= budget - sum(map(sum, at_work)),
        "reserve-dynamic": is_free_now and at_first <= budget,
        "future-peak": is_free_now and max(_loads(everyone)) <= budget}
    assert {rule: _room(budget, at_work, rule).has_room(waiting) for rule in RULES} == expected
    after = _room(budget, at_work, "reserve-dynamic", after_free=True).has_room(waiting)
    if len({left for _, left in at_work}) == len(at_work):  # else who leaves first is open
        assert after == (is_free_now and at_first - gone - first <= budget)


def _means(rule: str, width: int | None, *, budget: int = 43_437, count: int = 6_000,
           seed: int = 0) -> tuple[float, int, int]:
    """(mean requests at a time, evictions, most tokens held) of requests of task T that all wait,
    one token a step."""
    lengths = catalog.task("T")
    inputs, outputs = lengths.sample(count, np.random.default_rng(seed))
    cap = lengths.outputs.max
    # greedy keeps a hundredth free, as the rules with paged KV do
    room = Rooms([Room(budget, Admission(rule=rule), spare=budget // 100 * (rule == "greedy"))])
    # the longest output of its class, where classes are known
    forecasts = np.zeros(count) if width is None else np.minimum(
        -(-outputs // width) * width, cap)
    waiting = deque(Waiting(query, tokens + cap, tokens, forecast=int(forecasts[query]))
                    for query, tokens in enumerate(inputs.tolist()))
    made, steps, evictions, most = [0] * count, 0, 0, 0
    while waiting or room.room_of:
        evicted = room.make_room(0, waiting)
        evictions += len(evicted)
        room.of_group[0].advance()
        for query in [*room.room_of]:
            made[query] += 1
            if made[query] >= outputs[query]:
                room.finish(query)
        while waiting and not evicted and room.admit(0, waiting[0]):
            waiting.popleft()
        most, steps = max(most, room.held), steps + 1
    return float(outputs.sum() / steps), evictions, most


@pytest.mark.parametrize(("rule", "width", "mean"), [
    ("reserve", None, 94.6), ("future-peak", None, 130), ("future-peak", 200, 163),
    ("future-peak", 100, 175), ("future-peak", 1, 196)])
def test_more_requests_are_at_work_the_more_is_known(rule, width, mean):
    found, evictions, most = _means(rule, width)
    assert found == pytest.approx(mean, rel=0.02)
    assert evictions == 0 and most <= 43_437


def test_greedy_admission_evicts_hundreds():
    _, evictions, most = _means("greedy", None)
    assert evictions == pytest.approx(390, rel=0.15)
    assert most <= 43_437


def test_a_partly_encoded_request_that_was_evicted_counts_as_begun():
    """Otherwise another replica could be given it, and encode it a second time."""
    rooms, waiting = Rooms.even(1, 40, Admission(rule="greedy")), deque[Waiting]()
    assert rooms.admit(0, Waiting(0, 30, 10)) and rooms.admit(0, Waiting(1, 28, 24), decodes=False)
    for _ in range(6):
        rooms.of_group[0].advance()
    assert rooms.make_room(0, waiting) == (1,)
    assert waiting[0].written == 0 and waiting[0].has_begun
