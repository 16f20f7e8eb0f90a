"""What comes back from the last stage: which queries each step gives a token, and the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from xrunner.engine.pipeline import Executor, Neighbours


class Returns:
    """The steps of each group whose tokens are not taken up, oldest first: the tokens of a group's
    steps come back in the order of the steps."""

    def __init__(self, neighbours: Neighbours, executor: Executor) -> None:
        self._neighbours, self._executor = neighbours, executor
        self._expected: dict[int, deque[list[int]]] = {}  # group -> queries of each step
        self._arrived: dict[int, deque[Tensor]] = {}

    def expect(self, group: int, queries: list[int]) -> None:
        """A step of `group` will give these queries a token each."""
        self._expected.setdefault(group, deque()).append(queries)

    def arrive(self, group: int, tokens: Tensor) -> None:
        """tokens [queries] of the group's oldest step still without."""
        self._arrived.setdefault(group, deque()).append(tokens)

    def groups(self) -> list[int]:
        """Those with something to take up, and nothing missing."""
        return [group for group, steps in self._expected.items()
                if steps and not self._is_missing(group)]

    def take(self, group: int) -> Iterator[tuple[list[int], list[int]]]:
        """(queries, tokens) of each step of `group`, none of which is missing."""
        assert not self._is_missing(group), f"{group = }"
        while steps := self._expected.get(group):
            yield steps.popleft(), self._arrived[group].popleft().tolist()

    def await_group(self, group: int) -> None:
        """Returns when all that the group's steps yield is here, an encoder's output included."""
        while self._executor.awaits_encoded(group) or self._is_missing(group):
            self._take_up()

    def drain(self) -> None:
        """Returns when nothing is under way any more: who sends it would wait for ever."""
        while any(map(self._is_missing, self._expected)) or self._executor.awaits_encoded():
            self._take_up()

    def _is_missing(self, group: int) -> bool:
        """Whether tokens of a step of `group` have not come yet."""
        return len(self._arrived.get(group, ())) < len(self._expected.get(group, ()))

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self.arrive(*result)
