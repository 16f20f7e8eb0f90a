"""Processes that plan units of a sweep side by side, and hand each row over as soon as it is there.

Each is a fresh interpreter with one thread for arithmetic. It ends when its end of the pipe does:
with the sweep, however that ended."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from xgpt.app.sweeps.points import Unit, rows_of
from xgpt.core.errors import XgptError
from xgpt.report.sweep_rows import Row

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(slots=True)
class _SweepWorker:
    process: BaseProcess
    pipe: "Connection[Any, Any]"
    unit: Unit | None = None


def planned_by_processes(units: Sequence[Unit], count: int) -> Iterator[Row]:
    """Rows of all units as they are planned, by so many processes. Raises XgptError where one of
    them died."""
    context, todo = multiprocessing.get_context("spawn"), list(reversed(units))
    workers: list[_SweepWorker] = []
    try:
        with _one_thread_each():
            for _ in range(min(count, len(units))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                workers.append(_SweepWorker(process, ours))
        for worker in workers:
            _hand_out(worker, todo)
        while busy := {worker.pipe: worker for worker in workers if worker.unit is not None}:
            for pipe in wait(list(busy)):
                row = _received(busy[pipe])  # type: ignore[index]
                if row is None:
                    _hand_out(busy[pipe], todo)  # type: ignore[index]
                else:
                    yield row
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def _hand_out(worker: _SweepWorker, todo: list[Unit]) -> None:
    worker.unit = todo.pop() if todo else None
    if worker.unit is not None:
        worker.pipe.send(worker.unit)


def _received(worker: _SweepWorker) -> Row | None:
    """A row, or None for the end of its unit."""
    try:
        row: Row | XgptError | None = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        assert worker.unit is not None
        raise XgptError(
            f"a process that planned {worker.unit.points[0].values} ended with code "
            f"{worker.process.exitcode}; what was planned is kept, and the same command goes on "
            "from there") from None
    if isinstance(row, XgptError):
        raise row
    return row


def _work(pipe: "Connection[Any, Any]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep is asked to stop, and stops this
    try:
        while True:
            _answer(pipe.recv(), pipe.send)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(unit: Unit, send: Callable[[Row | None], None]) -> None:
    for row in rows_of(unit):
        send(row)
    send(None)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started within have one thread for arithmetic."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
