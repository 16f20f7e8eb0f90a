"""Inputs that WAA's decode pool encodes itself, in chunks beside decoding, while the encode pool is
behind (docs/running.md).

Symbols: c = `limit`, tokens of inputs that a group's step encodes at most. The encode pool's rule
decides which queries these are (`DecodeAim`): the next ones that wait, one after the other, while
the decode pool has fewer queries than planned; some chunks' tokens lie ready, since word of what
has begun is heard only when the encode pool's head has done a step. The decode pool's rule encodes
them in that order, each in the group whose turn it is (`TakenInputs`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from xrunner.rules.steps import Chunk, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAim:
    """What the encode pool does for the decode batch. `target_active`: encode batches lead it back
    to that (0: they do not); what is encoded together then depends on the clock. Queries are left
    to the decode pool while it works on fewer than `planned_active`, and while those that it has
    not begun have fewer tokens than `stock_tokens` (0: never)."""

    target_active: float = 0.0
    planned_active: int = 0
    stock_tokens: int = 0


class Given:
    """The encode pool's account of what it has left to the decode pool and is not begun there."""

    def __init__(self) -> None:
        self._tokens_of: dict[int, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._tokens_of)

    def add(self, query: int, tokens: int) -> None:
        self._tokens_of[query] = tokens
        self.tokens += tokens

    def begun(self, queries: Iterable[int]) -> None:
        """The decode pool has begun to encode these; others than those given are passed over."""
        for query in queries:
            self.tokens -= self._tokens_of.pop(query, 0)


class _Part(NamedTuple):
    """A query of which `done` tokens are encoded."""

    query: int
    tokens: int
    done: int


class TakenInputs:
    """What the decode pool has to encode: queries that are not begun, and in each group one that is
    encoded in part, at most."""

    def __init__(self, limit: int, num_groups: int) -> None:
        assert limit >= 1, f"{limit = }"
        self.limit = limit
        self._waiting: deque[Waiting] = deque()
        self._parts: list[_Part | None] = [None] * num_groups

    def __len__(self) -> int:
        """Queries that are not begun."""
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def num_begun(self, group: int) -> int:
        """Queries of the group that are encoded in part: none or one."""
        return int(self._parts[group] is not None)

    def take(self, group: int, begin: Callable[[Waiting], bool],
             ) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        """(what the group's next step encodes, the queries whose encoding that ends). `begin` says
        whether the group has room for a query, which is then begun."""
        chunks, joined, left = list[Chunk](), list[int](), self.limit
        while left > 0:
            part = self._parts[group]
            if part is None:
                if not self._waiting or not begin(self._waiting[0]):
                    break
                first = self._waiting.popleft()
                part = _Part(first.query, first.tokens, 0)
            size = min(left, part.tokens - part.done)
            chunks.append(Chunk(query=part.query, first=part.done, tokens=size))
            left -= size
            part = part._replace(done=part.done + size)
            if part.done == part.tokens:
                joined.append(part.query)
            self._parts[group] = None if part.done == part.tokens else part
        return tuple(chunks), tuple(joined)
