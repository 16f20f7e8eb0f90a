"""Steps that have been started, and whose tokens are not committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from xrunner.devices import Arriving
from xrunner.engine.pipeline import Executor, Neighbours
from xrunner.engine.pool_requests import ActiveQuery, Vocabulary


@dataclass(slots=True)
class PendingStep:
    """A step that yields a token for each of its `queries`. `tokens`: None until they have
    returned, or are on their way (xrunner.ops.likelihoods.unpacked)."""

    queries: list[ActiveQuery]
    tokens: Tensor | Arriving | None = None
    _is_counted: bool = False

    def ends_by_count(self, vocabulary: Vocabulary) -> bool:
        """Whether counting tells which requests these tokens complete."""
        return all(query.ends_by_count(vocabulary) for query in self.queries)

    def promise(self) -> list[ActiveQuery]:
        """Counts the tokens, once; returns the requests that they complete."""
        if self._is_counted:
            return []
        self._is_counted = True
        return [query for query in self.queries if query.is_at_work and query.promise()]

    @property
    def is_known(self) -> bool:
        """Whether the tokens can be read without waiting."""
        return not isinstance(self.tokens, Arriving) or self.tokens.is_here

    def known(self) -> Tensor:
        """Waits for the tokens and returns them."""
        assert self.tokens is not None, f"{self.queries = }"
        return self.tokens.wait() if isinstance(self.tokens, Arriving) else self.tokens


class PendingSteps:
    """Each group's steps whose tokens are not committed, oldest first: the order they return in."""

    def __init__(self, neighbours: Neighbours, executor: Executor) -> None:
        self._neighbours, self._executor = neighbours, executor
        self._steps: dict[int, deque[PendingStep]] = {}  # by group

    def expect(self, group: int, queries: list[ActiveQuery]) -> None:
        """Adds a step of `group` that will yield a token for each of `queries`."""
        self._steps.setdefault(group, deque()).append(PendingStep(queries))

    def arrive(self, group: int, tokens: Tensor | Arriving) -> None:
        """Stores the tokens of the group's oldest step without."""
        next(step for step in self._steps[group] if step.tokens is None).tokens = tokens

    def groups(self) -> list[int]:
        """Groups with tokens to commit, and none missing."""
        return [group for group, steps in self._steps.items()
                if steps and not self._is_missing(group)]

    def last(self, group: int) -> PendingStep | None:
        """The group's latest step, if it is not committed."""
        steps = self._steps.get(group)
        return steps[-1] if steps else None

    def take(self, group: int, but: PendingStep | None = None) -> Iterator[PendingStep]:
        """Yields the group's steps up to step `but`; no token of the group may be missing."""
        assert not self._is_missing(group), f"{group = }"
        steps = self._steps.get(group)
        while steps and steps[0] is not but:
            yield steps.popleft()

    def await_group(self, group: int) -> None:
        """Waits for all tokens of the group's steps, and for its encoder output."""
        while self._executor.awaits_encoded(group) or self._is_missing(group):
            self._take_up()

    def drain(self) -> None:
        """Waits for everything under way: its sender would else wait for ever."""
        while any(map(self._is_missing, self._steps)) or self._executor.awaits_encoded():
            self._take_up()

    def _is_missing(self, group: int) -> bool:
        """Whether tokens of a step of `group` have not returned."""
        return any(step.tokens is None for step in self._steps.get(group, ()))

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self.arrive(*result)
