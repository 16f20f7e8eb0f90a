"""Whether the CUDA kernels serve on a GPU, and what is said of it: a GPU is stood in for by what
executes the sources on the CPU, sound or with a kernel that is wrong. And their launches: what goes
in one, what is refused, what is written nowhere. What they compute is seen where the other
operators are (kit/implementations.py)."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import cpu_cuda
import cuda_check
import cuda_reference as reference
import gpu_report
import pytest
import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.ops import attention, build
from xrunner.ops.attention import encode_attention
from xrunner.ops.contexts import encode_context
from xrunner.ops.cpu import native
from xrunner.ops.cuda import cuda_kv, cuda_modules
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launch
from xrunner.rules.slots import Move, Span

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


SENTINEL = 77.0  # what a buffer holds where nothing may be written


@pytest.fixture
def ops(launcher):
    return CudaOps(launcher, multiprocessors=1)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(expected: list[Tensor], found: list[Tensor]) -> None:
    off = cuda_check.distance(expected, found)
    assert off <= cuda_check.tolerance(expected[0].dtype), f"{off = }"


def test_a_small_batch_has_its_context_split(launcher):
    cache = drawn(1, 1, 2, 600, 64), drawn(2, 1, 2, 600, 64)
    query, blocks, lengths = drawn(3, 1, 2, 64), torch.tensor([[0]]), torch.tensor([577])
    before = len(launcher.launched)
    found = CudaOps(launcher, multiprocessors=100).decode_attention(query, cache, blocks, lengths,
                                                                    0.125)
    names = [made.kernel for made in launcher.launched[before:]]
    assert names == ["decode_attention_1_float32", "combine_parts_float32"]
    assert launcher.launched[before].grid == (2, 600 // 128, 1)
    agrees([reference.decode(query, cache, blocks, lengths, 0.125)], [found])


def test_a_query_outside_the_cache_gets_zeros(ops):
    cache = drawn(1, 2, 1, 4, 8), drawn(2, 2, 1, 4, 8)
    found = ops.decode_attention(drawn(3, 4, 1, 8), cache, torch.tensor([[-1], [2], [0], [1]]),
                                 torch.tensor([3, 3, 0, 9]), 0.5)
    assert not found[:3].any()
    agrees([reference.decode(drawn(3, 4, 1, 8)[3:], cache, torch.tensor([[1]]), torch.tensor([4]),
                             0.5)], [found[3:]])


def test_a_token_outside_the_cache_is_written_nowhere(ops):
    keys, values = torch.full((2, 1, 3, 8), SENTINEL), torch.full((2, 1, 3, 8), SENTINEL)
    ops.rotate_and_store(drawn(1, 4, 24), None, (keys, values), torch.tensor([-1, 2, 0, 1]),
              torch.tensor([0, 0, 3, -1]))
    assert bool((keys == SENTINEL).all()) and bool((values == SENTINEL).all())


MANY, MOST_BLOCKS = 70_000, 65_535  # spans or slots; blocks along y or z of a launch's grid


def launched_in_parts(work: Any, count: str, *members: str) -> list[list[int]]:
    """What the launches' arguments hold in these members, `count` of each, one launch after the
    other; every launch is one that a GPU can take."""
    found: list[list[int]] = [[] for _ in members]

    def take(launch: Launch) -> None:
        assert all(0 < size <= MOST_BLOCKS for size in launch.grid[1:])
        numbers = ctypes.c_int64 * getattr(launch.arguments, count)
        for values, member in zip(found, members, strict=True):
            values += numbers.from_address(getattr(launch.arguments, member))

    work(take)
    return found


def test_spans_beyond_those_of_a_launch_go_into_the_next():
    spans = [Span(i, i % 3, 1 + i % 2, True) for i in range(MANY)]
    step = encode_context(spans)
    query, cache = torch.zeros(len(step.positions), 1, 2), torch.zeros(MANY, 1, 5, 2)
    found = launched_in_parts(
        lambda take: CudaOps(take, 132).encode_attention(query, (cache, cache), step, 1.0),
        "spans", "blocks", "first", "tokens_of", "starts")
    assert found == [[*range(MANY)], step.first.tolist(), step.tokens.tolist(),
                     step.starts.tolist()]


def test_slots_beyond_those_of_a_launch_go_into_the_next():
    store = torch.zeros(1, 2, 2 * MANY, 1, 3, 2)
    slots, lengths = list(range(MANY)), [1 + i % 3 for i in range(MANY)]
    packed = [slots, lengths, [*accumulate(lengths, initial=0)][:-1]]
    for work in (lambda take: cuda_kv.gather(take, store, slots, lengths),
                 lambda take: cuda_kv.scatter(take, store, slots, lengths, store[:, :, 0])):
        assert launched_in_parts(work, "queries", "slots", "lengths", "starts") == packed
    targets = [MANY + slot for slot in slots]
    moves = [Move(*pair) for pair in zip(slots, targets, strict=True)]
    assert launched_in_parts(lambda take: cuda_kv.compact(take, store, moves, lengths),
                             "moves", "sources", "targets", "lengths") == [slots, targets, lengths]


@pytest.mark.parametrize(("words", "call"), [
    ("torch.float64", lambda ops: ops.silu_mul(torch.zeros(1, 2, dtype=torch.float64))),
    ("two halves", lambda ops: ops.silu_mul(torch.zeros(1, 3))),
    ("not contiguous", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 16)[:, :8],
                                                    torch.ones(8), 1e-5)),
    (r"not \[8\]", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), None, torch.ones(9), 1e-5)),
    ("another shape", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8),
                                                   torch.ones(8), 1e-5)),
    ("KV heads of 8", lambda ops: ops.rotate_and_store(
        torch.zeros(1, 25), None, (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)),
        torch.tensor([0]), torch.tensor([0]))),
])
def test_wrong_arguments_are_refused_in_words(launcher, words, call):
    before = len(launcher.launched)
    with pytest.raises(ValueError, match=words):
        call(CudaOps(launcher, 1))
    assert len(launcher.launched) == before


HEADS, KV_HEADS = 4, 2
WIDTH = 8  # of a head, where attention is left to torch or not
INPUTS = [Span(0, 0, 9, True), Span(2, 0, 5, True)]
CHUNKS = [Span(0, 1, 9, True), Span(2, 4, 5, True)]


def by_kernel(launcher: cpu_cuda.CpuLauncher, spans: list[Span],
              dtype: torch.dtype) -> tuple[bool, torch.Tensor]:
    """Whether our kernel was launched, and what came of it."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(sum(span.tokens for span in spans), HEADS, WIDTH,
                        generator=generator).to(dtype)
    cache = torch.randn(2, 3, KV_HEADS, 12, WIDTH, generator=generator).to(dtype)
    launcher.launched.clear()
    with cpu_cuda.using(launcher), native.torch_only():
        out = encode_attention(query, (cache[0], cache[1]), encode_context(spans))
    return bool(launcher.launched), out


@pytest.mark.parametrize(("spans", "pairs"), [
    (INPUTS, 9**2 / 2 + 5**2 / 2), (CHUNKS, sum(range(2, 11)) + sum(range(5, 10)))])
def test_long_inputs_in_half_precision_are_left_to_torch(monkeypatch, spans, pairs):
    """`pairs`: of tokens with what each attends to; a chunk counts with what it goes on from."""
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    is_ours, expected = by_kernel(launcher, spans, torch.bfloat16)
    assert is_ours, "short ones are not"
    flops = 4 * HEADS * WIDTH * pairs / 2  # of one, in the mean
    for most, dtype, is_kept in ((0.8 * flops, torch.bfloat16, False),
                                 (0.8 * flops, torch.float32, True),
                                 (1.3 * flops, torch.bfloat16, True)):
        monkeypatch.setattr(attention, "_FLASH_FLOPS", most)
        is_ours, out = by_kernel(launcher, spans, dtype)
        assert is_ours == is_kept
        torch.testing.assert_close(out.float(), expected.float(), atol=0.02, rtol=0.02)
