"""What one rank's device does at most while all ranks are at work: the roofline of this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xprofiler.measure.clock import clock_of
from xprofiler.profile import Peaks

_SIDE = 2048  # of a square matrix product: 17 GFLOP
_BYTES = 256 * 2**20  # past every cache
_CUDA_SCALE = 4  # a GPU needs more to fill it
_ROUNDS = 8


def measure_peaks(dtype: torch.dtype, device: torch.device) -> Peaks:
    """Best of a few rounds: a peak is what the device can do, not what it usually does."""
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
