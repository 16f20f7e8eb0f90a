"""Every CUDA kernel compared with torch on this machine's GPU, and timed, and decode steps in CUDA
graphs with the same launched kernel by kernel: what `xgpt doctor --gpu` runs. Prints a line a
case, and writes the file that it is given.

A kernel's time includes the copies of what it works on in place. Its reference is the shortest
torch that says the same, not the quickest: what a time is to be held against is the card's own
copy rate, which the first line has.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import graph_trial
import torch
from cuda_check import DTYPES, Case, cases, off_by, tolerance

from xgpt.core.errors import XgptError
from xrunner.engine.graphs import Capture, CaptureError, CudaCapture
from xrunner.ops.build import why_no_cupy
from xrunner.ops.cuda.cuda_modules import SOURCES, CupyLauncher, source_of
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launcher

SIZES = (1, 8)  # of cuda_check.cases: small ones, and as in a run
CAPTURED = (1, 4, 32)  # queries of a step in a graph
_TIMED_S = 0.02
_COPIED_BYTES = 256 << 20

Clock = Callable[[Callable[[], Any]], float]


def gpu_clock(work: Callable[[], Any]) -> float:
    """Seconds of one call on the GPU: as many as fill 20 ms, after one that warms up."""
    def timed(calls: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    work()
    once = timed(1)
    calls = min(max(int(_TIMED_S / max(once, 1e-6)), 1), 1000)
    return timed(calls) / calls


def records(ops: CudaOps, launch: Launcher, device: torch.device, clock: Clock,
            sizes: tuple[int, ...] = SIZES) -> Iterator[dict[str, Any]]:
    """A record for each case: how far off, what is allowed, seconds, bytes per second."""
    for size in sizes:
        for case in cases(ops, launch, device, size=size):
            yield record_of(case, clock)


def record_of(case: Case, clock: Clock) -> dict[str, Any]:
    record = {"operator": case.operator, "shape": case.shape,
              "dtype": str(case.dtype).removeprefix("torch."), "tolerance": tolerance(case.dtype),
              "num_bytes": case.num_bytes}
    try:
        off = off_by(case)
        agrees = off <= tolerance(case.dtype)
        record |= {"off_by": off if off != float("inf") else None, "agrees": agrees}
        if agrees:
            seconds = clock(case.found)
            record |= {"kernel_s": seconds, "bytes_per_s": case.num_bytes / seconds}
    except (RuntimeError, XgptError) as error:  # out of memory; a kernel that faulted
        record |= {"agrees": False, "error": str(error).splitlines()[0]}
    return record


def graph_records(device: torch.device, capture: Capture, clock: Clock) -> Iterator[dict[str, Any]]:
    """A record for each captured decode step of a toy in each type."""
    for dtype in DTYPES:
        graphs = graph_trial.toy_graphs(dtype, device, capture)
        num_bytes = sum(weight.nbytes for layer in graphs.model.layers
                        for product in layer.products for weight in product.tensors)
        for size in CAPTURED:
            allowed = graph_trial.STEPS_OFF * tolerance(dtype)
            record = {"operator": "decode step in a graph", "shape": f"{size} queries of a toy",
                      "dtype": str(dtype).removeprefix("torch."), "tolerance": allowed,
                      "num_bytes": num_bytes}
            try:
                step, off = graph_trial.tried(graphs, size)
                with torch.inference_mode():
                    seconds = clock(step.replayed)
                record |= {"off_by": off if off != float("inf") else None, "agrees": off <= allowed,
                           "kernel_s": seconds, "bytes_per_s": num_bytes / seconds}
            except (CaptureError, RuntimeError, XgptError) as error:
                record |= {"agrees": False, "error": str(error).splitlines()[0]}
            yield record


def source_digest() -> str:
    """A fingerprint of the kernels' sources."""
    return hashlib.sha256("".join(map(source_of, SOURCES)).encode()).hexdigest()[:16]


def card_of(device: torch.device) -> dict[str, Any]:
    """What the results are of: the card, the software, the sources, the card's copy rate."""
    import cupy

    card = torch.cuda.get_device_properties(device)
    source = torch.empty(_COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = _COPIED_BYTES / gpu_clock(lambda: target.copy_(source))
    return {"card": card.name, "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count, "memory_bytes": card.total_memory,
            "torch": torch.__version__, "cupy": str(cupy.__version__),
            "driver": cupy.cuda.runtime.driverGetVersion(), "sources": source_digest(),
            "copy_bytes_per_s": rate}


def main(file: Path) -> None:
    """Raises XgptError where there is no GPU, no cupy, or a kernel that differs."""
    if not torch.cuda.is_available():
        raise XgptError(f"PyTorch {torch.__version__} can use no GPU here")
    if (why := why_no_cupy()) is not None:
        raise XgptError(why)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_float32_matmul_precision("highest")
    launch = CupyLauncher(device)
    ops = CudaOps(launch, torch.cuda.get_device_properties(device).multi_processor_count)
    write(card_of(device), chain(
        records(ops, launch, device, gpu_clock),
        graph_records(device, CudaCapture(device), gpu_clock)), file)


def write(card: dict[str, Any], records: Iterator[dict[str, Any]], file: Path) -> None:
    """Prints each record as it comes, and writes all. Raises XgptError where one differs."""
    cases = []
    for case in records:
        cases.append(case)
        share = case.get("bytes_per_s", 0.0) / card["copy_bytes_per_s"]
        print(f"{case['operator']}, {case['shape']}, {case['dtype']}: " + (
            f"agrees, {share:.0%} of the copy rate" if case["agrees"] else "DIFFERS"), flush=True)
    file.write_text(json.dumps({"schema_version": 1, "xgpt": metadata.version("xgpt"), **card,
                                "cases": cases}, indent=1) + "\n", encoding="utf-8")
    if differing := dict.fromkeys(case["operator"] for case in cases if not case["agrees"]):
        raise XgptError(f"{', '.join(differing)}: not what torch computes on this card; "
                        f"XGPT_NATIVE=off leaves our kernels out. Please send {file.name} to the "
                        "project")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except XgptError as error:
        raise SystemExit(f"{error}") from None
