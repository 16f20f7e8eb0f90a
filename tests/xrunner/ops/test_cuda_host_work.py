"""What the host does for the kernels of a layer, where no GPU is: how many functions of Python it
calls, and what it hands to the driver."""

import sys
from types import FrameType

import pytest
import torch

from xrunner.ops.contexts import Span, encode_context
from xrunner.ops.cuda import CudaOps
from xrunner.ops.launch import Launch

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
