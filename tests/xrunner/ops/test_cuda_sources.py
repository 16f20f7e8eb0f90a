"""The launches of the CUDA kernels: what goes in one, what is refused, what is written nowhere.
What they compute is seen where the other operators are (kit/implementations.py)."""

from typing import Any

import cpu_cuda
import cuda_check
import cuda_reference as reference
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xrunner.ops.contexts import DistanceBias, encode_context
from xrunner.ops.cuda import cuda_kv
from xrunner.ops.cuda import kernels as cuda
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.rules.slots import Move, Span

SENTINEL = 77.0  # what a buffer holds where nothing may be written


@pytest.fixture(scope="module")
def launcher():
    return cpu_cuda.CpuLauncher(cpu_cuda.built())


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


class Made(TorchDispatchMode):
    """The operations of torch that were carried out, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_what_spans_are_is_asked_once_for_all_layers(launcher, monkeypatch):
    monkeypatch.setattr(cuda, "_MAX_GRID", 2)  # spans of a launch
    spans = [Span(2, 3, 5, True), Span(0, 0, 4, False), Span(1, 1, 7, True)]
    cache, query = (drawn(1, 3, 2, 16, 8), drawn(2, 3, 2, 16, 8)), drawn(3, 16, 4, 8)
    step, ops, before = encode_context(spans), CudaOps(launcher, 2), len(launcher.launched)
    expected = reference.encode(query, cache, spans, step.blocks, 0.5)
    agrees([expected], [ops.encode_attention(query, cache, step, 0.5)])
    with Made() as made:
        found = ops.encode_attention(query, cache, step, 0.5)
    agrees([expected], [found])
    assert [one.grid[2] for one in launcher.launched[before:]] == [2, 1, 2, 1]
    assert made.names == ["empty"], "the second layer's answer, and no views of the spans"


def test_a_token_outside_the_cache_is_written_nowhere(ops):
    keys, values = torch.full((2, 1, 3, 8), SENTINEL), torch.full((2, 1, 3, 8), SENTINEL)
    ops.place(drawn(1, 4, 24), None, (keys, values), torch.tensor([-1, 2, 0, 1]),
              torch.tensor([0, 0, 3, -1]))
    assert bool((keys == SENTINEL).all()) and bool((values == SENTINEL).all())


def test_every_layer_and_move_goes_in_one_launch(launcher):
    store, before = drawn(1, 30, 2, 8, 3, 5, 64), len(launcher.launched)
    cuda_kv.compact(launcher, store, [Move(7, 0), Move(6, 2), Move(5, 3)], [5, 3, 1])
    assert len(launcher.launched) == before + 1


@pytest.mark.parametrize(("words", "call"), [
    ("torch.float64", lambda ops: ops.silu_mul(torch.zeros(1, 2, dtype=torch.float64))),
    ("two halves", lambda ops: ops.silu_mul(torch.zeros(1, 3))),
    ("not contiguous", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 16)[:, :8],
                                                    torch.ones(8), 1e-5)),
    (r"not \[8\]", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), None, torch.ones(9), 1e-5)),
    ("another shape", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8),
                                                   torch.ones(8), 1e-5)),
    ("1 to 256", lambda ops: decoded(ops, dim=257)),
    ("3 heads for 2", lambda ops: decoded(ops, heads=3)),
    ("int64 belongs", lambda ops: decoded(ops, blocks=torch.zeros(1, 1))),
    (r"\[n, most\]", lambda ops: decoded(ops, blocks=torch.tensor([0]))),
    ("for 1 queries", lambda ops: decoded(ops, blocks=torch.tensor([[0], [1]]))),
    ("no power of two", lambda ops: decoded(ops, blocks=torch.tensor([[0, 1]]), size=5)),
    ("beside", lambda ops: decoded(ops, cache_dtype=torch.bfloat16)),
    ("a bias", lambda ops: decoded(ops, bias=DistanceBias(torch.zeros(2, 3), 3))),
    ("beyond the capacity", lambda ops: encoded(ops, Span(0, 4, 1, True))),
    ("for 1", lambda ops: encoded(ops, Span(0, 0, 2, True))),
    ("KV heads of 8", lambda ops: ops.place(
        torch.zeros(1, 25), None, (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)),
        torch.tensor([0]), torch.tensor([0]))),
])
def test_wrong_arguments_are_refused_in_words(launcher, words, call):
    before = len(launcher.launched)
    with pytest.raises(ValueError, match=words):
        call(CudaOps(launcher, 1))
    assert len(launcher.launched) == before


def decoded(ops: CudaOps, *, dim: int = 8, heads: int = 2, blocks: Tensor | None = None,
            cache_dtype: torch.dtype = torch.float32, bias: DistanceBias | None = None,
            size: int = 4) -> Tensor:
    cache = torch.zeros(2, 2, size, dim, dtype=cache_dtype)
    return ops.decode_attention(torch.zeros(1, heads, dim), (cache, cache),
                                torch.tensor([[0]]) if blocks is None else blocks,
                                torch.tensor([1]), 1.0, bias)


def encoded(ops: CudaOps, span: Span) -> Tensor:
    cache = torch.zeros(2, 2, 4, 8)
    return ops.encode_attention(torch.zeros(1, 2, 8), (cache, cache), encode_context([span]), 1.0)
