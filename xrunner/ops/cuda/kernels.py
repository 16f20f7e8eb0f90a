"""CUDA operators: checks arguments, and launches the kernels of csrc/ on torch's stream.

Shapes as in csrc/ops/cpu/native.h: T tokens, n decoding requests, h heads, k KV heads, d head size,
H hidden size. A layer's cache is two arrays [blocks, k, size, d] (xrunner.ops.contexts). Types are
float32, bfloat16 and float16; sums are float32. Wrong shapes and types raise ValueError before
anything is launched. Blocks, lengths and positions lie on the GPU and are not checked; a kernel
skips a request whose first block is invalid."""

import torch
from torch import Tensor

from xrunner.ops.contexts import DistanceBias, EncodeContext
from xrunner.ops.cuda.launch import (
    ADD_NORM,
    DECODE,
    DTYPES,
    ENCODE,
    PLACE,
    SILU_MUL,
    Launch,
    Launcher,
    check_alike,
    check_numbers,
    check_plain,
    filled,
    is_wide,
    refusal,
)

MAX_DIM = 256  # largest head size in attention
_MAX_GRID = 65535  # most blocks along y and z
_THREADS = 128  # chosen
_MOST_PARTS = 64  # chosen
_BLOCKS_EACH = 4  # chosen: blocks of threads per multiprocessor; with fewer, contexts are split
_TILE_HEADS = 8  # heads of a block, in decode_tiles.cu
_TILE_TOKENS = {64: 64, 128: 64, 256: 32}  # tokens of a block by head width, in encode_tiles.cu
_TILE_BITS = 4  # of a token's number: 16 of them lie in one block
_ONE_BLOCK = 62  # bits of a token's number: more than any has
_ENCODE_TOKENS, _ENCODE_KEYS = 16, 32  # of a block, and at a time (encode_attention.cu)


