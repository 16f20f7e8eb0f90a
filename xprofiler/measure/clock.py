"""Clocks of the device under measurement, CPU and CUDA, behind one interface, and what they say the
device does at most: the roofline of this machine."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from xprofiler.profile import Peaks

_SIDE = 2048  # of a square matrix product: 17 GFLOP
_BYTES = 256 * 2**20  # past every cache
_CUDA_SCALE = 4  # a GPU needs more to fill it
_ROUNDS = 8


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


def measure_peaks(dtype: torch.dtype, device: torch.device) -> Peaks:
    """What one rank's device does at most while all ranks are at work: the best of a few rounds,
    since a peak is what the device can do, not what it usually does."""
    side = _SIDE * (_CUDA_SCALE if device.type == "cuda" else 1)
    matrix = torch.randn(side, side, device=device).to(dtype)
    product_s = _best_s(lambda: matrix @ matrix, device)
    count = _BYTES * (_CUDA_SCALE if device.type == "cuda" else 1) // 4
    source = torch.ones(count, device=device)
    read_s = _best_s(lambda: source.sum(), device)
    return Peaks(flops_per_s=2 * side**3 / product_s, bandwidth_bytes_per_s=4 * count / read_s,
                 source=f"measured: {side} x {side} matrix product, {4 * count >> 20} MiB read")


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    clock = clock_of(device)
    times = []
    for _ in range(_ROUNDS):
        begin = clock.mark()
        work()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(begin, end))
    return min(times)
