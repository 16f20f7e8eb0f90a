"""Every CUDA operator against plain torch, over shapes and types: how far off, and how long.

A kernel agrees where it is no farther from its reference than rounding makes it: about eight steps
of its type, for values of about one.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import cuda_reference as reference
import torch
from cuda_reference import Cache
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.ops.contexts import BlockTable, DistanceBias, encode_context
from xrunner.ops.cuda import cuda_kv
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launcher
from xrunner.rules.slots import Move, Span

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEPS = 8  # of the type, by which a result may be off; 64 of float32, whose sums differ in order
_BLOCK = 16  # entries
_HEADS = ((9, 3, 64), (12, 12, 64), (8, 1, 80), (5, 5, 33), (4, 1, 20), (4, 2, 256))  # h, k, d


class Case(NamedTuple):
    """One operator on one set of arguments: what it should give, what gives it, and the bytes that
    have to move for it. `is_wide`: heads are of whole 16 bytes, for which there may be a kernel of
    their own."""

    operator: str
    shape: str
    dtype: torch.dtype
    expected: Callable[[], list[Tensor]]
    found: Callable[[], list[Tensor]]
    num_bytes: int
    is_wide: bool = True


def tolerance(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (64 if dtype == torch.float32 else _STEPS)


def distance(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative for values above one; infinite where one is no number."""
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        if one.numel() == 0:
            continue
        off = ((one.float() - other.float()).abs() / one.float().abs().clamp(min=1)).max()
        worst = max(worst, float(off.nan_to_num(nan=float("inf"))))
    return worst


def off_by(case: Case) -> float:
    """How far a kernel is from torch; infinite where it refuses."""
    try:
        found = case.found()
    except XgptError:
        return float("inf")
    return distance(case.expected(), found)


