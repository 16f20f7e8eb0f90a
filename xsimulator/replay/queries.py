"""The queries of one replay: their lengths, how far each has come, and when it got there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray
from xgpt.core.query_lengths import QueryLengths


class Queries:
    """The one account of queries that all pools of a replay share, by the query's number."""

    def __init__(self, lengths: QueryLengths, *, encode_gives_token: bool,
                 arrival_s: ArrayLike = 0.0) -> None:
        """`arrival_s`: [queries] when each comes. `encode_gives_token`: encoding yields the first
        output token (decoder-only models)."""
        assert lengths.outputs is not None, "a replay needs to know the outputs"
        self.inputs: list[int] = lengths.inputs.tolist()
        self.reserve_tokens: list[int] = lengths.reserves.tolist()
        self.output_tokens = lengths.outputs
        count = len(self.inputs)
        self.arrival_s: FloatArray = np.broadcast_to(np.asarray(arrival_s, float), (count,))
        self.gives_token = int(encode_gives_token)
        self.left: list[int] = (self.output_tokens - self.gives_token).tolist()  # iterations to go
        assert min(self.left, default=0) >= 0, "an output has at least one token"
        self.made = [0] * count  # tokens generated before the latest eviction
        self.start_s: list[float | None] = [None] * count
        self.first_token_s: list[float | None] = [None] * count
        self.last_token_s: list[float | None] = [None] * count
        self.num_done = self.preemptions = 0
        # what is to be told when a query is done: of those alone that are handed over
        self.when_done: dict[int, Callable[[int, float], None]] = {}

    def begin(self, queries: Iterable[int], now: float) -> None:
        """Their encoding starts; an evicted query has begun before."""
        for query in queries:
            if self.start_s[query] is None:
                self.start_s[query] = now

    def give_first_tokens(self, queries: Iterable[int], now: float) -> None:
        """Their first tokens are there; an evicted query had its own before."""
        for query in queries:
            if self.first_token_s[query] is None:
                self.first_token_s[query] = now

    def end(self, queries: Sequence[int], now: float) -> None:
        """These queries are done."""
        for query in queries:
            self.last_token_s[query] = now
        self.num_done += len(queries)
        if self.when_done:
            for query in queries:
                tell = self.when_done.pop(query, None)
                if tell is not None:
                    tell(query, now)

    def evict(self, query: int, left: int) -> None:
        """The query loses its KV entries with `left` iterations to go."""
        self.made[query] += self.gives_token + self.left[query] - left
        self.left[query] = left
        self.preemptions += 1

    def enter(self, queries: Iterable[int]) -> list[tuple[int, int, int]]:
        """[(query, context, iterations to go)] of queries whose entries are all there now."""
        inputs, made, left = self.inputs, self.made, self.left
        rows = []
        for query in queries:
            if made[query]:  # encoded again: that gave the token after those it had
                left[query] -= self.gives_token
            rows.append((query, inputs[query] + made[query], left[query]))
        return rows
