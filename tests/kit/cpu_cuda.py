"""The .cu sources of csrc/ compiled by a C++ compiler and executed on the CPU (cpu_cuda.h)."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from xrunner.ops.build import BuildError, find_compiler
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda.cuda_modules import kernels_folder
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
SOURCES = ("decode_attention", "decode_tiles", "encode_attention", "encode_tiles", "rows", "kv")
# Hidden: what executes a library's kernels is that library's own, however others were compiled.
FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fno-strict-aliasing",
         "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Of a block's threads (cpu_cuda.h): all in turn, or a warp as far as it gets.
ORDERS = {"rising": 0, "falling": 1, "by warp": 2, "by warp, falling": 3}
WORDS = {1: "sizes of the launch that no GPU takes", 2: "not all threads come to a barrier"}


class _Launch(ctypes.Structure):
    """Launch of cpu_cuda.h."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "grid_x", "grid_y", "grid_z", "threads", "shared_bytes", "order")]


def build(folder: Path, extra: Sequence[str] = (), sources: Path | None = None,
          names: Sequence[str] = SOURCES) -> dict[str, Path]:
    """Each source as a library of its own in `folder`; skips the test without a compiler."""
    try:
        compiler = find_compiler()
    except BuildError as why:
        pytest.skip(f"the CUDA sources cannot be executed here: {why}")
    started = []
    for name in names:
        target = folder / f"{name}.so"
        source = (sources or kernels_folder()) / f"{name}.cu"
        started.append((target, subprocess.Popen(
            [*compiler.command, *FLAGS, *extra, "-I", str(kernels_folder()), "-I", str(_HERE),
             "-o", str(target), str(source)], stderr=subprocess.PIPE, text=True)))
    for target, process in started:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, f"{target.name}: {said}"
    return {target.stem: target for target, _ in started}


@cache
def built(extra: Sequence[str] = ()) -> dict[str, Path]:
    """The libraries of the sources as they are now, compiled once with these options, too, and kept
    in pytest's cache."""
    digest = hashlib.sha256("\0".join([*FLAGS, *extra]).encode())
    for path in sorted([*kernels_folder().glob("*.cu"), *kernels_folder().glob("c*.h"),
                        *_HERE.glob("c*.h")]):
        digest.update(path.read_bytes())
    folder = _ROOT / ".pytest_cache" / "cpu_cuda" / digest.hexdigest()[:16]
    if not folder.is_dir():
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        made.mkdir(parents=True)
        build(made, extra)
        if folder.is_dir():  # another process was quicker
            return {name: made / f"{name}.so" for name in SOURCES}
        made.rename(folder)
    return {name: folder / f"{name}.so" for name in SOURCES}


def sanitizer_environment() -> dict[str, str]:
    """For a Python that loads a library built with AddressSanitizer: its runtime goes first."""
    compiler = find_compiler()
    found = subprocess.run([*compiler.command, "-print-file-name=libasan.so"],
                           capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"{compiler.command[0]} has no AddressSanitizer")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    return {**os.environ, "LD_PRELOAD": found, "PYTHONPATH": os.pathsep.join(folders),
            "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}


class CpuLauncher:
    """Carries launches out on the CPU, the threads of a block in the `order` of ORDERS."""

    def __init__(self, libraries: dict[str, Path]) -> None:
        self._libraries = {name: ctypes.CDLL(str(path)) for name, path in libraries.items()}
        self.order = 0
        self.launched: list[Launch] = []

    def __call__(self, launch: Launch) -> None:
        self.launched.append(launch)
        shape = _Launch(*launch.grid, launch.threads, launch.shared_bytes, self.order)
        run = getattr(self._libraries[launch.source], f"run_{launch.kernel}")
        code = run(ctypes.byref(shape), ctypes.byref(launch.arguments))
        assert code == 0, f"{launch.kernel}: {WORDS[code]}"


@contextmanager
def using(launcher: CpuLauncher, multiprocessors: int = 1) -> Iterator[None]:
    """While it lasts, the operators' public functions take the CUDA kernels for tensors on the
    CPU, as they do for those on a GPU of so many multiprocessors."""
    before = dict(cuda_modules._gpus)
    cuda_modules._gpus[torch.device("cpu")] = cuda_modules.Gpu(
        CudaOps(launcher, multiprocessors), launcher)
    try:
        yield
    finally:
        cuda_modules._gpus.clear()
        cuda_modules._gpus.update(before)