class _Drawn:
    """Random arguments on a device, the same at every call of the program."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(5)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def whole(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=self.generator,
                             device=self.device)


def cases(ops: CudaOps, launch: Launcher, device: torch.device, *, size: int) -> Iterator[Case]:
    """Random arguments of every operator and type. `size` 1: small ones;
    larger: queries, tokens and contexts so many times more."""
    drawn = _Drawn(device)
    for dtype in DTYPES:
        for heads, kv_heads, dim in _HEADS:
            for n, capacity in ((2 * size, 130 * size), (1, 515 * size)):
                cache = (drawn.normal(n + 1, kv_heads, capacity, dim, dtype=dtype),
                         drawn.normal(n + 1, kv_heads, capacity, dim, dtype=dtype))
                lengths = drawn.whole(1, capacity, n)
                yield from _decode_cases(ops, drawn, heads, cache, lengths)
                yield _encode_case(ops, drawn, heads, cache, lengths)
        for hidden_size in (576, 2048, 77):
            yield from _norm_cases(ops, drawn, 3 * size, hidden_size, dtype)
            yield _silu_case(ops, drawn.normal(3 * size, 2 * hidden_size, dtype=dtype))
        for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 80)):
            yield _place_case(ops, drawn, (heads, kv_heads, dim), 3 * size, dtype)
        for kv_heads, dim in ((3, 64), (2, 33)):
            yield from _kv_cases(launch, drawn.normal(3, 2, 5, kv_heads, 40 * size, dim,
                                                      dtype=dtype))


def _entry_bytes(cache: Cache) -> int:
    """Of the keys and values of one token in one layer."""
    _, kv_heads, _, dim = cache[0].shape
    return 2 * kv_heads * dim * cache[0].element_size()


def _heads_in_words(heads: int, cache: Cache) -> str:
    slots, kv_heads, capacity, dim = cache[0].shape
    return f"{slots - 1} queries, {heads}/{kv_heads} heads of {dim}, up to {capacity}"


def _decode_cases(ops: CudaOps, drawn: _Drawn, heads: int, cache: Cache,
                  lengths: Tensor) -> Iterator[Case]:
    n, (_, _, capacity, dim), dtype = len(lengths), cache[0].shape, cache[0].dtype
    query, scale = drawn.normal(n, heads, dim, dtype=dtype), dim ** -0.5
    blocks = torch.arange(n, 0, -1, device=drawn.device)[:, None]
    bias = DistanceBias(drawn.normal(heads, capacity, dtype=torch.float32), capacity - 1)
    num_bytes = _entry_bytes(cache) * int(lengths.sum())
    shape = _heads_in_words(heads, cache)
    yield Case("decode_attention", shape, dtype,
               lambda: [reference.decode(query, cache, blocks, lengths, scale)],
               lambda: [ops.decode_attention(query, cache, blocks, lengths, scale)], num_bytes)
    yield Case("decode_attention", f"{shape}, biased", dtype,
               lambda: [reference.decode(query, cache, blocks, lengths, scale, bias)],
               lambda: [ops.decode_attention(query, cache, blocks, lengths, scale, bias)],
               num_bytes)
    paged, table = _in_blocks(drawn, cache)
    yield Case("decode_attention", f"{shape}, in blocks of {_BLOCK}", dtype,
               lambda: [reference.decode(query, cache, blocks, lengths, scale)],
               lambda: [ops.decode_attention(query, paged, table[blocks[:, 0]], lengths, scale)],
               num_bytes)


def _in_blocks(drawn: _Drawn, cache: Cache) -> tuple[Cache, Tensor]:
    """The cache's entries in blocks, in any order, and those of each slot [slots, most]."""
    slots, kv_heads, capacity, dim = cache[0].shape
    most = -(-capacity // _BLOCK)
    order = torch.randperm(slots * most, generator=drawn.generator, device=drawn.device)
    paged = []
    for part in cache:
        cut = torch.nn.functional.pad(part, (0, 0, 0, most * _BLOCK - capacity)).view(
            slots, kv_heads, most, _BLOCK, dim).transpose(1, 2).flatten(0, 1)
        paged.append(torch.empty_like(cut.contiguous()))
        paged[-1][order] = cut
    return (paged[0], paged[1]), order.view(slots, most)


def _encode_case(ops: CudaOps, drawn: _Drawn, heads: int, cache: Cache, lengths: Tensor) -> Case:
    """The second half of each query's input; the first is in the cache."""
    _, _, _, dim = cache[0].shape
    spans = [Span(slot, length // 2, length - length // 2, True)
             for slot, length in enumerate(lengths.tolist())]
    query = drawn.normal(sum(s.tokens for s in spans), heads, dim, dtype=cache[0].dtype)
    paged, table = _in_blocks(drawn, cache)
    in_rows = encode_context(spans, drawn.device)
    in_blocks = encode_context(spans, drawn.device, BlockTable(table, _BLOCK))
    return Case("encode_attention", _heads_in_words(heads, cache), cache[0].dtype,
                lambda: [reference.encode(query, cache, spans, in_rows.blocks, dim ** -0.5)] * 2,
                lambda: [ops.encode_attention(query, *where, dim ** -0.5)
                         for where in ((cache, in_rows), (paged, in_blocks))],
                _entry_bytes(cache) * int(lengths.sum()) + 2 * query.nbytes, dim % 8 == 0)


def _norm_cases(ops: CudaOps, drawn: _Drawn, tokens: int, size: int,
                dtype: torch.dtype) -> Iterator[Case]:
    hidden, added = (drawn.normal(tokens, size, dtype=dtype) for _ in range(2))
    weight, bias = (drawn.normal(size, dtype=dtype) for _ in range(2))

    def found(norm: Callable[[Tensor], Tensor]) -> list[Tensor]:
        summed = hidden.clone()
        return [norm(summed), summed]

    shape = f"{tokens} tokens of {size}"
    yield Case("add_rms_norm", shape, dtype,
               lambda: reference.rms_norm(hidden, added, weight, 1e-5),
               lambda: found(lambda h: ops.add_rms_norm(h, added, weight, 1e-5)),
               4 * hidden.nbytes)
    yield Case("add_layer_norm", shape, dtype,
               lambda: reference.layer_norm(hidden, added, (weight, bias), 1e-5),
               lambda: found(lambda h: ops.add_layer_norm(h, added, (weight, bias), 1e-5)),
               4 * hidden.nbytes)


def _silu_case(ops: CudaOps, joint: Tensor) -> Case:
    return Case("silu_mul", f"{len(joint)} tokens of {joint.shape[1] // 2}", joint.dtype,
                lambda: [reference.silu_mul(joint)], lambda: [ops.silu_mul(joint)],
                3 * joint.nbytes // 2)


def _place_case(ops: CudaOps, drawn: _Drawn, heads: tuple[int, int, int], tokens: int,
                dtype: torch.dtype) -> Case:
    heads_, kv_heads, dim = heads
    joint = drawn.normal(tokens, (heads_ + 2 * kv_heads) * dim, dtype=dtype)
    cache = (drawn.normal(tokens, kv_heads, 9, dim, dtype=dtype),
             drawn.normal(tokens, kv_heads, 9, dim, dtype=dtype))
    slots, positions = torch.arange(tokens, device=drawn.device), drawn.whole(0, 8, tokens)
    angles = drawn.normal(tokens, dim // 2, dtype=torch.float32)
    rotation = (angles.cos(), angles.sin())

    def found() -> list[Tensor]:
        mine, own = joint.clone(), (cache[0].clone(), cache[1].clone())
        ops.rotate_and_store(mine, rotation, own, slots, positions)
        return [mine[:, :heads_ * dim], *own]

    return Case("place", f"{tokens} tokens, {heads_}/{kv_heads} heads of {dim}", dtype,
                lambda: reference.rotate_and_store(joint, rotation, cache, slots, positions), found,
                2 * joint.nbytes)


def _kv_cases(launch: Launcher, store: Tensor) -> Iterator[Case]:
    layers, _, _, kv_heads, capacity, dim = store.shape
    moves, slots, lengths = [Move(4, 0), Move(3, 1)], [4, 2], [capacity, capacity // 3]
    num_bytes = 4 * layers * kv_heads * dim * store.element_size() * sum(lengths)
    shape = f"{layers} layers, {kv_heads} heads of {dim}, {sum(lengths)} tokens"

    def compacted() -> list[Tensor]:
        own = store.clone()
        cuda_kv.compact(launch, own, moves, lengths)
        return [own]

    def there_and_back() -> list[Tensor]:
        own = torch.zeros_like(store)
        block = cuda_kv.gather(launch, store, slots, lengths)
        cuda_kv.scatter(launch, own, slots, lengths, block)
        return [own, block]

    yield Case("kv_compact", shape, store.dtype,
               lambda: [reference.compacted(store, moves, lengths)], compacted, num_bytes)
    yield Case("kv_gather, kv_scatter", shape, store.dtype,
               lambda: reference.there_and_back(store, slots, lengths), there_and_back,
               2 * num_bytes)
