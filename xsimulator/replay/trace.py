"""The steps a batching rule takes over a finite job, with the sizes that decide what each costs.

NOTE: no clock here, and no event queue. A BatchingRule never sees time: its driver takes up a
group's tokens in the group's turn (xrunner.rules.steps), however late they were, so which queries
a step holds follows from the lengths alone. Times come after (xsimulator.replay.timeline). A rule
that two pools feed at their own pace (WAA) will need events ordered by (time, priority, seq).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from xgpt.errors import XgptError
from xgpt.lengths import FloatArray, IntArray
from xrunner.rules.steps import BatchingRule, Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What the head did, turn by turn; a turn without a step still waits for its group's tokens.

    Arrays are per step unless said; `encoded` holds the queries of the ENCODE steps end to end,
    and `encoded_step` the step of each.
    """

    turns: tuple[tuple[int, int | None], ...]  # (group, step or None)
    steps: tuple[Step, ...]
    queries: IntArray  # rows of the micro-batch
    context_mean: FloatArray  # DECODE: tokens of KV a query, this token included
    context_max: FloatArray
    encoded: IntArray
    encoded_step: IntArray
    first_step: IntArray  # [num_queries] step that encoded the query
    last_step: IntArray  # [num_queries] step that gave its last token
    tokens_made: IntArray  # [num_queries]

    @property
    def is_encode(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return np.array([step.kind is StepKind.ENCODE for step in self.steps], dtype=bool)


def trace(rule: BatchingRule, inputs: IntArray, iterations: IntArray,
          reserve_tokens: IntArray) -> Trace:
    """Drive `rule` until every query is done. Per query: input tokens, decode iterations it needs
    (0: done when encoded), KV tokens it reserves. Raises XgptError for one that can never fit."""
    driver = _Driver([int(n) for n in inputs], [int(n) for n in iterations])
    for query, reserve in enumerate(reserve_tokens):
        if not rule.submit(query, int(reserve)):
            raise XgptError(f"query {query} reserves {int(reserve)} tokens of KV cache: more than "
                            "the schedule gives one micro-batch")
    while (group := rule.next_group()) is not None:
        for query in driver.collect(group):
            rule.finish(query)
        driver.take(group, rule.decide())
    return driver.trace()


class _Driver:
    """All state of one replay: who is active in which group, and what the steps held."""

    def __init__(self, inputs: list[int], iterations: list[int]) -> None:
        self._inputs, self._iterations = inputs, iterations
        self._groups: dict[int, _Group] = {}
        self._turns: list[tuple[int, int | None]] = []
        self._steps: list[Step] = []
        self._sizes: list[tuple[int, float, float]] = []
        self._encoded: list[tuple[int, int]] = []
        self._first, self._last, self._made = ([0] * len(inputs) for _ in range(3))

    def collect(self, group: int) -> list[int]:
        """Queries whose last token came with the group's latest step."""
        state = self._groups.setdefault(group, _Group())
        if state.awaited is None:
            return []
        step, state.awaited = state.awaited, None
        is_encode = self._steps[step].kind is StepKind.ENCODE
        done = state.take_done() if not is_encode else [
            query for query in self._steps[step].joined if self._iterations[query] == 0]
        for query in done:
            self._last[query] = step
            self._made[query] += state.iterations - state.joined_at.pop(query)
            if is_encode:
                state.leave(query, self._inputs[query])
        return done

    def take(self, group: int, step: Step | None) -> None:
        """The rule's turn for `group`."""
        index = len(self._steps)
        self._turns.append((group, None if step is None else index))
        if step is None:
            return
        state = self._groups[group]
        self._steps.append(step)
        state.awaited = index
        if step.kind is StepKind.ENCODE:
            for query in step.joined:
                self._first[query] = index
                state.join(query, self._inputs[query], self._iterations[query])
                self._encoded.append((query, index))
            self._sizes.append((len(step.joined), 0.0, 0.0))
        else:
            self._sizes.append(state.decode())

    def trace(self) -> Trace:
        sizes = np.array(self._sizes, float).reshape(-1, 3)
        encoded = np.array(self._encoded, np.int64).reshape(-1, 2)
        return Trace(
            turns=tuple(self._turns), steps=tuple(self._steps),
            queries=sizes[:, 0].astype(np.int64),
            context_mean=sizes[:, 1], context_max=sizes[:, 2], encoded=encoded[:, 0],
            encoded_step=encoded[:, 1], first_step=np.array(self._first, np.int64),
            last_step=np.array(self._last, np.int64), tokens_made=np.array(self._made, np.int64))


class _Group:
    """Active queries of one group. Contexts grow in step, so input - iterations at joining orders
    them for good."""

    def __init__(self) -> None:
        self.iterations = 0  # decode steps so far
        self.awaited: int | None = None  # step whose tokens are not taken up yet
        self.joined_at: dict[int, int] = {}  # active query -> iterations when it joined
        self._base = 0  # sum over active queries of input - joined_at
        self._ends: dict[int, list[tuple[int, int]]] = {}  # iterations -> [(query, its base)]
        self._longest: list[tuple[int, int]] = []  # heap of (-base, query), some of them gone

    def join(self, query: int, input_tokens: int, iterations: int) -> None:
        base = input_tokens - self.iterations
        self.joined_at[query] = self.iterations
        self._base += base
        if iterations > 0:
            self._ends.setdefault(self.iterations + iterations, []).append((query, base))
            heapq.heappush(self._longest, (-base, query))

    def leave(self, query: int, input_tokens: int) -> None:
        """A query that was done when encoded; no decode step came between."""
        self._base -= input_tokens - self.iterations

    def decode(self) -> tuple[int, float, float]:
        """One more iteration: (queries, mean context, longest context)."""
        self.iterations += 1
        count = len(self.joined_at)
        assert count > 0, f"a DECODE step of an empty group, {self.iterations = }"
        while self._longest[0][1] not in self.joined_at:
            heapq.heappop(self._longest)
        return (count, self._base / count + self.iterations,
                float(-self._longest[0][0] + self.iterations))

    def take_done(self) -> list[int]:
        """Queries that the latest iteration completes."""
        done = self._ends.pop(self.iterations, [])
        self._base -= sum(base for _, base in done)
        return [query for query, _ in done]
