"""The figures of a run's queries, in the order of its results: a column each, so that those of ten
million take 410 MB."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.request_keys import MAX_INT

_COUNTS = ("input_tokens", "output_tokens")
_TIMES = ("latency_s", "encode_start_s", "ttft_s", "tpot_s")
_MOST_REASONS = 255  # different ones; a run has four


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFigures:
    """The figures of one finished query. `end_s` is on the clock of `encode_start_s`."""

    input_tokens: int
    output_tokens: int
    finish_reason: str
    latency_s: float
    encode_start_s: float
    ttft_s: float | None = None  # to its first token; None of a run that did not tell
    tpot_s: float | None = None  # a token after the first; None of one token alone

    @property
    def end_s(self) -> float:
        return self.encode_start_s + self.latency_s


class QueryColumns(Sequence[QueryFigures]):
    """All queries of a run. Counts of tokens are below 2**31, times finite."""

    def __init__(self, queries: Iterable[QueryFigures] = ()) -> None:
        self._counts = {name: array("i") for name in _COUNTS}
        self._times = {name: array("d") for name in _TIMES}
        self._reasons, self._codes = array("B"), dict[str, int]()
        for query in queries:
            self.add(query)

    def add(self, query: QueryFigures) -> None:
        """Appends one; to be done before a column is asked for."""
        for name, counts in self._counts.items():
            counts.append(getattr(query, name))
        for name, times in self._times.items():
            value = getattr(query, name)
            times.append(math.nan if value is None else value)
        reason = query.finish_reason
        if reason not in self._codes and len(self._codes) == _MOST_REASONS:
            reason = next(reversed(self._codes))  # of a file that no run wrote
        self._reasons.append(self._codes.setdefault(reason, len(self._codes)))

    def __len__(self) -> int:
        return len(self._reasons)

    @overload
    def __getitem__(self, index: int) -> QueryFigures: ...
    @overload
    def __getitem__(self, index: slice) -> list[QueryFigures]: ...
    def __getitem__(self, index: int | slice) -> QueryFigures | list[QueryFigures]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        own: dict[str, Any] = {name: counts[index] for name, counts in self._counts.items()}
        own |= {name: None if math.isnan(times[index]) else times[index]
                for name, times in self._times.items()}
        return QueryFigures(finish_reason=list(self._codes)[self._reasons[index]], **own)

    def __iter__(self) -> Iterator[QueryFigures]:
        return (self[index] for index in range(len(self)))

    def times(self, name: str) -> FloatArray:
        """[queries] seconds; NaN where the results do not tell."""
        return np.frombuffer(self._times[name]) if self else np.zeros(0)

    def counts(self, name: str) -> IntArray:
        """[queries] tokens, 4 bytes each."""
        return np.frombuffer(self._counts[name], np.int32) if self else np.zeros(0, np.int32)

    def reasons(self) -> Counter[str]:
        """How many ended why."""
        if not self:
            return Counter()
        counts = np.bincount(np.frombuffer(self._reasons, np.uint8), minlength=len(self._codes))
        return Counter(dict(zip(self._codes, counts.tolist(), strict=True)))


def are_counts(query: QueryFigures) -> bool:
    """Whether its tokens may be those of a query."""
    return all(0 <= getattr(query, name) <= MAX_INT for name in _COUNTS)


def columns_of(queries: Sequence[QueryFigures]) -> QueryColumns:
    """The queries as columns, which they may be."""
    return queries if isinstance(queries, QueryColumns) else QueryColumns(queries)


def ends_since_first(queries: QueryColumns) -> FloatArray:
    """When each was done, ascending, in seconds since the first began to be encoded."""
    starts_s = queries.times("encode_start_s")
    ends_s: FloatArray = queries.times("latency_s") + starts_s
    ends_s -= starts_s.min()
    ends_s.sort()
    return ends_s


def told(times: FloatArray) -> FloatArray:
    """Those that are known."""
    unknown = np.isnan(times)
    return times[~unknown] if unknown.any() else times
