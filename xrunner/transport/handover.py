"""KV entries of whole queries as one block of memory, to travel from one rank's cache to another's.

A block is [layers, 2, kv_heads, tokens, head_dim], the queries' tokens one after the other. Between
pools that divide layers and heads differently, a rank sends each other rank what both hold."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec
from xrunner.engine.kv import KvCache
from xrunner.ops.kv import gather, scatter

_ALL = slice(None)


class Transfer(NamedTuple):
    """What an encode rank sends a decode rank: these layers and heads, as each of them counts its
    own; the whole encoder's output of an encoder-decoder model."""

    source: int
    target: int
    source_layers: slice = _ALL
    source_heads: slice = _ALL
    target_layers: slice = _ALL
    target_heads: slice = _ALL


def transfers(encode: Sequence[StageAssignment], decode: Sequence[StageAssignment],
              spec: ModelSpec) -> list[Transfer]:
    """What all ranks of an encode pool's stages send to those of a decode pool's. Every entry that
    a decode rank holds comes once."""
    if spec.is_encoder_decoder:  # every rank of the last encode stage has the encoder's output
        givers = encode[-1].ranks
        return [Transfer(source=givers[i % len(givers)], target=rank)
                for stage in decode for i, rank in enumerate(stage.ranks)]
    needed = []
    for own, other in ((e, d) for d in decode for e in encode):
        layers = _shared(_layers(own), _layers(other))
        for i, j in ((i, j) for j in range(other.tp_degree) for i in range(own.tp_degree)):
            held, wanted = _heads(own, i, spec), _heads(other, j, spec)
            heads = _shared(held, wanted)
            if layers and heads:
                needed.append(Transfer(
                    source=own.ranks[i], target=other.ranks[j],
                    source_layers=_within(layers, _layers(own)), source_heads=_within(heads, held),
                    target_layers=_within(layers, _layers(other)),
                    target_heads=_within(heads, wanted)))
    return needed


def pack(cache: KvCache, slots: Sequence[int], layers: slice = _ALL,
         heads: slice = _ALL) -> Tensor:
    """The entries of the queries in `slots`, copied out of `cache`."""
    return gather(cache.store[layers, :, :, heads], *cache.rows_of(slots))


def unpack(cache: KvCache, lengths: Sequence[int], block: Tensor) -> None:
    """Puts the entries of queries with these lengths into new slots of `cache`."""
    assert block.shape[3] == sum(lengths), f"{block.shape = } {sum(lengths) = }"
    first = cache.allocate(lengths)
    scatter(cache.store, *cache.rows_of(range(first, first + len(lengths))), block)


def put(cache: KvCache, slot: int, entries: Tensor, layers: slice = _ALL,
        heads: slice = _ALL) -> None:
    """One query's entries [layers, 2, kv_heads, tokens, head_dim], wherever they lie, into a slot
    of `cache` that was allocated for as many."""
    scatter(cache.store[layers, :, :, heads], *cache.rows_of([slot]), entries)


def _layers(stage: StageAssignment) -> range:
    return range(stage.first_layer, stage.first_layer + stage.num_layers)


def _heads(stage: StageAssignment, index: int, spec: ModelSpec) -> range:
    """KV heads of the rank at `index` of the stage's group (xrunner.models.shard)."""
    share = spec.kv_heads // stage.tp_degree
    return range(index * share, (index + 1) * share)


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
