"""RRA's rule with chunks: what is encoded when, in which order, and that every query is served."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from driven_rra import drive
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from xgpt.core.controls import EvenBatches
from xrunner.rules.rra import PhaseControls, RraRule
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Step, StepKind


def rule_of(chunk: int, *, batch: int = 4, iterations: int = 8, groups: int = 1,
            max_active: int = 200, kv_tokens: int = 100_000) -> RraRule:
    return RraRule(encode_batch=batch, decode_iterations=iterations, num_groups=groups,
                   max_active=max_active, kv_tokens=kv_tokens, encode_chunk=chunk)


def encoded_in(steps: list[Step]) -> list[int]:
    return [sum(chunk.tokens for chunk in step.chunks) for step in steps]


def test_a_phases_inputs_are_spread_evenly_over_its_iterations():
    rule = rule_of(chunk=30)
    for query in range(12):
        assert rule.submit(query, 60, 25)
    steps = drive(rule, dict.fromkeys(range(12), 21))
    phase = [step for step in steps if step.phase == 2]
    # 100 tokens in 8 iterations: chunks of 30 in every second one would hold 120
    assert [(step.iteration, count) for step, count in zip(phase, encoded_in(phase), strict=True)
            ] == [(1, 25), (2, 0), (3, 25), (4, 0), (5, 25), (6, 0), (7, 25), (8, 0)]
    assert [step.kind for step in phase[:2]] == [StepKind.MIXED, StepKind.DECODE]
    assert steps[0].kind is StepKind.ENCODE and steps[0].iteration == 1
    assert [step.joined for step in phase] == [(8,), (), (9,), (), (10,), (), (11,), ()]


def test_an_input_larger_than_a_chunk_joins_when_its_last_part_is_in():
    rule = rule_of(chunk=10, batch=1, iterations=4)
    for query in range(2):
        assert rule.submit(query, 60, 33)
    steps = drive(rule, dict.fromkeys(range(2), 5))
    first = [(chunk.first, chunk.tokens) for step in steps for chunk in step.chunks
             if chunk.query == 0]
    assert first == [(0, 9), (9, 9), (18, 9), (27, 6)]
    assert max(encoded_in(steps)) <= 10


def test_what_does_not_fit_the_chunks_of_a_phase_goes_on_in_the_next():
    rule = rule_of(chunk=8, batch=3, iterations=2)  # 16 tokens of 60 a phase
    for query in range(9):
        assert rule.submit(query, 60, 20)
    steps = drive(rule, dict.fromkeys(range(9), 3))
    assert max(encoded_in(steps)) == 8 and sum(encoded_in(steps)) == 180
    assert sum(count == 8 for count in encoded_in(steps)) >= 20, "chunks are full while it lasts"


def test_all_groups_encode_in_the_same_rounds():
    rule = rule_of(chunk=40, batch=6, iterations=12, groups=3)
    for query in range(60):
        assert rule.submit(query, 90, 11 + query % 7)
    steps = drive(rule, dict.fromkeys(range(60), 30))
    rounds = defaultdict(set)
    for step in steps:
        if step.chunks and 1 <= step.phase < 8:
            rounds[step.phase, step.iteration].add(step.group)
    assert rounds and all(groups == {0, 1, 2} for groups in rounds.values())


def test_without_a_chunk_size_a_batch_is_encoded_alone_and_rows_are_compacted():
    rule = rule_of(chunk=0)
    assert rule.slot_use is SlotUse.COMPACTED and rule_of(chunk=1).slot_use is SlotUse.REUSED
    for query in range(8):
        assert rule.submit(query, 60, 25)
    steps = drive(rule, dict.fromkeys(range(8), 9))
    assert not any(step.chunks or step.kind is StepKind.MIXED for step in steps)


@examples(80)
@given(chunk=st.integers(1, 60), batch=st.integers(1, 9), iterations=st.integers(1, 9),
       groups=st.integers(1, 4), max_active=st.integers(1, 12), capacity=st.integers(160, 400),
       adjusted=st.booleans(), sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)),
                                              min_size=1, max_size=40))
@example(chunk=1, batch=1, iterations=1, groups=4, max_active=1, capacity=160, adjusted=False,
         sizes=[(21, 20)])  # refused: its 41 tokens are more than a group's 40
def test_every_query_is_encoded_whole_once_and_no_limit_is_broken(
        chunk, batch, iterations, groups, max_active, capacity, adjusted, sizes):
    even = EvenBatches(adjustment=0.1, mean_input_tokens=20.0, target_active=3.0)
    rule = RraRule(encode_batch=batch, decode_iterations=iterations, num_groups=groups,
                   max_active=max_active, kv_tokens=capacity, encode_chunk=chunk,
                   even=even if adjusted else EvenBatches())
    wanted = {q: outputs for q, (inputs, outputs) in enumerate(sizes)
              if rule.submit(q, inputs + outputs, inputs)}
    steps = drive(rule, wanted)
    assert Counter(q for s in steps for q in s.joined) == Counter(wanted.keys())
    assert max(encoded_in(steps), default=0) <= chunk  # where no query fits, none is encoded
    done: Counter[int] = Counter()
    for step in steps:
        for part in step.chunks:
            assert part.first == done[part.query]
            done[part.query] += part.tokens
        assert all(done[q] == sizes[q][0] for q in step.joined)
    for group in range(groups):
        order = [q for s in steps if s.group == group for q in s.joined]
        assert order == sorted(order), "a group keeps the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_a_change_keeps_the_chunks_and_holds_from_its_phase_on(groups):
    rule = rule_of(chunk=16, batch=4 * groups, iterations=6, groups=groups)
    for query in range(60):
        assert rule.submit(query, 60, 12)
    new = PhaseControls(encode_batch=2 * groups, decode_iterations=3, group_max_active=100,
                        group_kv_tokens=50_000 // groups)
    rule.change(new, phase=3)
    steps = drive(rule, dict.fromkeys(range(60), 8))
    for phase, most, last in ((1, 4, 6), (5, 2, 3)):
        own = [step for step in steps if step.phase == phase]
        assert max(step.iteration for step in own) == last
        assert sum(len(step.joined) for step in own) == most * groups
    assert max(encoded_in(steps)) <= 16


def test_a_change_may_bring_another_chunk_but_not_chunks_where_there_were_none():
    rule = rule_of(chunk=16, batch=4, iterations=6, groups=1)
    for query in range(60):
        assert rule.submit(query, 60, 12)
    new = PhaseControls(encode_batch=12, decode_iterations=3, group_max_active=100,
                        group_kv_tokens=50_000, encode_chunk=48)
    rule.change(new, phase=3)
    steps = drive(rule, dict.fromkeys(range(60), 8))
    assert max(encoded_in([step for step in steps if step.phase < 3])) <= 16
    assert max(encoded_in([step for step in steps if step.phase >= 3])) == 48
    without = rule_of(chunk=0, batch=4, iterations=6, groups=1)
    with pytest.raises(AssertionError):
        without.change(new, phase=3)
