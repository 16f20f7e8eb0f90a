"""What a replay yields: the steps of each pool, the handovers, memory over time, the queries.

Seconds count from the start of the job. Arrays of a pool are per step, in the order in which its
head took them up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import Role
from xgpt.core.queries import QueryTimes
from xrunner.rules.steps import Step


class StepLog(Sequence[Step]):
    """Steps in their order. Decode steps of which each is the next iteration of one phase, and no
    more, can be added together, those of groups that take turns, too, and are made only where
    somebody looks at them."""

    def __init__(self) -> None:
        self._firsts: list[Sequence[Step]] = []  # of each run: its groups' first ones
        self._begins: list[int] = []
        self._count = 0

    def append(self, step: Step, count: int = 1) -> None:
        """So many steps, beginning with this one."""
        self.append_rounds((step,), count)

    def append_rounds(self, firsts: Sequence[Step], count: int) -> None:
        """So many steps of groups that take turns, beginning with the first one of each."""
        self._firsts.append(firsts)
        self._begins.append(self._count)
        self._count += count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Step]:
        for firsts, begin, end in zip(self._firsts, self._begins,
                                      [*self._begins, self._count][1:], strict=True):
            for further in range(end - begin):
                yield _further(firsts, further)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(index)
        run = bisect_right(self._begins, place) - 1
        return _further(self._firsts[run], place - self._begins[run])


def _further(firsts: Sequence[Step], place: int) -> Step:
    """The step at this place of a run."""
    rounds, group = divmod(place, len(firsts))
    first = firsts[group]
    return replace(first, iteration=first.iteration + rounds) if rounds else first


class RowLog:
    """Rows of equally many numbers in their order, added one by one or many at once."""

    def __init__(self) -> None:
        self._blocks: list[FloatArray] = []
        self._rows: list[Sequence[float]] = []
        self.append = self._rows.append

    def extend(self, rows: FloatArray) -> None:
        self._close()
        self._blocks.append(rows)

    def array(self, width: int) -> FloatArray:
        """[rows, width]"""
        self._close()
        return np.concatenate([np.empty((0, width)), *self._blocks])

    def _close(self) -> None:
        if self._rows:
            self._blocks.append(np.array(self._rows, float))
            self._rows.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRecords:
    """One pool's steps. A stage is named by its index in the Estimate's `stages`."""

    name: str
    role: Role
    stages: tuple[int, ...]
    steps: Sequence[Step]
    decoded: IntArray  # rows that get their next token (dead rows of a static batch included)
    encoded: IntArray  # queries that get their first token
    tokens: IntArray  # input tokens encoded
    context: FloatArray  # tokens of KV read by each decoded row, in the mean
    start_s: FloatArray  # [steps, stages]
    end_s: FloatArray  # [steps, stages]
    memory_s: FloatArray  # [changes] when what is held of the KV budget changed
    memory_tokens: IntArray  # [changes] tokens held since then
    kv_tokens: int  # the budget


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandoverRecords:
    """KV entries on their way from one pool to another, one row per encode step."""

    source: str  # the pools' names
    target: str
    step: IntArray  # of the source
    start_s: FloatArray
    end_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayResult:
    """A finite job, fill and drain included."""

    pools: tuple[PoolRecords, ...]
    handovers: tuple[HandoverRecords, ...]
    times: QueryTimes
    output_tokens: IntArray  # [queries]
    preemptions: int

    @property
    def latency_s(self) -> FloatArray:
        """[queries] from the start of a query's encoding to its last token."""
        return self.times.latency_s

    @property
    def makespan_s(self) -> float:
        """Seconds from the first query's arrival to the last one's last token."""
        times = self.times
        if not len(times.arrival_s):
            return 0.0
        return float(times.last_token_s.max() - times.arrival_s.min())

    @property
    def is_timed(self) -> bool:
        """Whether the times of all its steps are known: no size lay beyond those measured."""
        return bool(np.isfinite(self.times.last_token_s).all())

    def utilisation(self) -> FloatArray:
        """[stages of all pools] share of the makespan each stage was at work; the rest of it is
        its bubble share."""
        busy = np.concatenate([(pool.end_s - pool.start_s).sum(axis=0) for pool in self.pools])
        return busy / self.makespan_s if self.makespan_s > 0 else busy
