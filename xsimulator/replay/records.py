"""What a replay yields: the steps of each pool, the handovers, memory over time, the queries.

Seconds count from the start of the job. Arrays of a pool are per step, in the order in which its
head took them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import Role
from xgpt.core.problem import QueryTimes
from xrunner.rules.steps import Step


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
        return self.times.is_known

    def utilisation(self) -> FloatArray:
        """[stages of all pools] share of the makespan each stage was at work; the rest of it is
        its bubble share."""
        busy = np.concatenate([(pool.end_s - pool.start_s).sum(axis=0) for pool in self.pools])
        return busy / self.makespan_s if self.makespan_s > 0 else busy
