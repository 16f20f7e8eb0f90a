"""The batching rule: order, quotas, limits, and that every query is served once."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from examples import examples
from holding import drive, holding
from hypothesis import example, given
from hypothesis import strategies as st

from xgpt.core.controls import EvenBatches
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import Step, StepKind


def test_a_phase_encodes_every_group_then_decodes_each_in_turn():
    rule = holding(RraRule(encode_batch=4, decode_iterations=2, num_groups=2, max_active=20,
                   kv_tokens=1000), 8, 10)
    steps = drive(rule, dict.fromkeys(range(8), 4))
    first = [(s.kind.value, s.group, s.iteration) for s in steps[:6]]
    assert first == [("encode", 0, 0), ("encode", 1, 0), ("decode", 0, 1), ("decode", 1, 1),
                     ("decode", 0, 2), ("decode", 1, 2)]
    assert [s.joined for s in steps[:2]] == [(0, 1), (2, 3)]
    assert [s.joined for s in steps[6:8]] == [(4, 5), (6, 7)] and steps[6].phase == 1


@given(encode_batch=st.integers(1, 40), num_groups=st.integers(1, 8), phase=st.integers(0, 30))
def test_quotas_of_a_phase_sum_to_the_encode_batch_and_stay_even(encode_batch, num_groups, phase):
    rule = RraRule(encode_batch=encode_batch, decode_iterations=1, num_groups=num_groups,
                   max_active=99, kv_tokens=99)
    quotas = [rule.quota(group, phase) for group in range(num_groups)]
    assert sum(quotas) == encode_batch and max(quotas) - min(quotas) <= 1
    over_time = [sum(rule.quota(g, p) for p in range(num_groups)) for g in range(num_groups)]
    assert set(over_time) == {encode_batch}


def test_encode_steps_are_even_and_the_mean_stays_as_planned():
    """The workload adjustment: steps of 12 queries each, inputs from 1 to 500 tokens."""
    inputs = np.random.default_rng(4).integers(1, 501, 24_000).tolist()
    mean, counts, tokens = sum(inputs) / len(inputs), [], []
    rule = RraRule(encode_batch=24, decode_iterations=1, num_groups=2, max_active=1000,
                   kv_tokens=10**9, even=EvenBatches(mean_input_tokens=mean, adjustment=0.1))
    for query, length in enumerate(inputs):
        assert rule.submit(query, length, length)
    while rule.next_group() is not None:
        step = rule.decide()
        if step is None or step.kind is StepKind.DECODE:
            continue
        counts.append(len(step.joined))
        tokens.append(sum(inputs[query] for query in step.joined))
        for query in step.joined:
            rule.finish(query)
    away = np.abs(np.array(tokens[:-1]) / (12 * mean) - 1)
    assert away.max() <= 0.1, "whole inputs of up to 500 tokens allow 250 / 3000"
    assert np.mean(counts[:-1]) == pytest.approx(12, rel=0.01)
    assert max(counts) <= 24


def rule_of(chunk: int, *, batch: int = 4, iterations: int = 8, groups: int = 1,
            max_active: int = 200, kv_tokens: int = 100_000) -> RraRule:
    return RraRule(encode_batch=batch, decode_iterations=iterations, num_groups=groups,
                   max_active=max_active, kv_tokens=kv_tokens, encode_chunk=chunk)


def encoded_in(steps: list[Step]) -> list[int]:
    return [sum(chunk.tokens for chunk in step.chunks) for step in steps]


def test_a_phases_inputs_are_spread_evenly_over_its_iterations():
    rule = holding(rule_of(chunk=30), 12, 60, 25)
    steps = drive(rule, dict.fromkeys(range(12), 21))
    phase = [step for step in steps if step.phase == 2]
    # 100 tokens in 8 iterations: chunks of 30 in every second one would hold 120
    assert [(step.iteration, count) for step, count in zip(phase, encoded_in(phase), strict=True)
            ] == [(1, 25), (2, 0), (3, 25), (4, 0), (5, 25), (6, 0), (7, 25), (8, 0)]
    assert [step.kind for step in phase[:2]] == [StepKind.MIXED, StepKind.DECODE]
    assert steps[0].kind is StepKind.ENCODE and steps[0].iteration == 1
    assert [step.joined for step in phase] == [(8,), (), (9,), (), (10,), (), (11,), ()]


def test_an_input_larger_than_a_chunk_joins_when_its_last_part_is_in():
    rule = holding(rule_of(chunk=10, batch=1, iterations=4), 2, 60, 33)
    steps = drive(rule, dict.fromkeys(range(2), 5))
    first = [(chunk.first, chunk.tokens) for step in steps for chunk in step.chunks
             if chunk.query == 0]
    assert first == [(0, 9), (9, 9), (18, 9), (27, 6)]
    assert max(encoded_in(steps)) <= 10


def test_what_does_not_fit_the_chunks_of_a_phase_goes_on_in_the_next():
    # 16 tokens of 60 a phase
    rule = holding(rule_of(chunk=8, batch=3, iterations=2), 9, 60, 20)
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
