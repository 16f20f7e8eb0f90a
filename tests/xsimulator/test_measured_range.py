"""How far sizes lie beyond those that were measured."""

from __future__ import annotations

import math
from types import SimpleNamespace

from xprofiler.timing import Operator, Reach
from xsimulator.measured_range import Presented, beyond_measured

REACHES = {Operator.LAYER_REST: (100.0, 1.0), Operator.HEAD: (8.0, 1.0),
           Operator.DECODE_ATTENTION: (16.0, 50.0), Operator.ENCODE_ATTENTION: (40.0, 1.0)}


def beyond(reaches, presented, degrees=(1,), captured=()):
    def reach(operator, degree):
        x, y = reaches[operator]
        return Reach(x=x * degree, y=y)

    problem = SimpleNamespace(model=SimpleNamespace(is_encoder_decoder=False))
    return beyond_measured(problem, SimpleNamespace(
        reach=reach, facts=SimpleNamespace(captured_degrees=frozenset(captured))), degrees,
        presented)


def test_what_exceeds_the_range_is_named_once():
    presented = Presented(encode_tokens=201.0, input_tokens=41)
    assert beyond(REACHES, presented, (1, 1)) == [
        "up to 201 tokens encoded at once, measured up to 100",
        "up to 41 tokens of one input, measured up to 40"]
    assert beyond(REACHES, Presented(encode_tokens=200.0), (2,)) == []


def test_a_decode_step_needs_the_head_too():
    assert beyond(REACHES, Presented(decode_queries=9.0)) == [
        "up to 9 queries decoded at once, measured up to 8"]


def test_decode_steps_reach_as_far_as_captured_ones_were_measured():
    def named(most):
        reaches = REACHES | {Operator.HEAD: (900.0, 1.0), Operator.DECODE_ATTENTION: (900.0, 50.0),
                             Operator.DECODE_REST: (most, 1.0)}
        return beyond(reaches, Presented(decode_queries=450.0), captured=[1])

    assert named(100.0) == ["up to 450 queries decoded at once, measured up to 100"]
    assert named(128.0) == [], "larger steps than 512 rows are not captured"


def test_a_source_without_end_is_never_exceeded():
    assert beyond(dict.fromkeys(REACHES, (math.inf, math.inf)), Presented(encode_tokens=1e9)) == []
