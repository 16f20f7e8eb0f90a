"""The native operators against this machine's memory, and against torch doing the same.

    python benchmarks/kernels.py [--threads 2] [--out benchmarks/results]

Copies are compared with the bandwidth of one large copy (bytes copied a second), attention of
decoded tokens with that of reading. Both sides run in turns; the figures are medians. The model is
SmolLM2-135M in bfloat16: 30 layers, 9 heads that share 3 KV heads, head size 64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from floor import read_bytes_per_s
from runner import cpu, options, today, write

from xrunner.ops import kv_entries as kv
from xrunner.ops.attention import decode_attention, encode_attention
from xrunner.ops.contexts import decode_context, encode_context, layers_of, whole_inputs
from xrunner.ops.cpu import native
from xrunner.ops.four_bits import pack, unpack
from xrunner.ops.output_head import OutputHead
from xrunner.rules.slots import compaction_moves

LAYERS, SLOTS, HEADS, KV_HEADS, CAPACITY, DIM = 30, 128, 9, 3, 512, 64
HIDDEN, VOCABULARY = 576, 49152
DTYPE = torch.bfloat16
ROUNDS = 7
_COPY_BYTES = 2**29


class Row(NamedTuple):
    """One operator's medians; `amount`: bytes or floating-point operations of a call."""

    name: str
    amount: float
    native_s: float
    torch_s: float
    peak: float | None  # amount per second that the machine was seen to do; None: not compared

    def words(self) -> str:
        rate, other = self.amount / self.native_s / 1e9, self.amount / self.torch_s / 1e9
        share = "" if self.peak is None else f"{self.amount / self.native_s / self.peak:.0%}"
        return (f"| {self.name} | {self.native_s * 1e3:.2f} | {rate:.1f} | {share} | "
                f"{self.torch_s * 1e3:.2f} | {other:.1f} | {self.torch_s / self.native_s:.2f} |")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if native.library() is None:
        raise SystemExit(native.describe())
    text = "\n".join(table(arguments.threads)) + "\n"
    write("kernels", text, arguments.out)


def table(threads: int) -> list[str]:
    copied, read = copy_bytes_per_s(), read_bytes_per_s()
    rows = [*copies(copied), *decoding(read), *encoding(), *choosing(),
            *unpacking(2 * copied)]
    return [
        f"# Native operators on {cpu()}", "",
        f"{today()}; {threads} threads, {native.LEVELS[level()]}, "
        f"torch {torch.__version__}; one large copy: {copied / 1e9:.1f} GB/s, reading: "
        f"{read / 1e9:.1f} GB/s. Medians of {ROUNDS}, in turns.", "",
        "| operator | ms | GB/s (GFLOP/s) | of the machine's | torch, ms | torch's GB/s (GFLOP/s) "
        "| times torch |", "|---|---|---|---|---|---|---|", *(row.words() for row in rows)]


def copies(peak: float) -> list[Row]:
    store = torch.randn(LAYERS, 2, SLOTS, KV_HEADS, CAPACITY, DIM).to(DTYPE)
    lengths = contexts(SLOTS)
    entry = LAYERS * 2 * KV_HEADS * DIM * DTYPE.itemsize
    found = []
    for removed in (1, 40):
        moves = compaction_moves(SLOTS, range(removed))
        moved = [lengths[move.source] for move in moves]
        found.append(compare(f"compaction, {removed} of {SLOTS} slots", entry * sum(moved), peak,
                             lambda moves=moves, moved=moved: kv.compact(store, moves, moved)))
    for count in (2, 64):
        slots, tokens = range(0, SLOTS, SLOTS // count), lengths[:count]
        block = kv.gather(store, slots, tokens)
        amount = entry * sum(tokens)
        found.append(compare(f"gather, {count} queries", amount, peak,
                             lambda s=slots, t=tokens: kv.gather(store, s, t)))
        found.append(compare(f"scatter, {count} queries", amount, peak,
                             lambda s=slots, t=tokens, b=block: kv.scatter(store, s, t, b)))
    return found


def decoding(peak: float) -> list[Row]:
    """All layers of one step, so that a step's entries do not stay in the cache."""
    layers = layers_of(torch.randn(LAYERS, 2, SLOTS, KV_HEADS, CAPACITY, DIM).to(DTYPE))
    found = []
    for count in (4, 32, 100):
        lengths = contexts(count)
        query, step = torch.randn(count, HEADS, DIM).to(DTYPE), decode_context(lengths)

        def work(query=query, step=step) -> None:
            for cache in layers:
                decode_attention(query, cache, step)

        amount = LAYERS * 2 * KV_HEADS * DIM * DTYPE.itemsize * sum(lengths)
        found.append(compare(f"decode attention, {count} queries, {LAYERS} layers", amount, peak,
                             work))
    return found


def encoding() -> list[Row]:
    store = torch.randn(2, SLOTS, KV_HEADS, CAPACITY, DIM).to(DTYPE)
    found = []
    for lengths in ([128] * 16, [500] * 4, contexts(32)):
        step = encode_context(whole_inputs(lengths))
        query = torch.randn(sum(lengths), HEADS, DIM).to(DTYPE)
        flops = 4 * HEADS * DIM * sum(n * (n + 1) // 2 for n in lengths)
        name = f"encode attention, {len(lengths)} inputs, {sum(lengths):,} tokens (GFLOP/s)"
        found.append(compare(name, flops, None, lambda q=query, s=step: encode_attention(
            q, (store[0], store[1]), s)))
    return found


def choosing() -> list[Row]:
    """The head, its weights as float32, and the largest logit of each query."""
    head = OutputHead(torch.randn(VOCABULARY, HIDDEN).to(DTYPE))
    head.pack(torch.float32)
    found = []
    for count in (4, 100):
        x = torch.randn(count, HIDDEN)
        found.append(compare(f"head and the largest logit, {count} queries (GFLOP/s)",
                             2 * count * HIDDEN * VOCABULARY, None, lambda x=x: head.best(x)))
    return found


def unpacking(peak: float) -> list[Row]:
    """A weight out of 4 bits and into them, larger than the caches; bytes read and written."""
    found = []
    for dtype in (DTYPE, torch.float32):
        weight = torch.randn(4096, 8192).to(dtype)
        packed, out = pack(weight), torch.empty_like(weight)
        amount, name = weight.nbytes + packed.nbytes, str(dtype).removeprefix("torch.")
        found.append(compare(f"4 bits to {name}, {weight.numel():,} elements", amount, peak,
                             lambda p=packed, o=out: unpack(p, o)))
        found.append(compare(f"{name} to 4 bits, {weight.numel():,} elements", amount, peak,
                             lambda w=weight: pack(w)))
    return found


def contexts(count: int) -> list[int]:
    """Mean 200, longest 400: of task T with half of its output there."""
    drawn = np.random.default_rng(0).normal(200, 80, count)
    return np.clip(drawn.round(), 16, 400).astype(int).tolist()


def compare(name: str, amount: float, peak: float | None, work: Callable[[], object]) -> Row:
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS + 1):  # the first of each warms up
        for is_native, seconds in taken.items():
            with nullcontext() if is_native else native.torch_only():
                start = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - start)
    return Row(name, amount, median(taken[True]), median(taken[False]), peak)


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[1:])


def copy_bytes_per_s() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / median(seconds)


def level() -> int:
    lib = native.library()
    assert lib is not None
    return int(lib.xgpt_level())


if __name__ == "__main__":
    main()
