"""Where the bytes of a pool lie that its devices cannot hold: on the device, on its host or on disk
(FlexGen, arXiv:2303.06865, section 4). Planner and runner divide tensors and requests by the
functions here, so that they agree.

A tensor of weights is one matrix product of the runner. Weights lie in whole tensors, keys and
values in whole requests. Hidden states never lie on disk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xgpt.core.model import ModelSpec
from xgpt.core.units import Count, Flag, Positive, Share

DEVICE, HOST, DISK = range(3)
TIERS = ("device", "host", "disk")
Shares = tuple[Share, Share, Share]  # by tier; they sum to 1
Bytes = tuple[Count, Count, Count]  # by tier
SECTOR = 4096  # bytes; what is read or written past the page cache begins and ends at multiples
_PANEL = 48  # outputs of a panel of packed weights (csrc/ops/cpu/pairs.cpp)
_GROUP = 64  # elements that share a scale in 4 bits (xrunner.ops.four_bits)
_BLOCK = 16  # least tokens of a block of keys and values on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Shares of each stage's bytes by tier, and how a step goes through its layers.

    `device_batch`: requests that are computed at once (FlexGen's gbs); a step of more takes them
    one after the other. `order`: "zigzag" takes all of them through a layer before the next one;
    "row" takes each through all layers. `overlap`: whether copies run beside the computing.
    `host_attention`: whether the host computes decode attention over entries in its memory.
    `weight_bits`, `kv_bits`: form of weights and entries below the device. `budgets`: planned bytes
    of a rank, by stage and tier; what a run would take beyond them is an error."""

    weights: Shares
    kv: Shares
    hidden: Shares
    device_batch: Positive
    order: Literal["zigzag", "row"] = "zigzag"
    overlap: Flag = True
    host_attention: Flag = False
    weight_bits: Literal[16, 4] = 16
    kv_bits: Literal[16, 4] = 16
    budgets: tuple[Bytes, ...] = ()

    def batches(self, requests: int) -> list[range]:
        """Device batches of slots 0 .. requests - 1, in order. None holds requests whose entries
        lie on different tiers."""
        found = list[range]()
        for part in queries_by_tier(requests, self.kv):
            found += [range(first, min(first + self.device_batch, part.stop))
                      for first in range(part.start, part.stop, self.device_batch)]
        return found


class WeightTensor(NamedTuple):
    """One product's weight [outputs, inputs]. `is_gated`: its first half gates the second."""

    name: str
    outputs: int
    inputs: int
    is_gated: bool = False

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs

    def held_bytes(self, item_bytes: int, bits: int = 16) -> int:
        """Most bytes that it takes in any layout: in rows or panels of `item_bytes` an
        element, or in groups of 4 bits, to the end of a sector."""
        if bits == 4:
            rows = self.outputs * -(-self.inputs // _GROUP)
            return sectors(rows * (_GROUP // 2 + 4))
        halves = 2 if self.is_gated else 1
        panels = halves * -(-self.outputs // halves // _PANEL) * _PANEL
        return sectors(max(panels, self.outputs) * (self.inputs + self.inputs % 2) * item_bytes)


def sectors(num_bytes: int) -> int:
    """`num_bytes` up to the end of a sector."""
    return -(-num_bytes // SECTOR) * SECTOR


def layer_tensors(model: ModelSpec) -> list[WeightTensor]:
    """The products of one decoder layer, in the order of the runner's `DecoderLayer.products`. A
    model that is planned only has its attention in one tensor."""
    hidden, inner = model.hidden_size, model.intermediate_size
    width, experts = model.num_heads * model.head_dim, model.decoder.experts
    attention = [WeightTensor("qkv", width + 2 * model.kv_heads * model.head_dim, hidden),
                 WeightTensor("out", hidden, width)]
    if model.decoder.latent is not None:
        attention = [WeightTensor("attention", -(-model.attention_params // hidden), hidden)]
    if experts is not None:
        return attention + [tensor for index in range(experts.count) for tensor in (
            WeightTensor(f"expert.{index}.gate_up", 2 * experts.inner, hidden, True),
            WeightTensor(f"expert.{index}.down", hidden, experts.inner))] + (
                [] if not experts.shared else [
                    WeightTensor("shared.gate_up", 2 * experts.shared, hidden, True),
                    WeightTensor("shared.down", hidden, experts.shared)])
    up = 2 * inner if model.is_gated_mlp else inner
    return [*attention, WeightTensor("up", up, hidden, model.is_gated_mlp),
            WeightTensor("down", hidden, inner)]


def stage_tensors(model: ModelSpec, num_layers: int, *, is_first: bool,
                  is_last: bool) -> list[WeightTensor]:
    """The tensors of a stage in the order in which they are placed: embedding, layers, head."""
    table = WeightTensor("embedding", model.vocab_size, model.hidden_size)
    return [*([table] if is_first else []), *layer_tensors(model) * num_layers,
            *([table._replace(name="head")] if is_last and model.head_params else [])]


def tier_of_tensors(sizes: Sequence[int], shares: Shares) -> list[int]:
    """The tier of each tensor, in order: the one that lacks most of its share of the bytes so far
    (error diffusion), so that every stretch of layers has about the same shares."""
    held, total, found = [0.0, 0.0, 0.0], 0.0, list[int]()
    for size in sizes:
        total += size
        tier = max(range(3), key=lambda own: (shares[own] > 0, shares[own] * total - held[own]))
        held[tier] += size
        found.append(tier)
    return found


def queries_by_tier(count: int, shares: Shares) -> tuple[range, range, range]:
    """The slots of `count` requests whose entries lie on each tier: the first ones on the device,
    the last ones on disk."""
    on_device = math.floor(shares[DEVICE] * count + 0.5)
    on_disk = min(math.floor(shares[DISK] * count + 0.5), count - on_device)
    if not shares[HOST]:
        on_disk = count - on_device if shares[DISK] else 0
        on_device = count - on_disk
    return range(on_device), range(on_device, count - on_disk), range(count - on_disk, count)


def kv_block_tokens(kv_heads: int, head_dim: int, item_bytes: int) -> int:
    """Tokens of a block of keys (or values) on disk: 16, or as many more as fill whole sectors."""
    of_least = _BLOCK * kv_heads * head_dim * item_bytes
    return _BLOCK * SECTOR // math.gcd(of_least, SECTOR)
