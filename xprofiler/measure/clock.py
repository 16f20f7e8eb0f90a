"""Clocks of the device under measurement, CPU and CUDA, behind one interface."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments in the device's own order of work; their distance is read once settled."""

    def mark(self) -> Any:
        """This moment, after all work issued before it."""
        ...

    def settle(self) -> None:
        """Returns when everything issued has happened; only then are distances known."""
        ...

    def seconds(self, first: Any, second: Any) -> float: ...


class CpuClock:
    """Work on a CPU has happened when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is ever under way."""

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """CUDA events on the current stream: times of the device, without waiting for the host."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()
