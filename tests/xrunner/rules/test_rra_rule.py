"""The batching rule: order, quotas, limits, and that every query is served once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from driven_rra import drive
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.controls import EvenBatches
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import StepKind


def test_a_phase_encodes_every_group_then_decodes_each_in_turn():
    rule = RraRule(encode_batch=4, decode_iterations=2, num_groups=2, max_active=20, kv_tokens=1000)
    for query in range(8):
        assert rule.submit(query, 10)
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


@examples(60)
@given(encode_batch=st.integers(1, 9), iterations=st.integers(1, 7), num_groups=st.integers(1, 4),
       max_active=st.integers(1, 12), capacity=st.integers(40, 200),
       outputs=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_query_is_encoded_once_and_ends_whatever_the_limits(
        encode_batch, iterations, num_groups, max_active, capacity, outputs):
    rule = RraRule(encode_batch=encode_batch, decode_iterations=iterations, num_groups=num_groups,
                   max_active=max_active, kv_tokens=capacity)
    wanted = {q: n for q, n in enumerate(outputs) if rule.submit(q, n)}
    most = rule.controls.group_kv_tokens
    assert all(outputs[q] > most for q in set(range(len(outputs))) - set(wanted))
    steps = drive(rule, wanted)
    joined = Counter(q for s in steps for q in s.joined)
    assert joined == Counter(wanted.keys())
    order = [q for s in steps for q in s.joined]
    assert order == sorted(order), "admission keeps the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
    for phase in {s.phase for s in steps}:
        assert sum(len(s.joined) for s in steps if s.phase == phase) <= encode_batch


def test_reserved_tokens_never_exceed_a_groups_share():
    rule = RraRule(encode_batch=10, decode_iterations=3, num_groups=2, max_active=50, kv_tokens=100)
    assert not rule.submit(99, 51), "can never fit: told at once"
    for query in range(12):
        assert rule.submit(query, 20)
    drive_limits = []
    rule_finish = rule.finish

    def watch(query: int) -> None:
        drive_limits.append(rule.reserved_tokens)
        rule_finish(query)

    rule.finish = watch  # type: ignore[method-assign]
    drive(rule, dict.fromkeys(range(12), 5))
    assert max(drive_limits) == 80  # two queries of 20 in each group's 50


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