class CudaOps:
    """The operators over a kernel launcher. `multiprocessors`: of the GPU; contexts are split if
    there are fewer blocks of threads."""

    def __init__(self, launch: Launcher, multiprocessors: int) -> None:
        self._launch = launch
        self._multiprocessors = multiprocessors

    def decode_attention(self, query: Tensor, cache: tuple[Tensor, Tensor], blocks: Tensor,
                         lengths: Tensor, scale: float,
                         bias: DistanceBias | None = None) -> Tensor:
        """Attention of one new token of each of n requests to its own context: [n, h, d]. `query`:
        [n, h, d], rows anywhere. `cache`: keys and values. `blocks`: [n, most], lengths [n] int64;
        a length of 0 gives zeros. A context is split into as many parts as fill the GPU."""
        n, heads, dim = query.shape
        kv_heads, sizes = _check_cache(query, cache, blocks)
        check_numbers(query.device, n, lengths)
        if len(blocks) != n:
            raise refusal(f"blocks {list(blocks.shape)} for {n} queries")
        if bias is not None:
            check_plain(query.device, bias.values)
            width = bias.values.shape[-1]
            if (bias.values.dtype != torch.float32 or bias.values.shape != (heads, width)
                    or not 0 <= bias.center < width):
                raise refusal(f"a bias {list(bias.values.shape)} {bias.values.dtype} with distance "
                              f"0 at {bias.center} for {heads} heads")
        out = torch.empty((n, heads, dim), dtype=query.dtype, device=query.device)
        if n == 0:
            return out
        group = heads // kv_heads
        wide = is_wide(query, *cache, row=dim) and query.stride(0) % 8 == 0
        by_tiles = wide and _may_tile(query, sizes)
        together = _TILE_HEADS if by_tiles else 1 if group == 1 else 2 if group == 2 else 4
        at_work = n * kv_heads * -(-group // together)  # blocks of threads
        wanted = -(-_BLOCKS_EACH * self._multiprocessors // at_work)
        longest = sizes["most_blocks"] * sizes["block_size"]
        parts = max(1, min(wanted, longest // 128, _MOST_PARTS))
        work = torch.empty((n, heads, parts, dim + 2), dtype=torch.float32,
                           device=query.device) if parts > 1 else None
        arguments = filled(
            DECODE, out=out, query=query, keys=cache[0], values=cache[1], blocks=blocks,
            lengths=lengths, bias=None if bias is None else bias.values, parts=work,
            query_stride=query.stride(0), n=n, heads=heads, kv_heads=kv_heads,
            dim=dim, **sizes,
            bias_width=0 if bias is None else bias.values.shape[1],
            bias_center=0 if bias is None else bias.center, num_parts=parts, is_wide=wide,
            scale=scale)
        name = DTYPES[query.dtype]
        shared = _THREADS // 32 * -(-group // -(-group // together)) * (dim + 2) * 4
        source, kind = ("decode_tiles", _tile_width(dim)) if by_tiles else (
            "decode_attention", together)
        self._launch(Launch(source, f"{source}_{kind}_{name}", (at_work, parts, 1), _THREADS,
                            shared, arguments))
        if parts > 1:
            self._launch(Launch("decode_attention", f"combine_parts_{name}", (n * heads, 1, 1),
                                32 * -(-dim // 32), 0, arguments))
        return out

    def encode_attention(self, query: Tensor, cache: tuple[Tensor, Tensor], step: EncodeContext,
                         scale: float) -> Tensor:
        """Causal attention of packed spans of inputs: [T, h, d]. `query`: [T, h, d], rows anywhere.
        The spans' own KV is in the cache already."""
        tokens, heads, dim = query.shape
        kv_heads, sizes = _check_cache(query, cache, step.blocks)
        if len(step.positions) != tokens:
            raise refusal(f"spans of {len(step.positions)} tokens for {tokens}")
        capacity, num_spans = sizes["most_blocks"] * sizes["block_size"], len(step.spans)
        if step.longest > capacity:
            raise refusal(f"a span of {step.longest} entries beyond the capacity {capacity}")
        out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
        wide = is_wide(*cache, row=dim)
        by_tiles = (wide and is_wide(query, row=dim) and query.stride(0) % 8 == 0
                    and _may_tile(query, sizes))
        name, width = DTYPES[query.dtype], _tile_width(dim)
        kernel, height, shared = (f"encode_tiles_{width}_{name}", _TILE_TOKENS[width], 0)
        if not by_tiles:
            kernel, height = f"encode_attention_{name}", _ENCODE_TOKENS
            shared = 4 * (_ENCODE_TOKENS * (dim + _ENCODE_KEYS) + _ENCODE_KEYS * (dim + 1))
        for at in range(0, num_spans, _MAX_GRID):  # as many as one launch takes
            own = step if num_spans <= _MAX_GRID else step.part(
                slice(at, at + _MAX_GRID), slice(0, tokens))
            arguments = filled(
                ENCODE, out=out, query=query, keys=cache[0], values=cache[1], blocks=own.blocks,
                first=own.first, tokens_of=own.tokens, starts=own.starts,
                query_stride=query.stride(0), spans=len(own.spans), heads=heads,
                kv_heads=kv_heads, dim=dim, **sizes, is_wide=wide, scale=scale)
            self._launch(Launch("encode_tiles" if by_tiles else "encode_attention", kernel,
                                (-(-own.longest_span // height), heads, len(own.spans)), _THREADS,
                                shared, arguments))
        return out

    def add_rms_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor,
                     eps: float) -> Tensor:
        """Adds added [T, H] (None: nothing) to hidden [T, H] in place; returns its RMS norm.
        `weight`: [H], a factor of the norm."""
        return self._add_norm("add_rms_norm", hidden, added, (weight, None), eps)

    def add_layer_norm(self, hidden: Tensor, added: Tensor | None,
                       weight_bias: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """Adds added [T, H] to hidden [T, H] in place; returns its layer norm. weight, bias:
        [H]."""
        return self._add_norm("add_layer_norm", hidden, added, weight_bias, eps)

    def _add_norm(self, name: str, hidden: Tensor, added: Tensor | None,
                  weight_bias: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
        weight, bias = weight_bias
        check_alike(hidden, hidden, added, weight, bias)
        tokens, size = hidden.shape
        if added is not None and added.shape != hidden.shape:
            raise refusal("added is of another shape")
        if weight.shape != (size,) or (bias is not None and bias.shape != (size,)):
            raise refusal(f"a weight that is not [{size}]")
        normed = torch.empty_like(hidden)
        if tokens:
            arguments = filled(
                ADD_NORM, normed=normed, hidden=hidden, added=added, weight=weight, bias=bias,
                tokens=tokens, size=size,
                is_wide=is_wide(normed, hidden, added, weight, bias, row=size), eps=eps)
            threads = min(1024, 32 * -(-size // 256))
            self._launch(Launch("rows", f"{name}_{DTYPES[hidden.dtype]}", (tokens, 1, 1), threads,
                                0, arguments))
        return normed

    def rotate_and_store(self, joint: Tensor, rotation: tuple[Tensor, Tensor] | None,
                         cache: tuple[Tensor, Tensor], slots: Tensor,
                         positions: Tensor) -> None:
        """Rotates query and key, and writes key and value to slots[t], positions[t] of the cache.

        `joint`: [T, (h + 2k) d], query, key and value of each token; the query is rotated in place.
        `rotation`: cos and sin [T, d / 2] float32 for pairs of a head's halves (None: no
        rotation)."""
        check_alike(joint, joint, *cache)
        keys, values = cache
        slots_there, kv_heads, capacity, dim = keys.shape
        tokens, heads = joint.shape[0], joint.shape[1] // dim - 2 * kv_heads
        if values.shape != keys.shape or heads < 1 or joint.shape[1] % dim != 0:
            raise refusal(f"rows of {joint.shape[1]} for {kv_heads} KV heads of {dim}")
        check_numbers(joint.device, tokens, slots, positions)
        cos, sin = rotation or (None, None)
        check_plain(joint.device, cos, sin)
        for angles in rotation or ():
            if (angles.dtype != torch.float32 or angles.shape != (tokens, dim // 2)
                    or dim % 2 != 0):
                raise refusal(f"a rotation {list(angles.shape)} {angles.dtype} for {tokens} "
                              f"tokens of {dim}")
        if tokens:
            arguments = filled(
                PLACE, joint=joint, cos=cos, sin=sin, keys=keys, values=values,
                slots=slots, positions=positions, tokens=tokens, heads=heads,
                kv_heads=kv_heads, dim=dim, num_slots=slots_there, capacity=capacity,
                # a rotation reads halves of heads
                is_wide=is_wide(joint, *cache, row=dim if rotation is None else dim // 2)
                and joint.stride(0) % 8 == 0)
            self._launch(Launch("rows", f"place_{DTYPES[joint.dtype]}", (tokens, 1, 1), 256, 0,
                                arguments))

    def silu_mul(self, joint: Tensor) -> Tensor:
        """silu(gate) * up, [T, I], of joint [T, 2 I]: gate, then up, of each token."""
        check_alike(joint, joint)
        if joint.shape[1] % 2 != 0:
            raise refusal(f"rows of {joint.shape[1]} do not have two halves")
        tokens, inner = joint.shape[0], joint.shape[1] // 2
        out = torch.empty((tokens, inner), dtype=joint.dtype, device=joint.device)
        if tokens and inner:
            arguments = filled(
                SILU_MUL, out=out, joint=joint, tokens=tokens, inner=inner,
                is_wide=is_wide(joint, out, row=inner))
            self._launch(Launch("rows", f"silu_mul_{DTYPES[joint.dtype]}",
                                (tokens, min(-(-inner // 2048), _MAX_GRID), 1), 256, 0, arguments))
        return out


def _may_tile(query: Tensor, sizes: dict[str, int]) -> bool:
    """Whether attention over rows of whole 16 bytes may use tensor cores (cuda_tiles.h). In half
    precision, if 16 tokens that begin at a multiple of 16 always lie in one block."""
    return query.dtype != torch.float32 and sizes["block_bits"] >= _TILE_BITS


def _tile_width(dim: int) -> int:
    """Number of elements of a head that a kernel is compiled for."""
    return 64 if dim <= 64 else 128 if dim <= 128 else MAX_DIM


def _check_cache(query: Tensor, cache: tuple[Tensor, Tensor],
                 blocks: Tensor) -> tuple[int, dict[str, int]]:
    """Number of KV heads of a cache that fits the query, and how its tokens lie in blocks. See
    native.h, and Entries of cuda_elements.h. Raises ValueError."""
    check_alike(query, *cache)
    keys, values = cache
    n, heads, dim = query.shape
    if keys.dim() != 4 or keys.shape != values.shape or keys.shape[3] != dim:
        raise refusal(f"keys {list(keys.shape)} and values {list(values.shape)} for heads of {dim}")
    if not 1 <= dim <= MAX_DIM:
        raise refusal(f"heads of {dim}: 1 to {MAX_DIM} are served")
    num_blocks, kv_heads, size, _ = keys.shape
    if kv_heads < 1 or heads % kv_heads != 0:
        raise refusal(f"{heads} heads for {kv_heads} KV heads")
    if n > 0 and heads > 1 and query.stride(1) != dim:
        raise refusal("the heads of a query are apart")
    check_plain(query.device, blocks)
    most = blocks.shape[-1]
    if blocks.dtype != torch.int64 or blocks.dim() != 2 or most < 1:
        raise refusal(f"blocks {list(blocks.shape)} {blocks.dtype} where [n, most] int64 belongs")
    if most > 1 and size.bit_count() != 1:
        raise refusal(f"several blocks a query, of {size} entries: no power of two")
    # a request in one block has all its tokens there, however large the block is
    return kv_heads, {"num_blocks": num_blocks, "block_size": size,
                      "block_bits": size.bit_length() - 1 if most > 1 else _ONE_BLOCK,
                      "most_blocks": most}
