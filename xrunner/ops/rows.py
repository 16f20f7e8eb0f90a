"""Operations on each token's row between a layer's products, in one pass each. Uses native
operators (csrc/ops/cpu/rows.cpp) where available, else torch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.contexts import Places
from xrunner.ops.cpu.native import check, dtype_code, library, serves, threads
from xrunner.ops.cuda import cuda_modules


class Rotation(NamedTuple):
    """Rotary cos and sin of one step's tokens, each [T, d / 2] float32, shared by all layers."""

    cos: Tensor
    sin: Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """RMS norm of hidden [T, H], after `added` [T, H] is added in place. hidden /
    sqrt(mean(hidden^2) + eps) * weight, with weight [H]."""
    assert added is None or _are_alike(added, hidden), f"{added.shape = } {hidden.shape = }"
    gpu = cuda_modules.ops_for(hidden)
    if gpu is not None and hidden.is_contiguous():
        return gpu.add_rms_norm(hidden, added, weight, eps)
    if not _is_native(hidden):
        hidden = hidden if added is None else hidden.add_(added)
        return F.rms_norm(hidden, weight.shape, weight, eps)
    normed, lib = torch.empty_like(hidden), library()
    assert lib is not None
    check(lib.xgpt_add_rms_norm(
        dtype_code(hidden), normed.data_ptr(), hidden.data_ptr(),
        None if added is None else added.data_ptr(), weight.data_ptr(), *hidden.shape, eps,
        threads()))
    return normed


def layer_norm(hidden: Tensor, weight: Tensor, bias: Tensor, eps: float,
               added: Tensor | None = None) -> Tensor:
    """Layer norm of hidden [T, H], after `added` [T, H] is added in place; weight, bias [H]."""
    assert added is None or _are_alike(added, hidden), f"{added.shape = } {hidden.shape = }"
    gpu = cuda_modules.ops_for(hidden)
    if gpu is not None and hidden.is_contiguous():
        return gpu.add_layer_norm(hidden, added, (weight, bias), eps)
    if not _is_native(hidden):
        hidden = hidden if added is None else hidden.add_(added)
        return F.layer_norm(hidden, weight.shape, weight, bias, eps)
    normed, lib = torch.empty_like(hidden), library()
    assert lib is not None
    check(lib.xgpt_add_layer_norm(
        dtype_code(hidden), normed.data_ptr(), hidden.data_ptr(),
        None if added is None else added.data_ptr(), weight.data_ptr(), bias.data_ptr(),
        *hidden.shape, eps, threads()))
    return normed


def silu_mul(joint: Tensor) -> Tensor:
    """silu(gate) * up, [T, I], of joint [T, 2 I]: gate, then up, of each token."""
    tokens, inner = len(joint), joint.shape[1] // 2
    gpu = cuda_modules.ops_for(joint)
    if gpu is not None and joint.is_contiguous():
        return gpu.silu_mul(joint)
    if not _is_native(joint):
        gate, up = joint.chunk(2, dim=-1)
        return F.silu(gate) * up
    out, lib = joint.new_empty(tokens, inner), library()
    assert lib is not None
    check(lib.xgpt_silu_mul(dtype_code(joint), out.data_ptr(), joint.data_ptr(), tokens, inner,
                            threads()))
    return out


def rotate_and_store(joint: Tensor, heads: int, cache: tuple[Tensor, Tensor], places: Places,
                     rotation: Rotation | None = None) -> Tensor:
    """Rotates query and key, writes key and value into the cache; returns the query [T, h, d].

    `joint`: [T, (h + 2 k) d], query, key, value of each token, overwritten; the result is a view of
    it. `cache`: keys and values, each [slots, k, capacity, d], of any type. `rotation`: None for no
    rotation."""
    keys, values = cache
    num_slots, kv_heads, capacity, dim = keys.shape
    split = joint.view(len(joint), heads + 2 * kv_heads, dim)
    gpu = cuda_modules.ops_for(joint)
    if (gpu is not None and joint.is_contiguous() and keys.dtype == joint.dtype
            and keys.is_contiguous()):
        gpu.rotate_and_store(joint, rotation, cache, *places)
        return split[:, :heads]
    if _is_native(joint) and _is_native(keys) and _is_native(values):
        cos, sin = rotation or (None, None)
        lib = library()
        assert lib is not None
        check(lib.xgpt_place(
            dtype_code(joint), dtype_code(keys), joint.data_ptr(),
            None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(),
            keys.data_ptr(), values.data_ptr(), places.slots.data_ptr(),
            places.positions.data_ptr(), len(joint), heads, kv_heads, dim, num_slots, capacity,
            threads()))
        return split[:, :heads]
    query, key, value = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
    if rotation is not None:
        query, key = _rotated(query, rotation), _rotated(key, rotation)
    keys[places.slots, :, places.positions] = key.to(keys.dtype)
    values[places.slots, :, places.positions] = value.to(keys.dtype)
    return query


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, d] rotated; pairs are a head's halves, as in transformers."""
    cos, sin = (torch.cat([part, part], dim=-1)[:, None, :].to(x.dtype) for part in rotation)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()


def _is_native(tensor: Tensor) -> bool:
    return serves(tensor) and tensor.is_contiguous()


AllReduce = Callable[[Tensor], Tensor]


class Residual:
    """The residual stream [T, H] with a product still to be added. The next norm adds it and norms
    in one pass over the rows."""

    def __init__(self, hidden: Tensor) -> None:
        """Takes over `hidden`, which changes in place."""
        self._hidden = hidden
        self._added: Tensor | None = None

    def add(self, product: Tensor, all_reduce: AllReduce | None = None) -> None:
        """Adds a product [T, H] later. `all_reduce`: sums it over a group first (None: not
        needed)."""
        self.total()
        self._added = product if all_reduce is None else all_reduce(product)

    def rms_norm(self, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(self._hidden, weight, eps, self._taken())

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(self._hidden, weight, bias, eps, self._taken())

    def total(self) -> Tensor:
        """The stream [T, H] with everything added."""
        added = self._taken()
        return self._hidden if added is None else self._hidden.add_(added)

    def become(self, rows: Tensor) -> None:
        """Replaces the stream by `rows` [T, H], a norm of its sum."""
        assert self._added is None, "something is still to be added"
        self._hidden = rows

    def _taken(self) -> Tensor | None:
        added, self._added = self._added, None
        return added
