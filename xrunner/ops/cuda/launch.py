"""Launches of CUDA kernels of csrc/: which one, over how many blocks, with which arguments. A
kernel takes one struct by value. The structs here have the members of the `.cu` files in the same
order (by test)."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xrunner.devices import on_device

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# members whose C type is not `i64`; all take eight bytes but the float at the end
_FLOATS = {"scale", "eps"}
_POINTERS = {"out", "query", "keys", "values", "slots", "blocks", "lengths", "bias", "parts",
             "first", "tokens_of", "starts", "normed", "hidden", "added", "weight", "joint", "cos",
             "sin", "positions", "arrays", "sources", "targets", "block"}

Struct = ctypes.Structure
_MEMBERS: dict[type[Struct], tuple[str, ...]] = {}


class Launch(NamedTuple):
    """One launch. `grid`: blocks along x, y, z; `threads`: of a block; `arguments`: a struct."""

    source: str  # name of the file, without .cu
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: Struct


# executes launches: cupy on a GPU (xrunner.ops.cuda.cuda_modules), a test on the CPU
Launcher = Callable[[Launch], None]


def struct(name: str, members: str) -> type[Struct]:
    """A ctypes struct class with these members."""
    kinds: dict[str, Any] = {**dict.fromkeys(_FLOATS, ctypes.c_float),
                             **dict.fromkeys(_POINTERS, ctypes.c_void_p)}
    made = type(name, (Struct,), {"_fields_": [
        (member, kinds.get(member, ctypes.c_int64)) for member in members.split()]})
    _MEMBERS[made] = tuple(members.split())
    return made


ADD_NORM = struct("AddNorm", "normed hidden added weight bias tokens size is_wide eps")
PLACE = struct("Place", "joint cos sin keys values slots positions tokens heads kv_heads dim "
               "num_slots capacity is_wide")
SILU_MUL = struct("SiluMul", "out joint tokens inner is_wide")
_BLOCKS = "num_blocks block_size block_bits most_blocks "
DECODE = struct("DecodeAttention", "out query keys values blocks lengths bias parts query_stride n "
                f"heads kv_heads dim {_BLOCKS} bias_width bias_center num_parts is_wide scale")
ENCODE = struct("EncodeAttention", "out query keys values blocks first tokens_of starts "
                f"query_stride spans heads kv_heads dim {_BLOCKS} is_wide scale")
_ROWS = "arrays num_arrays heads head_bytes slot_bytes token_bytes "
KV_COMPACT = struct("KvCompact", _ROWS + "sources targets lengths moves")
KV_PACK = struct("KvPack", _ROWS + "slots lengths starts block queries tokens")


def filled(kind: type[Struct], **values: Tensor | float | None) -> Struct:
    """The struct with these members, in its order; a tensor becomes its address."""
    assert tuple(values) == _MEMBERS[kind], f"{kind.__name__}: {tuple(values)}"
    return kind(*[value.data_ptr() if isinstance(value, Tensor) else value
                  for value in values.values()])


def is_wide(*tensors: Tensor | None, row: int) -> bool:
    """Whether a kernel may read and write 16 bytes at a time. It may if all tensors lie on 16 bytes
    and rows of `row` elements are whole eights."""
    beside = row % 8
    for tensor in tensors:  # no generator: every operator of every layer calls this
        if tensor is not None:
            beside |= tensor.data_ptr() % 16
    return beside == 0


def refusal(words: str) -> ValueError:
    """Error of an argument that is not supported."""
    return ValueError(f"CUDA operator: {words}")


def check_alike(first: Tensor, *others: Tensor | None) -> None:
    """Raises ValueError unless all have one supported type and device, and are contiguous. Of
    `first` only the rows must be contiguous."""
    dtype, device = first.dtype, first.device
    if dtype not in DTYPES:
        raise refusal(f"elements are {dtype}, not float32, bfloat16 or float16")
    if first.dim() > 0 and first.shape[-1] > 1 and first.stride(-1) != 1:
        raise refusal("the elements of a row are apart")
    for other in others:
        if other is not None and other.dtype != dtype:
            raise refusal(f"{other.dtype} beside {dtype}")
    check_plain(device, *others)


def check_plain(device: torch.device, *tensors: Tensor | None) -> None:
    """Raises ValueError unless all are on the device and contiguous."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device != device:
            raise refusal(f"a tensor on {tensor.device} beside {device}")
        if not tensor.is_contiguous():
            raise refusal("a tensor that is not contiguous")


def check_numbers(device: torch.device, count: int, *tensors: Tensor) -> None:
    """Raises ValueError unless all are [count] int64 on the device."""
    check_plain(device, *tensors)
    for tensor in tensors:
        if tensor.dtype != torch.int64 or tensor.shape != (count,):
            raise refusal(f"{list(tensor.shape)} {tensor.dtype} where [{count}] int64 belongs")


def numbers(device: torch.device, *columns: list[int]) -> Tensor:
    """Columns of equal length as [columns, length] int64 on the device, in one asynchronous
    transfer."""
    return on_device([*columns], device)
