"""CUDA kernels of csrc/: compiled by cupy (NVRTC, without nvcc), launched on torch's stream.

An operator's public function asks `ops_for`. If cupy is missing or the card refuses the kernels,
torch is used, and `describe` says so in a line. `XGPT_NATIVE` (xrunner.ops.cpu.native) can turn
them off or require them. `xgpt doctor --gpu` compares every kernel with torch on a card."""

import ctypes
import os
import re
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.ops.build import VARIABLE, source_folder, why_no_cupy
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import DTYPES, Launch, Launcher

SOURCES = ("decode_attention", "decode_tiles", "encode_attention", "encode_tiles", "rows", "kv")
_HEADER = re.compile(r'^#include "(cuda_\w+\.h)"$', re.M)
_USUAL_SHARED_BYTES = 48 << 10  # a kernel must ask for more than that


class Gpu(NamedTuple):
    """Our kernels on one GPU. `reason`: why there are none."""

    ops: CudaOps | None
    launch: Launcher | None
    reason: str = ""


_gpus: dict[torch.device, Gpu] = {}
_lock = threading.Lock()


def ops_for(tensor: Tensor) -> CudaOps | None:
    """The operators, if they support this tensor; None if torch is used."""
    if tensor.is_cpu and not _gpus:  # the usual case on a CPU
        return None
    return gpu_of(tensor.device).ops if tensor.dtype in DTYPES else None


def launch_for(tensor: Tensor) -> Launcher | None:
    """Launches the kernels of xrunner.ops.cuda.cuda_kv for this tensor; None if torch copies."""
    if tensor.is_cpu and not _gpus:
        return None
    return None if tensor.element_size() % 2 else gpu_of(tensor.device).launch


def gpu_of(device: torch.device) -> Gpu:
    """The kernels on a device, compiled on first use. Raises XgptError if required and
    unavailable."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    gpu = _gpus.get(device)
    if gpu is not None:
        return gpu
    if device.type != "cuda":
        return Gpu(None, None, reason="not a GPU")
    with _lock:
        if device not in _gpus:
            _gpus[device] = _load(device, os.environ.get(VARIABLE, "").strip() or "auto")
        return _gpus[device]


def describe(device: torch.device) -> str:
    """Whether our kernels are used on that GPU, or why not, in a line."""
    gpu = gpu_of(device)
    if gpu.ops is None:
        return f"CUDA operators: none, torch's serve: {gpu.reason}"
    return "CUDA operators: ours"


def _load(device: torch.device, wish: str) -> Gpu:
    if wish == "off":
        return Gpu(None, None, reason=f"{VARIABLE} is off")
    why = why_no_cupy()
    if why is None:
        try:
            launch = CupyLauncher(device)
            launch.compile_all()
        except XgptError as error:
            why = str(error)
        else:
            import_module("torch.nn.attention.bias")  # for chunks' masks; takes a second
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            return Gpu(CudaOps(launch, processors), launch)
    if wish == "require":
        raise XgptError(f"{VARIABLE} is require, and the CUDA kernels cannot serve: {why}")
    return Gpu(None, None, reason=why)


def kernels_folder() -> Path:
    """Folder of the kernels' sources."""
    return source_folder() / "ops" / "cuda"


def source_of(name: str) -> str:
    """A source with its headers inlined: cupy caches compiled code by the text."""
    folder, seen = kernels_folder(), set[str]()

    def inlined(file: str) -> str:
        def once(found: re.Match[str]) -> str:
            header = found[1]
            if header in seen:
                return ""
            seen.add(header)
            return inlined(header)

        return _HEADER.sub(once, (folder / file).read_text("utf-8"))

    return inlined(f"{name}.cu")


class CupyLauncher:
    """Launches kernels; compiles each source on first use, or all at once. Raises XgptError if
    cupy, the compiler or the driver refuse."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # a number: torch looks a device object up anew, several calls each time
        self._index = device.index
        self._cupy = _import_cupy()
        self._refusals = (self._cupy.cuda.compiler.CompileException,
                          self._cupy.cuda.driver.CUDADriverError,
                          self._cupy.cuda.runtime.CUDARuntimeError)
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}

    def compile_all(self) -> None:
        """Compiles every source, so that errors show before a run begins."""
        for source in SOURCES:
            try:
                with self._cupy.cuda.Device(self._index):
                    self._module(source).compile()
            except self._refusals as error:
                raise _refused(f"{source}.cu cannot be compiled", error) from error

    def __call__(self, launch: Launch) -> None:
        try:
            with torch.cuda.device(self._index):
                self._run(launch)
        except self._refusals as error:
            raise _refused(f"the kernel {launch.kernel} cannot be launched", error) from error

    def _run(self, launch: Launch) -> None:
        kernel = self._kernels.get(launch.kernel) or self._loaded(launch.source, launch.kernel)
        if (launch.shared_bytes > _USUAL_SHARED_BYTES
                and launch.shared_bytes > kernel.max_dynamic_shared_size_bytes):
            kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
        # the struct's address is the only argument: cupy's own call takes only numbers and arrays
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(launch.arguments))
        self._cupy.cuda.driver.launchKernel(
            kernel.kernel.ptr, *launch.grid, launch.threads, 1, 1, launch.shared_bytes,
            torch.cuda.current_stream(self._index).cuda_stream, ctypes.addressof(arguments), 0)

    def _loaded(self, source: str, kernel: str) -> Any:
        with self._cupy.cuda.Device(self._index):
            self._kernels[kernel] = self._module(source).get_function(kernel)
        return self._kernels[kernel]

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            self._modules[source] = self._cupy.RawModule(
                code=source_of(source), options=("--std=c++17",), backend="nvrtc")
        return self._modules[source]


def _refused(what: str, error: Exception) -> XgptError:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return XgptError(f"{what}: {words[0]}")


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:  # for another CUDA than the driver's, say
        raise XgptError(f"cupy cannot be imported: {error}".splitlines()[0]) from error
    return cupy
