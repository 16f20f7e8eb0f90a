"""ORCA's rule: one encoding a step. And what holds of it and of RRA's: limits, and that every query
is served once."""

import pytest
from examples import examples
from holding import drive, holding, rule_of
from hypothesis import given
from hypothesis import strategies as st

from xrunner.rules.iteration import OrcaRule, Turns, slot_shares
from xrunner.rules.steps import StepKind


def test_two_groups_take_turns_and_encode_one_query_a_step():
    rule = holding(OrcaRule(num_groups=2, max_active=4, kv_tokens=1000), 5, 10)
    steps = drive(rule, dict.fromkeys(range(5), 3))
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


@examples(120)
@given(policy=st.sampled_from(["orca", "rra"]), encode=st.integers(1, 9),
       iterations=st.integers(1, 7), groups=st.integers(1, 4), more=st.integers(0, 12),
       capacity=st.integers(40, 200),
       outputs=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_query_is_encoded_once_and_ends_whatever_the_limits(
        policy, encode, iterations, groups, more, capacity, outputs):
    rule = rule_of(policy, groups=groups, batch=groups + more, kv_tokens=capacity, encode=encode,
                   iterations=iterations)
    wanted = {q: n for q, n in enumerate(outputs) if rule.submit(q, n + 5)}
    most = capacity // groups
    assert all(outputs[q] + 5 > most for q in set(range(len(outputs))) - set(wanted))
    steps = drive(rule, wanted)
    order = [q for s in steps for q in s.joined]
    assert order == sorted(wanted), "each once; admission keeps the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
    if policy == "orca":
        assert all(len(s.joined) <= 1 and (s.kind is StepKind.DECODE) == (not s.joined)
                   for s in steps)
    for phase in {s.phase for s in steps} if policy == "rra" else ():
        assert sum(len(s.joined) for s in steps if s.phase == phase) <= encode


@pytest.mark.parametrize(("policy", "capacity", "together"), [
    ("orca", 100, 2), ("orca", 40, 1), ("rra", 100, 2)])
def test_reserved_tokens_never_exceed_a_groups_share(policy, capacity, together):
    rule = rule_of(policy, groups=2, batch=50, kv_tokens=capacity, encode=10, iterations=3)
    assert not rule.submit(99, capacity // 2 + 1), "can never fit: told at once"
    holding(rule, 12, 20)
    most, finish = [], rule.finish

    def watch(query: int) -> None:
        most.append(rule.reserved_tokens)
        finish(query)

    rule.finish = watch
    drive(rule, dict.fromkeys(range(12), 5))
    assert max(most) == 2 * together * 20
