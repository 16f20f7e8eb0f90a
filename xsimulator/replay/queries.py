"""State of the requests of one replay: lengths, progress and times, and the active rows of a
group."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.controls import AT_CAPS, CAP, FORECAST_VALUES, Forecasting
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import QueryLengths


class ReplayJob(NamedTuple):
    """Input of a replay: lengths, arrival times [requests] in seconds, and whether encoding yields
    the first output token (decoder-only models). `forecasts`: [requests] output tokens as admission
    reads them; None: none are made beforehand."""

    lengths: QueryLengths
    arrival_s: FloatArray
    gives_token: bool
    forecasts: IntArray | None = None

    @classmethod
    def of(cls, lengths: QueryLengths, arrival_s: ArrayLike, gives_token: bool,
           forecasting: Forecasting = AT_CAPS) -> ReplayJob:
        """The input of a replay. arrival_s: one for each request, or one for all. forecasting: how
        admission forecasts; at the caps it reads no forecasts."""
        own = None if forecasting.kind == CAP else lengths.forecasts
        return cls(lengths, np.broadcast_to(np.asarray(arrival_s, float), lengths.inputs.shape),
                   gives_token, None if own is None else np.ascontiguousarray(
                       own[:, FORECAST_VALUES.index(forecasting.use)]))

    @property
    def left(self) -> IntArray:
        """[requests] decode iterations that each request needs."""
        assert self.lengths.outputs is not None, "a replay needs to know the outputs"
        left: IntArray = self.lengths.outputs - int(self.gives_token)
        assert left.min(initial=0) >= 0, "an output has at least one token"
        return left


class Queries:
    """Lengths, progress and times of all requests of a replay, by index. Its pools share them."""

    def __init__(self, lengths: QueryLengths, *, encode_gives_token: bool,
                 arrival_s: ArrayLike = 0.0, forecasting: Forecasting = AT_CAPS) -> None:
        """forecasting: as of ReplayJob.of."""
        self.job = ReplayJob.of(lengths, arrival_s, encode_gives_token, forecasting)
        left = self.job.left
        assert lengths.outputs is not None
        self.inputs: list[int] = lengths.inputs.tolist()
        self.reserve_tokens: list[int] = lengths.reserves.tolist()
        self.output_tokens, known = lengths.outputs, self.job.forecasts
        self.forecasts: list[int] | None = None if known is None else known.tolist()
        count = len(self.inputs)
        self.arrival_s = self.job.arrival_s
        self.gives_token = int(encode_gives_token)
        self.left: list[int] = left.tolist()  # iterations to go
        self.generated = [0] * count  # tokens generated before the latest eviction
        self.start_s: list[float | None] = [None] * count
        self.first_token_s: list[float | None] = [None] * count
        self.last_token_s: list[float | None] = [None] * count
        self.evictions = [0] * count
        self.num_done = 0
        # callbacks for the end of requests that were handed over
        self.when_done: dict[int, Callable[[int, float], None]] = {}
        # called with each request that begins, with requests that end, and when
        self.on_begin: Callable[[int, float], None] | None = None
        self.on_end: Callable[[Sequence[int], float], None] | None = None

    def begin(self, queries: Iterable[int], now: float) -> None:
        """Records the start of their encoding, unless they started before an eviction."""
        for query in queries:
            if self.start_s[query] is None:
                self.start_s[query] = now
                if self.on_begin is not None:
                    self.on_begin(query, now)

    def give_first_tokens(self, queries: Iterable[int], now: float) -> None:
        """Records their first tokens, unless they had theirs before an eviction."""
        for query in queries:
            if self.first_token_s[query] is None:
                self.first_token_s[query] = now

    def end(self, queries: Sequence[int], now: float) -> None:
        """Records their last tokens."""
        for query in queries:
            self.last_token_s[query] = now
        self.num_done += len(queries)
        if self.when_done:
            for query in queries:
                callback = self.when_done.pop(query, None)
                if callback is not None:
                    callback(query, now)
        if self.on_end is not None:
            self.on_end(queries, now)

    def evict(self, query: int, left: int) -> None:
        """Records that a request with `left` iterations to go lost its KV cache."""
        self.generated[query] += self.gives_token + self.left[query] - left
        self.left[query] = left
        self.evictions[query] += 1

    def enter(self, queries: Iterable[int]) -> list[tuple[int, int, int]]:
        """[(request, context tokens, iterations to go)] of requests that are encoded in full."""
        inputs, generated, left = self.inputs, self.generated, self.left
        rows = []
        for query in queries:
            if generated[query]:  # encoded again: that gave one more token
                left[query] -= self.gives_token
            rows.append((query, inputs[query] + generated[query], left[query]))
        return rows


class GroupRows:
    """Active rows of a group, with the sizes of its next decode step.

    All contexts grow together. So a row's base (context - iterations so far) is constant, and the
    sum and order of the bases change only when rows come and go."""

    def __init__(self) -> None:
        self.iterations = 0  # decode steps so far
        # steps whose tokens were not collected yet: (ready at, requests with their first token,
        # requests with their last token)
        self.awaited: list[tuple[float, Sequence[int], list[int]]] = []
        self.rows = 0  # active ones, and dead ones of a static batch
        self.fresh: list[int] = []  # joined without a token, not decoded yet
        self._removed = 0  # rows freed since the last decode step, which compaction fills
        self._members: dict[int, tuple[int, int]] = {}  # request -> (base, iteration of its last)
        self._base = 0  # sum over rows
        self._ends: dict[int, list[int]] = {}  # iteration -> requests whose last it is
        self._longest: list[tuple[int, int]] = []  # heap of (-base, request), also of rows gone

    def __contains__(self, query: int) -> bool:
        return query in self._members

    def join(self, query: int, context: int, iterations: int) -> None:
        """Adds a request with `context` tokens that needs `iterations` more steps."""
        base, end = context - self.iterations, self.iterations + iterations
        self._members[query] = (base, end)
        self._base += base
        self.rows += 1
        if iterations > 0:
            self._ends.setdefault(end, []).append(query)
            heapq.heappush(self._longest, (-base, query))

    def decode(self) -> tuple[int, float, float, float]:
        """Counts one more iteration; returns (rows, mean context, longest context, rows moved
        before it).

        Compaction moves only rows behind the new end into holes before it. Of r holes among n + r
        rows, r * n / (n + r) are moved in the mean."""
        self.iterations += 1
        rows, removed, self._removed = self.rows, self._removed, 0
        longest, members = self._longest, self._members
        while longest and members.get(longest[0][1], (None,))[0] != -longest[0][0]:
            heapq.heappop(longest)  # it left, or left and came again
        context = self._base / rows + self.iterations
        top = -longest[0][0] + self.iterations if longest else context
        return rows, context, float(top), removed * rows / (rows + removed) if removed else 0.0

    def take_done(self) -> list[int]:
        """The requests that end with the latest iteration. Their rows stay until `leave`."""
        at = self.iterations
        # a request that left and came again may be listed twice
        return [query for query in dict.fromkeys(self._ends.pop(at, ()))
                if self._members.get(query, (0, -1))[1] == at]

    def leave(self, query: int) -> int:
        """Frees a request's row; returns the number of iterations that it still had to go."""
        base, end = self._members.pop(query)
        self._base -= base
        self.rows -= 1
        self._removed += 1
        return end - self.iterations

    def clear(self) -> None:
        """Frees all rows, those of finished requests, too."""
        self._members.clear()
        self._ends.clear()
        self._longest.clear()
        self._base = self.rows = self._removed = 0
