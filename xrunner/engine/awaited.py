"""Tokens under way: which queries each step gives a token, and what has come back of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor


class Awaited:
    """The steps of each group whose tokens are not taken up, oldest first: the tokens of a group's
    steps come back in the order of the steps."""

    def __init__(self) -> None:
        self._expected: dict[int, deque[list[int]]] = {}  # group -> queries of each step
        self._arrived: dict[int, deque[Tensor]] = {}

    def expect(self, group: int, queries: list[int]) -> None:
        """A step of `group` will give these queries a token each."""
        self._expected.setdefault(group, deque()).append(queries)

    def arrive(self, group: int, tokens: Tensor) -> None:
        """tokens [queries] of the group's oldest step still without."""
        self._arrived.setdefault(group, deque()).append(tokens)

    def is_missing(self, group: int | None = None) -> bool:
        """Whether tokens of a step of `group` (None: of any) have not come yet."""
        if group is None:
            return any(map(self.is_missing, self._expected))
        return len(self._arrived.get(group, ())) < len(self._expected.get(group, ()))

    def groups(self) -> list[int]:
        """Those with something to take up, and nothing missing."""
        return [group for group, steps in self._expected.items()
                if steps and not self.is_missing(group)]

    def take(self, group: int) -> Iterator[tuple[list[int], list[int]]]:
        """(queries, tokens) of each step of `group`, none of which is missing."""
        assert not self.is_missing(group), f"{group = }"
        while steps := self._expected.get(group):
            yield steps.popleft(), self._arrived[group].popleft().tolist()
