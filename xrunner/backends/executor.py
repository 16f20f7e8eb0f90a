"""Shared parts of the executors of other engines. Each holds a decoder-only model, whose steps end
with tokens."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from xrunner.comm.messages import StepMessage
from xrunner.engine.pipeline import Executor, RankReport
from xrunner.files.heartbeat import Heartbeat
from xrunner.step_record import NO_SIZES, StepRecord, StepSizes

_LOG_LIMIT = 200_000  # chosen: steps kept for the report; a longer job keeps its last ones


class DecoderOnly(Executor):
    """An executor that keeps a log of its steps."""

    def __init__(self, clock: Callable[[], float], heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat`: called with every step."""
        self._clock, self.heartbeat = clock, heartbeat
        self.log: deque[StepRecord] = deque(maxlen=_LOG_LIMIT)
        self.busy_s = 0.0

    def record(self, message: StepMessage, queries: int, tokens: int, start_s: float,
               sizes: StepSizes = NO_SIZES, *, seats: int = 0) -> None:
        """Logs the step that began at `start_s` and ends now. `seats`: requests on this rank."""
        record = StepRecord(message.kind.value, message.group, message.phase, message.iteration,
                            queries, tokens, start_s, self._clock(), *sizes)
        self.log.append(record)
        self.busy_s += record.seconds
        if self.heartbeat is not None:
            self.heartbeat(record.end_s, self.busy_s, seats, record)

    def report(self, rank: int, load_s: float, model_dir: Path, peak_bytes: int,
               operators: str | None = None) -> RankReport:
        """Figures of the rank, which read the weights of `model_dir` in `load_s` seconds."""
        files = [*model_dir.glob("*.safetensors")] or [*model_dir.glob("*.bin")]
        return RankReport(rank=rank, stage=0, log=tuple(self.log), busy_s=self.busy_s,
                          load_s=load_s, bytes_read=sum(path.stat().st_size for path in files),
                          rows_compacted=0, peak_memory_bytes=peak_bytes, operators=operators)
