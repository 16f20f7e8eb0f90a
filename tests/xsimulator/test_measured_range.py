"""How far sizes lie beyond those that were measured."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from xprofiler.timing import Operator, Reach
from xsimulator.measured_range import MeasuredRange, Presented

REACHES = {Operator.LAYER_REST: (100.0, 1.0), Operator.HEAD: (8.0, 1.0),
           Operator.DECODE_ATTENTION: (16.0, 50.0), Operator.ENCODE_ATTENTION: (40.0, 1.0)}


def measured(reaches, captured=()):
    def reach(operator, degree):
        x, y = reaches[operator]
        return Reach(x=x * degree, y=y)

    problem = SimpleNamespace(model=SimpleNamespace(is_encoder_decoder=False))
    return MeasuredRange(problem, SimpleNamespace(
        reach=reach, facts=SimpleNamespace(captured_degrees=frozenset(captured))))


def test_the_largest_ratio_counts():
    presented = Presented(encode_tokens=np.array([50.0, 300.0]), decode_queries=np.array([4.0, 8]),
                          context=75.0)
    assert measured(REACHES).stretch((1,), presented).tolist() == [1.5, 3.0]
    assert measured(REACHES).stretch((2,), presented).tolist() == [1.5, 1.5]
    assert measured(REACHES).stretch((2, 1), presented).tolist() == [1.5, 3.0]


def test_a_decode_step_needs_the_head_too():
    assert measured(REACHES).stretch((1,), Presented(decode_queries=np.array([16.0]))) == [2.0]


def test_decode_steps_reach_as_far_as_captured_ones_were_measured():
    def stretch(most):
        reaches = REACHES | {Operator.HEAD: (900.0, 1.0), Operator.DECODE_ATTENTION: (900.0, 50.0),
                             Operator.DECODE_REST: (most, 1.0)}
        return measured(reaches, captured=[1]).stretch((1,), Presented(
            decode_queries=np.array([450.0])))

    assert stretch(100.0) == [4.5]
    assert stretch(128.0) == [0.5], "larger steps than 512 rows are not captured"


def test_what_exceeds_the_range_is_named_once():
    presented = Presented(encode_tokens=np.array([201.0]), input_tokens=41)
    assert measured(REACHES).beyond((1, 1), presented, 1.0) == [
        "up to 201 tokens encoded at once, measured up to 100",
        "up to 41 tokens of one input, measured up to 40"]
    assert measured(REACHES).beyond((1,), presented, 3.0) == []


def test_a_source_without_end_is_never_exceeded():
    endless = measured(dict.fromkeys(REACHES, (math.inf, math.inf)))
    assert endless.is_endless((1, 2)) and not measured(REACHES).is_endless((1,))
    assert endless.stretch((1,), Presented(encode_tokens=np.array([1e9, 1.0]))).tolist() == [0, 0]
