"""Inputs that RRA's groups encode beside decoding, in chunks spread evenly over a phase.

Symbols: c = `limit`, N_D = decode iterations of the phase. A group's tokens of a phase are encoded
in every e-th of its iterations, the most seldom that chunks of c tokens can be; all groups keep to
the same iterations, since one long step holds up those of every group behind it. Tokens beyond N_D
chunks are left to the next phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xrunner.rules.steps import Chunk, Waiting


@dataclass(slots=True)
class _GroupChunks:
    """What one group has to encode: the query that is encoded in part first, then those dealt to
    it. `tokens` are left of all these, and a chunk of this phase has up to `size`."""

    dealt: deque[Waiting] = field(default_factory=deque)
    begun: Waiting | None = None
    done: int = 0  # tokens of the query that is begun
    tokens: int = 0
    size: int = 0


class PhaseChunks:
    """The chunks of all groups, phase by phase."""

    def __init__(self, limit: int, num_groups: int) -> None:
        assert limit >= 1, f"{limit = }"
        self.limit = limit
        self._groups = [_GroupChunks() for _ in range(num_groups)]
        self._every = 1

    def waiting(self, group: int | None = None) -> list[Waiting]:
        """The queries dealt to a group (None: to any) that are not begun."""
        groups = self._groups if group is None else [self._groups[group]]
        return [query for own in groups for query in own.dealt]

    def has_waiting(self) -> bool:
        return any(own.dealt for own in self._groups)

    def num_begun(self, group: int) -> int:
        """Queries of the group that are encoded in part: none or one."""
        return int(self._groups[group].begun is not None)

    def deal(self, group: int, queries: Sequence[Waiting]) -> None:
        """The group encodes these after what it has."""
        own = self._groups[group]
        own.dealt += queries
        own.tokens += sum(query.tokens for query in queries)

    def begin_phase(self, iterations: int) -> None:
        """How often, and how much at a time, is encoded in so many iterations."""
        most = max(own.tokens for own in self._groups)
        self._every = min(max(self.limit * iterations // max(most, 1), 1), iterations)
        times = -(-iterations // self._every)
        for own in self._groups:
            own.size = min(-(-own.tokens // times), self.limit)

    def take(self, group: int, iteration: int, begin: Callable[[Waiting], bool],
             ) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        """(what the group encodes in this iteration, counted from 1; the queries whose encoding
        that ends). `begin` says whether there is room for a query, which is then begun."""
        own, chunks, joined = self._groups[group], list[Chunk](), list[int]()
        left = own.size if (iteration - 1) % self._every == 0 else 0
        while left > 0:
            if own.begun is None:
                if not own.dealt or not begin(own.dealt[0]):
                    break  # keep the input's order: a smaller query behind does not overtake
                own.begun, own.done = own.dealt.popleft(), 0
            query, _, tokens = own.begun
            size = min(left, tokens - own.done)
            chunks.append(Chunk(query=query, first=own.done, tokens=size))
            own.done, own.tokens, left = own.done + size, own.tokens - size, left - size
            if own.done == tokens:
                joined.append(query)
                own.begun = None
        return tuple(chunks), tuple(joined)
