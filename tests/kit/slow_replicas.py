"""A replica whose steps take longer than its estimate says."""

from collections.abc import Sequence

from xgpt.core.problem import QueryLengths
from xprofiler.timing import TimingSource
from xsimulator.replay.job import Replayer
from xsimulator.replay.step_clock import PoolClock, ScaledClock


class SlowReplica(Replayer):
    """Results of another replayer, with steps that take `factor` times as long."""

    def __init__(self, own: Replayer, timing: TimingSource, factor: float) -> None:
        super().__init__(own.problem, timing, own.estimate)
        self._factor = factor

    def clocks(self, queries: QueryLengths) -> Sequence[PoolClock]:  # type: ignore[override]
        return [ScaledClock(clock, [self._factor] * len(pool.stages)) for pool, clock in zip(
            self.estimate.deployment.pools, super().clocks(queries), strict=True)]
