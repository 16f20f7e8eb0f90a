"""A launch of a CUDA kernel of csrc/: which, over how many blocks, with which arguments.

A kernel takes one struct by value; the classes here are those structs, whose members are those of
the `.cu` files in the same order (a test compares them).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# members whose C type is not `i64`; all of them take eight bytes but the float at the end
_FLOATS = {"scale", "eps"}
_POINTERS = {"out", "query", "keys", "values", "slots", "lengths", "bias", "parts", "first",
             "tokens_of", "starts", "normed", "hidden", "added", "weight", "joint", "cos", "sin",
             "positions", "arrays", "sources", "targets", "block"}

Struct = ctypes.Structure


class Launch(NamedTuple):
    """`grid`: blocks along x, y, z; `threads` of a block; `arguments`: an instance of a struct."""

    source: str  # the name of the file, without .cu
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: Struct


# What carries launches out: cupy on a GPU (xrunner.ops.cuda_modules), a test on the CPU.
Launcher = Callable[[Launch], None]


def struct(name: str, members: str) -> type[Struct]:
    """The struct `name` of these members."""
    kinds: dict[str, Any] = {**dict.fromkeys(_FLOATS, ctypes.c_float),
                             **dict.fromkeys(_POINTERS, ctypes.c_void_p)}
    return type(name, (Struct,), {
        "_fields_": [(member, kinds.get(member, ctypes.c_int64)) for member in members.split()]})


ADD_NORM = struct("AddNorm", "normed hidden added weight bias tokens size is_wide eps")
PLACE = struct("Place", "joint cos sin keys values slots positions tokens heads kv_heads dim "
               "num_slots capacity")
SILU_MUL = struct("SiluMul", "out joint tokens inner is_wide")
DECODE = struct("DecodeAttention", "out query keys values slots lengths bias parts query_stride n "
                "heads kv_heads dim num_slots capacity bias_width bias_center num_parts is_wide "
                "scale")
ENCODE = struct("EncodeAttention", "out query keys values slots first tokens_of starts "
                "query_stride spans heads kv_heads dim num_slots capacity is_wide scale")
_ROWS = "arrays num_arrays heads head_bytes slot_bytes token_bytes "
KV_COMPACT = struct("KvCompact", _ROWS + "sources targets lengths moves")
KV_PACK = struct("KvPack", _ROWS + "slots lengths starts block queries tokens")


def filled(kind: type[Struct], values: Mapping[str, Tensor | int | float | None]
           ) -> Struct:
    """The struct with these members, all of them; of a tensor its address."""
    names = [name for name, *_ in kind._fields_]
    assert set(names) == set(values), f"{kind.__name__}: {set(names) ^ set(values)}"
    return kind(**{name: value.data_ptr() if isinstance(value, Tensor) else value
                   for name, value in values.items()})


def is_wide(*tensors: Tensor | None, row: int) -> bool:
    """Whether rows of `row` elements of all of them lie on 16 bytes and are whole eights, so that
    a kernel may read and write 16 bytes at a time."""
    return row % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def refuse(wrong: bool, words: str) -> None:
    """Raises ValueError where an argument cannot be served."""
    if wrong:
        raise ValueError(f"CUDA operator: {words}")


def check_alike(first: Tensor, *others: Tensor | None) -> None:
    """All are of one type that the kernels know, on one device, and contiguous but for `first`,
    whose rows alone must be."""
    refuse(first.dtype not in DTYPES, f"elements are {first.dtype}, not float32, bfloat16 or "
           "float16")
    refuse(first.dim() > 0 and first.stride(-1) != 1, "the elements of a row are apart")
    for other in others:
        if other is not None:
            refuse(other.dtype != first.dtype, f"{other.dtype} beside {first.dtype}")
            check_plain(first, other)


def check_plain(first: Tensor, *others: Tensor) -> None:
    """All are where `first` is, and contiguous."""
    for other in others:
        refuse(other.device != first.device, f"a tensor on {other.device} beside {first.device}")
        refuse(not other.is_contiguous(), "a tensor that is not contiguous")


def check_numbers(first: Tensor, count: int, *others: Tensor) -> None:
    """All are [count] int64 where `first` is."""
    check_plain(first, *others)
    for other in others:
        refuse(other.dtype != torch.int64 or other.shape != (count,),
               f"{list(other.shape)} {other.dtype} where [{count}] int64 belongs")


def numbers(device: torch.device, *columns: list[int]) -> Tensor:
    """Columns of the same length as [columns, length] int64 on the device, in one transfer that
    the host does not wait for."""
    table = torch.tensor(columns, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
