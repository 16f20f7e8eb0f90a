"""A head's queries, brought to it from the spool while it runs: of a job of millions only so many
wait in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from xrunner.comm.messages import Message
from xrunner.engine.head import Head
from xrunner.query import PreparedQuery
from xrunner.rules.windows import LEAST_WAITING


class FromSpool:
    """The supply of the only head of a job: the queries in the order in which they are taken up."""

    sources = ()

    def __init__(self, queries: Sequence[PreparedQuery], order: Iterator[int], count: int, *,
                 least: int, begin: Callable[[Sequence[int]], object] | None = None) -> None:
        """`queries`: of the job, by index, read as they are asked for; `order`: the indices of the
        `count` to be answered. `least`: so many wait while there are more. `begin` is told of the
        next ones, in this order."""
        self._queries, self._order, self._left = queries, order, count
        self._least, self._begin = max(least, LEAST_WAITING), begin

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        if self._left == 0 or head.roster.num_waiting >= self._least:
            return
        given = list(islice(self._order, 2 * self._least - head.roster.num_waiting))
        self._left -= len(given)
        if self._begin is not None:
            self._begin(given)
        for query in map(self._queries.__getitem__, given):
            is_taken = head.submit(query)
            assert is_taken, f"{query.id = } {query.reserve_tokens = }"

    def hear(self, head: Head, message: Message) -> None:
        raise AssertionError(f"{message = } from nobody")

    def close(self, head: Head) -> bool:
        return self._left == 0
