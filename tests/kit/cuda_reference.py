"""What each operator of csrc/ computes, in the shortest torch that says it: the references that the
CUDA kernels are compared with. Shapes as in csrc/ops/cpu/native.h; sums are float32; no argument
changes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from xrunner.ops.contexts import DistanceBias
from xrunner.rules.slots import Move, Span

Cache = tuple[Tensor, Tensor]  # keys and values [num_blocks, k, size, d]


def attention(query: Tensor, cache: Cache, blocks: Tensor, length: int, scale: float,
              bias: DistanceBias | None = None) -> Tensor:
    """Tokens query [t, h, d], the last `t` of `length`, against the entries in these blocks [most],
    causal."""
    tokens, heads, _ = query.shape
    group = heads // cache[0].shape[1]
    own = blocks[:-(-length // cache[0].shape[2])]
    keys, values = (c[own].transpose(0, 1).flatten(1, 2)[:, :length].float()
                    .repeat_interleave(group, 0) for c in cache)
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * scale  # [h, t, length]
    at = torch.arange(length, device=query.device)
    ago = at[None, :] - at[length - tokens:, None]  # [t, length]: 0 at the token itself
    if bias is not None:
        scores = scores + bias.values[:, (ago + bias.center).clamp(min=0,
                                                                    max=len(bias.values[0]) - 1)]
    scores = scores.masked_fill(ago > 0, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)


def decode(query: Tensor, cache: Cache, blocks: Tensor, lengths: Tensor, scale: float,
           bias: DistanceBias | None = None) -> Tensor:
    """blocks [n, most]."""
    rows = [attention(query[i:i + 1], cache, blocks[i], length, scale, bias) if length
            else torch.zeros_like(query[i:i + 1]) for i, length in enumerate(lengths.tolist())]
    return torch.cat(rows) if rows else torch.empty_like(query)


def encode(query: Tensor, cache: Cache, spans: list[Span], blocks: Tensor,
           scale: float) -> Tensor:
    """blocks [spans, most]."""
    rows, start = [], 0
    for span, own in zip(spans, blocks, strict=True):
        rows.append(attention(query[start:start + span.tokens], cache, own,
                              span.first + span.tokens, scale))
        start += span.tokens
    return torch.cat(rows) if rows else torch.empty_like(query)


def rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    """The norm, and hidden after the addition."""
    summed = hidden if added is None else hidden + added
    x = summed.float()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return [normed.to(hidden.dtype), summed]


def layer_norm(hidden: Tensor, added: Tensor | None, weight_bias: tuple[Tensor, Tensor],
               eps: float) -> list[Tensor]:
    summed = hidden if added is None else hidden + added
    weight, bias = (w.float() for w in weight_bias)
    normed = functional.layer_norm(summed.float(), summed.shape[-1:], weight, bias, eps)
    return [normed.to(hidden.dtype), summed]


def rotate_and_store(joint: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: Cache,
                     slots: Tensor, positions: Tensor) -> list[Tensor]:
    """The query, keys and values after it; nothing is written in place."""
    tokens, (_, kv_heads, _, dim) = len(joint), cache[0].shape
    rows = joint.view(tokens, joint.shape[1] // dim, dim)
    turned, value = rows[:, :-kv_heads], rows[:, -kv_heads:]
    if rotation is not None:
        cos, sin = (angles[:, None] for angles in rotation)
        first, second = turned.float().chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin],
                           -1).to(joint.dtype)
    keys, values = cache[0].clone(), cache[1].clone()
    keys[slots, :, positions], values[slots, :, positions] = turned[:, -kv_heads:], value
    return [turned[:, :-kv_heads].flatten(1), keys, values]


def silu_mul(joint: Tensor) -> Tensor:
    gate, up = joint.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(joint.dtype)


def compacted(store: Tensor, moves: Sequence[Move], lengths: Sequence[int]) -> Tensor:
    """A store [layers, 2, slots, k, capacity, d] after the moves."""
    after = store.clone()
    for (source, target), length in zip(moves, lengths, strict=True):
        after[:, :, target, :, :length] = after[:, :, source, :, :length].clone()
    return after


def there_and_back(store: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """A store of zeros with the entries of those slots alone, and the block [layers, 2, k, tokens,
    d] that carried them."""
    after = torch.zeros_like(store)
    for slot, length in zip(slots, lengths, strict=True):
        after[:, :, slot, :, :length] = store[:, :, slot, :, :length]
    parts = [store[:, :, slot, :, :length] for slot, length in zip(slots, lengths, strict=True)]
    return [after, torch.cat(parts, dim=3)]
