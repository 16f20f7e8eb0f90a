"""How far a configuration's sizes lie beyond those that the timing source measured."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import Operator, TimingSource
from xrunner.rules.buckets import MOST_CAPTURED


class Presented(NamedTuple):
    """Configurations present such sizes to the timing source at most, [configs] each or one for
    all; 0 where they present none."""

    encode_tokens: FloatArray | float = 0.0  # at once
    encode_queries: FloatArray | float = 0.0
    decode_queries: FloatArray | float = 0.0
    context: FloatArray | float = 0.0  # tokens of a query that decodes
    input_tokens: float = 0.0  # of one query


class MeasuredRange:
    """It compares sizes with the reach of a timing source's tables."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self._timing = timing
        self._encode = (Operator.ENCODER_REST if problem.model.is_encoder_decoder
                        else Operator.LAYER_REST)
        self._reach = cache(self._find_reach)
        self._is_endless = cache(lambda degree: all(map(np.isinf, self._reach(degree))))

    def is_endless(self, degrees: Iterable[int]) -> bool:
        """It says whether the source answers for any size as well as for any other."""
        return all(map(self._is_endless, degrees))

    def stretch(self, degrees: Iterable[int], presented: Presented) -> FloatArray:
        """The largest ratio [configs] is that of a size to the largest that was measured."""
        degrees = tuple(degrees)
        largest: FloatArray = np.zeros(np.broadcast(*presented).shape)
        if self.is_endless(degrees):
            return largest
        for _, size, measured in self._pairs(degrees, presented):
            if np.isfinite(measured):
                largest = np.maximum(largest, np.asarray(size, float) / measured)
        return largest

    def beyond(self, degrees: Iterable[int], presented: Presented, times: float) -> list[str]:
        """The words name the sizes of one configuration that exceed `times` what was measured."""
        return sorted({f"up to {float(np.squeeze(size)):.0f} {words}, measured up to {measured:.0f}"
                       for words, size, measured in self._pairs(degrees, presented)
                       if np.squeeze(size) > times * measured})

    def _pairs(self, degrees: Iterable[int], presented: Presented,
               ) -> Iterator[tuple[str, FloatArray | float, float]]:
        """Each size comes with its words and the size that was measured up to."""
        for degree in degrees:
            yield from zip(_WORDS, presented, self._reach(degree), strict=True)

    def _find_reach(self, degree: int) -> Presented:
        """These are the largest sizes that were measured at that degree."""
        reach = self._timing.reach
        head, attention = reach(Operator.HEAD, degree).x, reach(Operator.DECODE_ATTENTION, degree)
        queries = min(head, attention.x)
        if degree in self._timing.facts.captured_degrees:
            captured = reach(Operator.DECODE_REST, degree).x
            if captured * REFUSED_BEYOND < MOST_CAPTURED:  # larger steps are not captured
                queries = min(queries, captured)
        return Presented(
            reach(self._encode, degree).x, head, decode_queries=queries,
            context=attention.y, input_tokens=reach(Operator.ENCODE_ATTENTION, degree).x)


_WORDS = ("tokens encoded at once", "queries encoded at once", "queries decoded at once",
          "tokens of context", "tokens of one input")
