"""Results of a replay: steps of each pool, handovers, memory over time, times of the requests.

Seconds count from the start of the job. Arrays of a pool are per step, in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import Role
from xgpt.core.problem import QueryTimes
from xrunner.rules.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRecords:
    """One pool's steps. stages: indices in the Estimate's `stages`. requests: index in the job of
    each number that a step gives to a request; None if they are the same."""

    name: str
    role: Role
    stages: tuple[int, ...]
    steps: Sequence[Step]
    decoded: IntArray  # rows decoded, with the finished rows of a static batch
    encoded: IntArray  # requests that get their first token
    tokens: IntArray  # input tokens encoded
    context: FloatArray  # mean KV tokens read by a decoded row
    start_s: FloatArray  # [steps, stages]
    end_s: FloatArray  # [steps, stages]
    memory_s: FloatArray  # [changes] when the reserved KV tokens changed
    memory_tokens: IntArray  # [changes] reserved KV tokens since then
    kv_tokens: int  # capacity
    requests: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandoverRecords:
    """Handovers of KV cache from one pool to another, one for each encode step."""

    source: str  # the pools' names
    target: str
    step: IntArray  # of the source
    start_s: FloatArray
    end_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayResult:
    """Result of the replay of a whole job, with ramp-up and drain. `replicas`: requests of each,
    where there are several."""

    pools: tuple[PoolRecords, ...]
    handovers: tuple[HandoverRecords, ...]
    times: QueryTimes
    output_tokens: IntArray  # [requests]
    preemptions: int
    replicas: Sequence[IntArray] = ()

    @property
    def latency_s(self) -> FloatArray:
        """[requests] seconds from the start of each request's encoding to its last token."""
        return self.times.latency_s

    @property
    def makespan_s(self) -> float:
        """Seconds from the first request's arrival to the last token of all."""
        times = self.times
        if not len(times.arrival_s):
            return 0.0
        return float(times.last_token_s.max() - times.arrival_s.min())

    def loop_ttft_s(self, clients: int | None) -> float | None:
        """Mean TTFT in seconds that clients of a closed loop measure, `clients` at each replica,
        who send at the start of the job and again whenever an answer ends. For policies that admit
        a request when another ends. None without clients or with unknown times."""
        if clients is None or not self.is_timed:
            return None
        waits_s = 0.0
        for own in self.replicas or [np.arange(len(self.output_tokens))]:
            ends_s = np.sort(self.times.last_token_s[own])[:max(len(own) - clients, 0)]
            waits_s += float(self.times.first_token_s[own].sum() - ends_s.sum())
        return waits_s / len(self.output_tokens)

    @property
    def is_timed(self) -> bool:
        """Whether all steps have known times."""
        return self.times.is_known

    def utilisation(self) -> FloatArray:
        """[stages of all pools] share of the makespan during which each stage works."""
        busy = np.concatenate([(pool.end_s - pool.start_s).sum(axis=0) for pool in self.pools])
        return busy / self.makespan_s if self.makespan_s > 0 else busy
