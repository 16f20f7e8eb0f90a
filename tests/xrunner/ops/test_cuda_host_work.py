"""What the host does for the kernels of a layer, where no GPU is: how many functions of Python it
calls, and what it hands to the driver."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from xgpt.core.errors import XgptError
from xrunner.ops import cuda_modules
from xrunner.ops.contexts import Span, encode_context
from xrunner.ops.cuda import CudaOps
from xrunner.ops.launch import SILU_MUL, Launch, Launcher, filled

QUERIES, HEADS, KV_HEADS, DIM = 6, 4, 2, 64
SIZE = HEADS * DIM


def layer(ops: CudaOps, *, encodes: bool) -> None:
    """What a layer of Llama asks of the kernels."""
    dtype = torch.bfloat16
    cache = tuple(torch.zeros(QUERIES, KV_HEADS, 32, DIM, dtype=dtype) for _ in range(2))
    joint = torch.zeros(QUERIES, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    query = joint[:, :SIZE].view(QUERIES, HEADS, DIM)
    hidden, weight = torch.zeros(QUERIES, SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)
    slots = torch.arange(QUERIES)
    angles = torch.zeros(QUERIES, DIM // 2)
    span = encode_context([Span(0, 0, QUERIES, True)])
    span.groups(65535)  # once a step
    calls.clear()
    sys.setprofile(count)
    try:
        ops.add_rms_norm(hidden, hidden, weight, 1e-5)
        ops.place(joint, (angles, angles), cache, slots, slots)
        if encodes:
            ops.encode_attention(query, cache, span, 0.125)
        else:
            ops.decode_attention(query, cache, slots[:, None], slots + 1, 0.125)
        ops.add_rms_norm(hidden, hidden, weight, 1e-5)
        ops.silu_mul(hidden)
    finally:
        sys.setprofile(None)


calls: list[str] = []


def count(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and "/xrunner/" in frame.f_code.co_filename:
        calls.append(frame.f_code.co_name)


@pytest.mark.parametrize("encodes", [False, True])
def test_a_layer_calls_few_functions_of_ours_before_its_launches(*, encodes):
    launched: list[Launch] = []
    layer(CudaOps(launched.append, 132), encodes=encodes)
    kernels = [launch.source for launch in launched]
    assert kernels[0] == kernels[1] == kernels[-1] == "rows" and len(launched) >= 5
    assert len(calls) <= 45, sorted(calls)


class Refused(Exception):
    """Of cupy's compiler, or of the driver."""


def launcher_of(monkeypatch: pytest.MonkeyPatch, launch_kernel: Any) -> Launcher:
    """One over a driver, a stream and a device that are none."""
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=77), max_dynamic_shared_size_bytes=1 << 20)
    cupy = SimpleNamespace(cuda=SimpleNamespace(
        compiler=SimpleNamespace(CompileException=Refused), Device=contextlib.nullcontext,
        driver=SimpleNamespace(CUDADriverError=Refused, launchKernel=launch_kernel),
        runtime=SimpleNamespace(CUDARuntimeError=Refused)),
        RawModule=lambda **_: SimpleNamespace(get_function=lambda name: kernel))
    monkeypatch.setattr(cuda_modules, "_import_cupy", lambda: cupy)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream",
                        lambda index: SimpleNamespace(cuda_stream=1000 + index))
    return cuda_modules.CupyLauncher(torch.device("cuda", 3))


def test_the_driver_is_handed_the_struct_on_the_stream_of_its_device(monkeypatch):
    given = []

    def launch_kernel(*words: int) -> None:
        struct = ctypes.c_void_p.from_address(words[-2]).value
        given.append((*words[:-2], SILU_MUL.from_address(struct or 0).inner))

    launch = launcher_of(monkeypatch, launch_kernel)
    arguments = filled(SILU_MUL, out=torch.zeros(1), joint=torch.zeros(1), tokens=1, inner=24,
                       is_wide=False)
    launch(Launch("rows", "silu_mul_float32", (5, 2, 1), 256, 16, arguments))
    assert given == [(77, 5, 2, 1, 256, 1, 1, 16, 1003, 24)]


def test_what_the_driver_refuses_is_told_of_the_kernel(monkeypatch):
    def launch_kernel(*_: int) -> None:
        raise Refused("an illegal address\nat line 4")

    launch = launcher_of(monkeypatch, launch_kernel)
    with pytest.raises(XgptError, match="silu_mul cannot be launched: an illegal address$"):
        launch(Launch("rows", "silu_mul", (1, 1, 1), 256, 0, SILU_MUL()))
