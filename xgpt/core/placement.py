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
from xgpt.core.units import Amount, Count, Flag, Positive, Share, Unbounded

PLACED_POLICIES = ("rra", "ft")  # of the pools that may have a placement
DEVICE, HOST, DISK = range(3)
TIERS: tuple[Literal["device", "host", "disk"], ...] = ("device", "host", "disk")
Shares = tuple[Share, Share, Share]  # by tier; they sum to 1
Bytes = tuple[Count, Count, Count]  # by tier
SECTOR = 4096  # bytes; what is read or written past the page cache begins and ends at multiples
_PANEL = 48  # outputs of a panel of packed weights (csrc/ops/cpu/pairs.cpp)
GROUP = 64  # elements that share a scale in 4 bits (xrunner.ops.four_bits)
HEAD_TOKENS = 8192  # chosen: outputs of a piece of the head (xrunner.ops.output_head)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPlacement:
    """Values of a placement that a job fixes; None leaves one to the planner."""

    weights: Shares | None = None
    kv: Shares | None = None
    hidden: Shares | None = None
    device_batch: int | None = None
    order: Literal["zigzag", "row"] | None = None
    overlap: bool | None = None
    host_attention: bool | None = None
    weight_bits: Literal[16, 4] | None = None
    kv_bits: Literal[16, 4] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Planned bytes of one tier, of the stage that leaves least of it: what lies there for the
    length of a block, `work` (buffers, activations) beside it, and what is `free`. `price`: share
    of throughput that one GiB more would bring, by the linear program."""

    name: Literal["device", "host", "disk"]
    weights: Count
    kv: Count
    hidden: Count
    work: Count
    free: Count
    price: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """One kind of step, of all layers of the slowest stage and a whole block: `count` of them in a
    period. `seconds` of the step, and of each of its five terms alone; bytes that pass the links of
    a layer's way up and down. `binds`: the longest term."""

    kind: Literal["encode", "decode"]
    count: Amount
    seconds: Amount
    up_s: Amount
    down_s: Amount
    read_s: Amount
    write_s: Amount
    compute_s: Amount
    up_bytes: Count
    down_bytes: Count
    read_bytes: Count
    write_bytes: Count

    @property
    def binds(self) -> str:
        """The name of the longest term."""
        return max(("up", "down", "read", "write", "compute"),
                   key=lambda term: float(getattr(self, f"{term}_s")))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFigures:
    """How a placement was chosen. `needed_bytes`: least memory of the fullest device without one.
    `program_qps`: throughput by the linear program, before tensors and requests were kept whole.
    `any_order_qps`: throughput that no order of work exceeds. `diagonal_block`: requests of a block
    in diagonal order (FlexGen, A.2), which is not executed. `tried`: number of blocks that the
    programs cover, each of some device batches of one size."""

    tiers: tuple[TierBytes, ...]
    steps: tuple[StepTerms, ...]
    block: Positive
    program_qps: Amount
    any_order_qps: Unbounded
    diagonal_block: Count = 0
    needed_bytes: Count = 0
    tried: Count = 0


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
        element, or in groups of 4 bits, to the end of a sector. An embedding is in rows."""
        if self.name == "embedding":
            return sectors(self.elements * item_bytes)
        if self.name == "head" and self.outputs > HEAD_TOKENS:  # one product for each piece
            pieces, left = divmod(self.outputs, HEAD_TOKENS)
            return pieces * self._replace(outputs=HEAD_TOKENS).held_bytes(item_bytes, bits) + (
                self._replace(outputs=left).held_bytes(item_bytes, bits))
        halves = 2 if self.is_gated else 1
        panels = halves * -(-self.outputs // halves // _PANEL) * _PANEL
        outputs, pairs = max(panels, self.outputs), (self.inputs + 1) // 2
        if bits == 4:  # the groups of a panel take every second input
            return sectors(outputs * 2 * -(-pairs // GROUP) * (GROUP // 2 + 4))
        return sectors(outputs * 2 * pairs * item_bytes)


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


class StageTiers(NamedTuple):
    """Tier of each product of a stage: of the embedding and of the head (None: not on this stage),
    and of each layer's products, in the order of `layer_tensors`."""

    embedding: int | None
    layers: list[list[int]]
    head: int | None


def stage_tiers(model: ModelSpec, num_layers: int, shares: Shares, *, is_first: bool,
                is_last: bool) -> StageTiers:
    """Where the products of a stage lie with these shares of their elements."""
    tensors = stage_tensors(model, num_layers, is_first=is_first, is_last=is_last)
    tiers = tier_of_tensors([tensor.elements for tensor in tensors], shares)
    each = len(layer_tensors(model))
    first = 1 if is_first else 0
    return StageTiers(
        embedding=tiers[0] if is_first else None,
        layers=[tiers[at:at + each] for at in range(first, first + num_layers * each, each)],
        head=tiers[-1] if tensors[-1].name == "head" else None)


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
