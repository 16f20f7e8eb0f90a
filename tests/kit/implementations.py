"""Every implementation of the operators that this machine has: torch's, native on each instruction
set, the CUDA sources executed on the CPU, and on a GPU where there is one. A test of an operator
calls its public function within `using()`, on tensors of `device`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, product
from typing import NamedTuple

import cpu_cuda
import torch
from hypothesis import strategies as st
from torch import Tensor

from xrunner.ops.cpu import native


class Implementation(NamedTuple):
    name: str
    using: Callable[[], AbstractContextManager[None]]
    device: torch.device = torch.device("cpu")

    def __str__(self) -> str:
        return self.name


def _native(level: str) -> Implementation:
    @contextmanager
    def using() -> Iterator[None]:
        lib = native.library()
        assert lib is not None
        before = lib.xgpt_level()
        native.check(lib.xgpt_use_level(native.LEVELS.index(level)))
        try:
            yield
        finally:
            lib.xgpt_use_level(before)

    return Implementation(f"native-{level}", using)


# the orders of a block's threads, and how many blocks there is room for, in turns
_TURNS = cycle(product(cpu_cuda.ORDERS.values(), (1, 40)))


@contextmanager
def _cuda() -> Iterator[None]:
    """The CUDA sources, executed on the CPU; whatever has none goes the usual way."""
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    launcher.order, multiprocessors = next(_TURNS)
    with cpu_cuda.using(launcher, multiprocessors):
        yield


TORCH = Implementation("torch", native.torch_only)
SOURCES = Implementation("cuda-source", _cuda)
IMPLEMENTATIONS = [TORCH, *map(_native, native.levels()), SOURCES, *(
    [Implementation("cuda", nullcontext, torch.device("cuda", 0))]
    if torch.cuda.is_available() else [])]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Operators may use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What a result in the type may be off, of the largest number that went into it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


SIZES = [1, 2, 3, 8, 15, 16, 17, 33, 64, 100, 576]
DTYPES = [torch.float32, torch.bfloat16]


class Rows(NamedTuple):
    tokens: int
    size: int
    dtype: torch.dtype
    threads: int
    seed: int

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + len(shape))
        return torch.randn(shape, generator=generator).to(dtype or self.dtype)


rows = st.builds(Rows, st.integers(0, 9) | st.just(70), st.sampled_from(SIZES),
                 st.sampled_from(DTYPES), st.integers(1, 4), st.integers(0, 2**31))
# float16 too, which GPUs compute in
any_rows = rows | rows.map(lambda case: case._replace(dtype=torch.float16))
