"""ORCA's rule: one encoding a step, its limits, and that every query is served once."""

from collections import Counter

import pytest
from examples import examples
from holding import holding
from hypothesis import given
from hypothesis import strategies as st

from xrunner.rules.iteration import OrcaRule, Turns, slot_shares
from xrunner.rules.steps import Step, StepKind


def drive(rule: OrcaRule, iterations: dict[int, int]) -> list[Step]:
    """Runs the rule to its end; query q needs iterations[q] decode steps after its encoding."""
    steps: list[Step] = []
    left = dict(iterations)
    active: list[list[int]] = [[] for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        for query in [q for q in active[group] if left[q] == 0]:
            active[group].remove(query)
            rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        steps.append(step)
        assert (step.kind is StepKind.ENCODE) == (not active[group])
        assert (step.kind is StepKind.DECODE) == (not step.joined)
        for query in active[group]:
            left[query] -= 1
        active[group] += step.joined
        assert len(active[group]) <= rule.group_max_active
        assert len(steps) < 100_000
    assert not any(left.values())
    return steps


def test_two_groups_take_turns_and_encode_one_query_a_step():
    rule = holding(OrcaRule(num_groups=2, max_active=4, kv_tokens=1000), 5, 10)
    steps = drive(rule, dict.fromkeys(range(5), 2))
    seen = [(s.kind.value, s.group, s.joined) for s in steps[:8]]
    assert seen == [
        ("encode", 0, (0,)), ("encode", 1, (1,)), ("mixed", 0, (2,)), ("mixed", 1, (3,)),
        ("decode", 0, ()), ("decode", 1, ()), ("mixed", 0, (4,)), ("decode", 1, ())]
    assert [s.phase for s in steps if s.group == 0][:4] == [0, 1, 2, 3]


@given(num_groups=st.integers(1, 8), more=st.integers(0, 40))
def test_slots_are_shared_evenly(num_groups, more):
    shares = slot_shares(num_groups + more, num_groups)
    assert sum(shares) == num_groups + more and max(shares) - min(shares) <= 1
    assert max(shares) == shares[0] and min(shares) >= 1


def test_groups_without_work_are_passed_over():
    turns = Turns(3)
    assert turns.find(lambda group: group == 2) == 2
    assert turns.end() == 0
    assert turns.find(lambda group: group == 2) == 2
    assert turns.end() == 1, "the group's second step"
    assert turns.find(lambda group: False) is None


@examples(60)
@given(num_groups=st.integers(1, 4), more=st.integers(0, 12), capacity=st.integers(40, 200),
       iterations=st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_every_query_is_encoded_once_and_ends_whatever_the_limits(
        num_groups, more, capacity, iterations):
    rule = OrcaRule(num_groups=num_groups, max_active=num_groups + more, kv_tokens=capacity)
    wanted = {q: n for q, n in enumerate(iterations) if rule.submit(q, n + 5)}
    refused = set(range(len(iterations))) - set(wanted)
    assert all(iterations[q] + 5 > rule.group_kv_tokens for q in refused)
    steps = drive(rule, wanted)
    assert Counter(q for s in steps for q in s.joined) == Counter(wanted.keys())
    order = [q for s in steps for q in s.joined]
    assert order == sorted(order), "admission keeps the input's order"
    assert all(len(s.joined) <= 1 for s in steps)
    assert rule.next_group() is None and rule.reserved_tokens == 0


@pytest.mark.parametrize(("capacity", "together"), [(100, 2), (40, 1)])
def test_reserved_tokens_never_exceed_a_groups_share(capacity, together):
    rule = OrcaRule(num_groups=2, max_active=50, kv_tokens=capacity)
    assert not rule.submit(99, capacity // 2 + 1), "can never fit: told at once"
    for query in range(12):
        assert rule.submit(query, 20)
    most, finish = [], rule.finish

    def watch(query: int) -> None:
        most.append(rule.reserved_tokens)
        finish(query)

    rule.finish = watch
    drive(rule, dict.fromkeys(range(12), 5))
    assert max(most) == 2 * together * 20
