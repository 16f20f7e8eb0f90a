"""What each rank runs: the head on rank 0, a relay loop on every other stage."""

from __future__ import annotations

from dataclasses import dataclass

from xrunner.comm import Comm
from xrunner.messages import StartMessage, StepMessage, StopMessage, TokensMessage
from xrunner.stage import StageExecutor, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """A stage's account of the run, sent to the head at its end."""

    stage: int
    log: tuple[StepRecord, ...]
    busy_s: float
    load_s: float
    bytes_read: int
    rows_compacted: int
    peak_memory_bytes: int


def await_start(comm: Comm, executor: StageExecutor) -> None:
    """Stages after the first: set up as the head's first message says."""
    message, _ = comm.receive(comm.rank - 1)
    assert isinstance(message, StartMessage), f"{message = }"
    if comm.rank < comm.size - 1:
        comm.send(comm.rank + 1, message)
    executor.start(message)


def serve_stage(comm: Comm, executor: StageExecutor) -> None:
    """Stages after the first, once started: execute what arrives and pass it on, until told to
    stop."""
    is_last = comm.rank == comm.size - 1
    following = comm.rank + 1
    while True:
        message, inputs = comm.receive(comm.rank - 1)
        if isinstance(message, StopMessage):
            if not is_last:
                comm.send(following, message)
            comm.flush()
            return
        assert isinstance(message, StepMessage) and inputs is not None, f"{message = }"
        out = executor.execute(message, inputs)
        if is_last:
            comm.send(0, TokensMessage(group=message.group), out)
        else:
            comm.send(following, message, out)
