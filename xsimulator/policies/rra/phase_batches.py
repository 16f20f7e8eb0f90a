"""What the phases of RRA configurations hold: encode batches, decode groups, and who decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.longest_context import expected_maximum
from xsimulator.occupancy import expected_maximum_z
from xsimulator.policies.rra.phase_blocks import PhaseBlocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseBatches:
    """The phases of configurations of one plan, in falling order of their blocks, hold these."""

    encode_batch: FloatArray  # [configs]
    groups: FloatArray
    queries: PhaseBlocks

    @property
    def group_batch(self) -> FloatArray:
        return self.encode_batch / self.groups

    @property
    def encode_groups(self) -> FloatArray:
        return np.minimum(self.groups, self.encode_batch)

    @property
    def decode_batch(self) -> FloatArray:
        return self.encode_batch * self.queries.mean_phases


class EncodeTokens:
    """The tokens of encode micro-batches scatter as far as the workload adjustment (paper section
    5.2) lets them."""

    def __init__(self, inputs: Lengths, adjustment: float) -> None:
        self.mean, self.std = inputs.mean, inputs.std
        self._adjustment = adjustment

    def largest(self, batches: PhaseBatches) -> tuple[FloatArray, FloatArray, FloatArray]:
        """A micro-batch has so many queries and tokens [configs], the largest of a phase so many
        tokens."""
        groups = batches.encode_groups
        queries = batches.encode_batch / groups
        odd = queries - np.floor(queries)  # that share of the groups encodes one query more
        tokens = queries * self.mean
        spread = np.sqrt(queries * self.std**2 + odd * (1 - odd) * self.mean**2)
        spread = self.adjusted(spread, tokens, queries)
        return queries, tokens, tokens + expected_maximum_z(groups) * spread

    def adjusted(self, spread: FloatArray, tokens: FloatArray, queries: FloatArray) -> FloatArray:
        """This standard deviation [configs] of the tokens is left of `spread` where micro-batches
        of that many queries are adjusted."""
        if self._adjustment <= 0:
            return spread
        # within the band wherever (uniform), or as near to the mean as whole inputs allow: half of
        # one, that a cut falls into with a chance in proportion to its length
        band = self._adjustment * tokens / np.sqrt(3)
        cut = (self.mean + self.std**2 / self.mean) / np.sqrt(12)
        share = np.clip(queries - (LEAST_ADJUSTED - 1), 0.0, 1.0)  # of the groups, is adjusted
        return np.asarray(spread + share * (np.minimum(spread, np.maximum(band, cut)) - spread))


class DecodeLoads(NamedTuple):
    """Each iteration of a block works such groups [blocks, configs]."""

    most: FloatArray  # queries of the largest group
    queries: FloatArray  # of a group that has any
    steps: FloatArray  # groups that have any
    chance: FloatArray  # that a group has any

    @property
    def both(self) -> FloatArray:
        """The largest group, and a usual one, have so many queries [2, blocks, configs]."""
        return np.stack([self.most, self.queries])


def decode_loads(batches: PhaseBatches, variance: FloatArray | None = None) -> DecodeLoads:
    """The loads follow from the number of active queries; `variance` [blocks, configs] stands in
    place of its own."""
    blocks, group_batch = batches.queries, batches.group_batch
    variance = blocks.variance_active if variance is None else variance
    mean = group_batch * blocks.active
    is_possible = mean > 0
    # NOTE: expm1 keeps a tiny chance of a step, which 1 - exp would round to none
    chance = np.minimum(-np.expm1(group_batch * blocks.log_absent), mean)
    # a chance too small for the logarithm of its opposite is the mean itself
    chance[chance <= 0] = mean[chance <= 0]
    chance[~is_possible] = 1.0
    queries = mean / chance
    square = (group_batch * variance + mean * mean) / chance
    spread = np.sqrt(np.maximum(square - queries * queries, 0.0))
    steps = batches.groups * chance * is_possible
    return DecodeLoads(queries + expected_maximum_z(steps) * spread, queries, steps, chance)


def charged_context(blocks: PhaseBlocks, loads: DecodeLoads) -> FloatArray:
    """Each query of the largest group, and of a usual one, is charged so many tokens of context
    [2, blocks, configs]."""
    queries = loads.both
    context = np.broadcast_to(blocks.context, queries.shape)
    if blocks.maximum_context is None:
        return context
    table = blocks.maximum_context  # [blocks, configs, doublings + 1]
    flat = expected_maximum(table.reshape(-1, table.shape[-1]), queries.reshape(len(queries), -1))
    return np.maximum(context, flat.reshape(queries.shape))


def moved_rows(batches: PhaseBatches, loads: DecodeLoads) -> tuple[FloatArray, FloatArray]:
    """A group moves so many rows of the cache [blocks, configs] where queries of it end, and that
    happens to this share of its steps."""
    moved = batches.group_batch * batches.queries.moved
    happens = -np.expm1(-moved)
    return moved / np.where(happens > 0, happens, 1.0), np.minimum(happens / loads.chance, 1.0)
