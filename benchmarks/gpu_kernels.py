"""How near the CUDA kernels come to a GPU's memory, and how they do beside torch's.

    python benchmarks/gpu_kernels.py [--out benchmarks/results]

Attention of decoded tokens over entries in blocks of 16, in any order, of several sets of arguments
in turn, so that no cache holds them; attention of inputs, ours in one launch and torch's flash
attention a call each; the operators of rows. All in CUDA graphs, so that the host's time is left
out; medians. Beside them what a copy and a read of 4 GiB reach, and products of weights that no
cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from runner import options, today, write
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.contexts import encode_context
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.rules.slots import Span

_BLOCK, _ROUNDS, _UNCACHED_BYTES = 16, 12, 3 * 10**8
DECODED = [(n, 40, 40, 128, 300) for n in (1, 8, 32, 128, 256)] + [(32, 40, 40, 128, 1500)] + [
    (n, 32, 8, 128, 1000) for n in (1, 8, 64, 256)] + [
    (64, 64, 8, 128, 1000), (64, 9, 3, 64, 300), (4, 32, 8, 128, 8000)]
ENCODED = [(16, 64, 40, 40, 128), (16, 128, 40, 40, 128), (8, 256, 40, 40, 128),
           (4, 512, 40, 40, 128), (1, 2048, 40, 40, 128), (8, 256, 32, 8, 128),
           (16, 128, 9, 3, 64)]
Call = Callable[[], object]


def main() -> None:
    parser = options(__doc__)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    card = torch.cuda.get_device_name(device)
    ops = CudaOps(cuda_modules.CupyLauncher(device),
                  torch.cuda.get_device_properties(device).multi_processor_count)
    torch.manual_seed(0)
    text = "\n".join([
        f"# CUDA kernels on {card}", "",
        f"{today()}, PyTorch {torch.__version__}. "
        f"{(__doc__ or '').split(chr(10) * 2)[2]}", *memory(device), "",
        "| decoded: queries, heads / KV heads x size, mean context | us | GB/s |", "|---|---|---|",
        *(decoding(ops, device, *shape) for shape in DECODED), "",
        "| encoded: queries x tokens, heads / KV heads x size | ours, us | torch, us |"
        " ours, TFLOP/s | torch |", "|---|---|---|---|---|",
        *(encoding(ops, device, *shape) for shape in ENCODED), "",
        "| of rows, 128 x 5,120 | us |", "|---|---|", *rows(ops, device, 128, 5120), "",
        "| product, rows x inputs -> outputs | us | GB/s | TFLOP/s |", "|---|---|---|---|",
        *products(device, (8, 64, 128, 256), 5120)])
    write("gpu-kernels", text, arguments.out)


def seconds(calls: Sequence[Call]) -> float:
    """Of one of the calls, taken one after the other in a graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found)


def memory(device: torch.device) -> Iterator[str]:
    one, other = (torch.ones(1 << 30, device=device) for _ in range(2))
    copied, read = seconds([lambda: other.copy_(one)]), seconds([lambda: one.sum()])
    yield ""
    yield (f"A copy of 4 GiB: {2 * one.nbytes / copied / 1e9:,.0f} GB/s, read and written; a sum "
           f"of 4 GiB: {one.nbytes / read / 1e9:,.0f} GB/s.")


def sets_of(num_bytes: int) -> int:
    return min(max(2, _UNCACHED_BYTES // num_bytes + 1), 6)


def halves(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def decoding(ops: CudaOps, device: torch.device, n: int, heads: int, kv_heads: int, dim: int,
             mean: int) -> str:
    lengths = torch.randint(mean // 2, mean * 3 // 2 + 1, (n,), device=device)
    num_bytes = 4 * kv_heads * dim * int(lengths.sum())
    most = -(-int(lengths.max()) // _BLOCK)

    def call() -> Call:
        cache = (halves(device, n * most, kv_heads, _BLOCK, dim),
                 halves(device, n * most, kv_heads, _BLOCK, dim))
        table, query = torch.randperm(n * most, device=device).view(n, most), halves(
            device, n, heads, dim)
        return lambda: ops.decode_attention(query, cache, table, lengths, dim ** -0.5)

    took = seconds([call() for _ in range(sets_of(num_bytes))])
    return (f"| {n}, {heads}/{kv_heads} x {dim}, {mean} | {took * 1e6:.1f} | "
            f"{num_bytes / took / 1e9:,.0f} |")


def encoding(ops: CudaOps, device: torch.device, count: int, tokens: int, heads: int,
             kv_heads: int, dim: int) -> str:
    query = halves(device, count * tokens, heads, dim)
    cache = (halves(device, count, kv_heads, tokens, dim),
             halves(device, count, kv_heads, tokens, dim))
    step = encode_context([Span(i, 0, tokens, True) for i in range(count)], device)

    def torchs() -> None:
        for i in range(count):
            own = query[i * tokens:(i + 1) * tokens].transpose(0, 1)[None]
            keys, values = (part[i:i + 1] for part in cache)
            F.scaled_dot_product_attention(own, keys, values, is_causal=True,
                                           enable_gqa=heads != kv_heads)

    ours = seconds([lambda: ops.encode_attention(query, cache, step, dim ** -0.5)] * 4)
    other = seconds([torchs] * 4)
    flops = 2 * count * tokens**2 * heads * dim
    return (f"| {count} x {tokens}, {heads}/{kv_heads} x {dim} | {ours * 1e6:.0f} | "
            f"{other * 1e6:.0f} | {flops / ours / 1e12:.0f} | {flops / other / 1e12:.0f} |")


def rows(ops: CudaOps, device: torch.device, n: int, size: int) -> Iterator[str]:
    hidden, added, joint = (halves(device, n, width) for width in (size, size, 3 * size))
    weight, bias = halves(device, size), halves(device, size)
    cache = (halves(device, n, size // 128, 64, 128), halves(device, n, size // 128, 64, 128))
    slots, positions = torch.arange(n, device=device), torch.zeros(n, dtype=torch.long,
                                                                   device=device)
    angles = torch.ones(n, 64, device=device), torch.zeros(n, 64, device=device)
    for name, call in (
            ("add_layer_norm", lambda: ops.add_layer_norm(hidden, added, (weight, bias), 1e-5)),
            ("add_rms_norm", lambda: ops.add_rms_norm(hidden, added, weight, 1e-5)),
            ("place", lambda: ops.rotate_and_store(joint, None, cache, slots, positions)),
            ("place, rotated",
             lambda: ops.rotate_and_store(joint, angles, cache, slots, positions)),
            ("silu_mul", lambda: ops.silu_mul(joint[:, :2 * size].contiguous()))):
        yield f"| {name} | {seconds([call] * 8) * 1e6:.1f} |"


def products(device: torch.device, numbers: Sequence[int], size: int) -> Iterator[str]:
    for n in numbers:
        for inputs, outputs in ((size, 3 * size), (size, size), (size, 4 * size), (4 * size, size)):
            num_bytes = 2 * (inputs * outputs + n * (inputs + outputs))
            given = halves(device, n, inputs)
            weights = [halves(device, outputs, inputs) for _ in range(sets_of(num_bytes))]
            took = seconds([partial(F.linear, given, weight) for weight in weights])
            flops = 2 * n * inputs * outputs
            yield (f"| {n} x {inputs:,} -> {outputs:,} | {took * 1e6:.1f} | "
                   f"{num_bytes / took / 1e9:,.0f} | {flops / took / 1e12:.0f} |")


if __name__ == "__main__":
    main()
