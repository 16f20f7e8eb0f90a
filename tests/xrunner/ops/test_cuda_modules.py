"""Whether the CUDA kernels serve on a GPU, and what is said of it: a GPU is stood in for by what
executes the sources on the CPU, sound or with a kernel that is wrong."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cpu_cuda
import cuda_check
import gpu_report
import pytest
import torch

from xgpt.core.errors import XgptError
from xrunner.ops import build
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def launcher():
    return cpu_cuda.CpuLauncher(cpu_cuda.built())


class Wrong(cpu_cuda.CpuLauncher):
    """Leaves out these kernels."""

    def __init__(self, sound: cpu_cuda.CpuLauncher, kernels: tuple[str, ...]) -> None:
        self._sound, self._kernels = sound, kernels

    def __call__(self, launch: Launch) -> None:
        if not launch.kernel.startswith(self._kernels):
            self._sound(launch)


class Refusing(cpu_cuda.CpuLauncher):
    def __init__(self) -> None:
        return

    def __call__(self, launch: Launch) -> None:
        raise XgptError("this card takes no launch")


@pytest.mark.parametrize(("wish", "words"), [
    ("off", "XGPT_NATIVE is off"), ("auto", "cupy is not installed"), ("require", "")])
def test_none_are_loaded_without_cupy_or_where_they_are_not_wanted(monkeypatch, wish, words):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    if words:
        assert words in cuda_modules._load(torch.device("cuda", 0), wish).reason
        return
    with pytest.raises(XgptError, match="require.*cupy is not installed"):
        cuda_modules._load(torch.device("cuda", 0), wish)


def host_clock(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


KERNELS = ("place_bfloat16", "silu_mul_bfloat16", "decode_tiles_128_bfloat16",
           "encode_tiles_64_bfloat16")


def test_a_report_has_every_case_and_what_is_wrong_with_it(launcher, monkeypatch):
    """Memory that is taken holds NaN: what a kernel that was left out should have written may else
    be there from before."""
    monkeypatch.setattr(cuda_check, "_HEADS", ((4, 1, 12), (2, 1, 16), (2, 2, 72)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wrong = Wrong(launcher, KERNELS)
        found = list(gpu_report.records(CudaOps(wrong, 100), wrong, CPU, host_clock, (1,)))
    finally:
        torch.use_deterministic_algorithms(False)
    differing = {(record["operator"], record["dtype"]) for record in found if not record["agrees"]}
    assert differing == {(name, "bfloat16") for name in (
        "place", "silu_mul", "decode_attention", "encode_attention")}
    assert all(r["bytes_per_s"] > 0 and r["off_by"] <= r["tolerance"] for r in found if r["agrees"])
    refused = next(gpu_report.records(CudaOps(Refusing(), 1), Refusing(), CPU, host_clock, (1,)))
    assert refused["agrees"] is False and "kernel_s" not in refused


@pytest.mark.parametrize("name", cuda_modules.SOURCES)
def test_a_source_for_cupy_stands_alone(name):
    """But for the header that a C++ compiler alone sees."""
    text = cuda_modules.source_of(name)
    included = [line for line in text.splitlines() if line.startswith("#include")]
    assert included == ['#include "cpu_cuda.h"'] and "KERNEL(" in text


def test_every_source_is_among_those_that_are_loaded():
    there = {path.stem for path in cuda_modules.kernels_folder().glob("*.cu")}
    assert there == set(cuda_modules.SOURCES) == set(cpu_cuda.SOURCES)


SCRIPT = """
import torch
from pathlib import Path
import cuda_check
from cpu_cuda import CpuLauncher
from xrunner.ops.cuda.kernels import CudaOps
torch.set_num_threads(1)
launch = CpuLauncher({name: Path(r"FOLDER") / f"{name}.so" for name in NAMES})
cuda_check._HEADS = ((3, 1, 16), (2, 2, 33), (2, 1, 72), (1, 1, 256))
found = [case.found() for case in cuda_check.cases(CudaOps(launch, 4), launch,
                                                   torch.device("cpu"), size=1)]
print(len(found), "cases")
"""


@pytest.mark.slow
def test_no_kernel_leaves_its_memory_under_addresssanitizer():
    """Global memory, which is torch's, and shared memory; undefined behaviour, too."""
    folder = cpu_cuda.built(cpu_cuda.SANITIZE)["rows"].parent
    script = SCRIPT.replace("FOLDER", str(folder)).replace("NAMES", repr(cpu_cuda.SOURCES))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=280, check=False, env=cpu_cuda.sanitizer_environment())
    assert done.returncode == 0 and "cases" in done.stdout, done.stderr[-3000:]
