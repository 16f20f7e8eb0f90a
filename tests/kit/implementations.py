"""Every implementation of the operators that this machine has: torch's, native on each instruction
set, the CUDA sources executed on the CPU, and on a GPU where there is one. A test of an operator
calls its public function within `using()`, on tensors of `device`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import cpu_cuda
import torch

from xrunner.ops import native


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
        native.use_level(level)
        try:
            yield
        finally:
            lib.xgpt_use_level(before)

    return Implementation(f"native-{level}", using)


@contextmanager
def _cuda() -> Iterator[None]:
    """The CUDA sources, executed on the CPU; whatever has none goes the usual way."""
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())):
        yield


TORCH = Implementation("torch", native.left_aside)
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
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
