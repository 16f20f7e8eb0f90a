"""The CUDA sources compiled as cupy does it on a user's machine: by NVRTC, which has neither the
headers of nvcc nor the host's. `XGPT_NVRTC` is the path of its library, whose wheel needs no GPU;
without it there is nothing to compile by (.ci/run has it)."""

import ctypes
import os
import re
from pathlib import Path

import pytest

from xrunner.ops.cuda.cuda_modules import SOURCES, source_of

LIBRARY = os.environ.get("XGPT_NVRTC", "")
pytestmark = pytest.mark.skipif(not LIBRARY, reason="XGPT_NVRTC names no library")


def compiled(source: str, generation: int) -> tuple[str, bytes]:
    """What NVRTC says of a source, and its machine code; none where it refuses."""
    for beside in Path(LIBRARY).parent.glob("libnvrtc-builtins.so.*"):  # which it asks for by name
        ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
    lib, program = ctypes.CDLL(LIBRARY), ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None,
                                  None) == 0
    options = [f"--gpu-architecture=sm_{generation}".encode(), b"--std=c++17"]
    code = lib.nvrtcCompileProgram(program, len(options),
                                   (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    said = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, said)
    binary = b""
    if code == 0:
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        binary = cubin.raw
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return said.value.decode(), binary


@pytest.mark.parametrize("generation", [80, 90, 100])
@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_is_in_what_nvrtc_makes(name, generation):
    source = source_of(name)
    said, binary = compiled(source, generation)
    assert binary and not said.strip(), said
    kinds = {"KERNEL_AS": [""], "KERNEL": ["_float32", "_bfloat16", "_float16"],
             "KERNEL_OF_HALVES": ["_bfloat16", "_float16"]}
    kernels = [kernel + kind
               for macro, kernel in re.findall(r"^(KERNEL\w*)\((\w+),", source, re.M)
               for kind in kinds[macro]]
    assert kernels
    for kernel in kernels:  # a symbol of that name: cupy looks for it
        assert f"\0{kernel}\0".encode() in binary, kernel


def test_what_nvrtc_refuses_is_seen():
    said, binary = compiled('#include <vector>\nextern "C" __global__ void none() {}', 90)
    assert not binary and "vector" in said
