"""Sizes of a configuration that lie beyond those the timing source measured."""

from collections.abc import Iterable
from typing import NamedTuple

from xgpt.core.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import Operator, TimingSource
from xrunner.rules.batch_sizer import MOST_CAPTURED


class LargestSizes(NamedTuple):
    """The largest sizes for which times are needed, or are measured; 0 for none."""

    encode_tokens: float = 0.0  # at once
    encode_queries: float = 0.0
    decode_queries: float = 0.0
    context: float = 0.0  # tokens of a request that decodes
    input_tokens: float = 0.0  # of one request


def beyond_measured(problem: Problem, timing: TimingSource, degrees: Iterable[int],
                    needed: LargestSizes) -> list[str]:
    """Words for the `needed` sizes that exceed those measured at one of these degrees."""
    return sorted({f"up to {size:.0f} {words}, measured up to {measured:.0f}"
                   for degree in degrees
                   for words, size, measured in zip(_WORDS, needed, _reach(
                       problem, timing, degree), strict=True) if size > measured})


def _reach(problem: Problem, timing: TimingSource, degree: int) -> LargestSizes:
    """The largest sizes measured at that tensor-parallel degree."""
    reach = timing.reach
    encode = (Operator.ENCODER_REST if problem.model.is_encoder_decoder else Operator.LAYER_REST)
    head, attention = reach(Operator.HEAD, degree).x, reach(Operator.DECODE_ATTENTION, degree)
    queries = min(head, attention.x)
    if degree in timing.facts.captured_degrees:
        captured = reach(Operator.DECODE_REST, degree).x
        if captured * REFUSED_BEYOND < MOST_CAPTURED:  # larger steps are not captured
            queries = min(queries, captured)
    return LargestSizes(reach(encode, degree).x, head, decode_queries=queries, context=attention.y,
                     input_tokens=reach(Operator.ENCODE_ATTENTION, degree).x)


_WORDS = ("tokens encoded at once", "requests encoded at once", "requests decoded at once",
          "tokens of context", "tokens of one input")
