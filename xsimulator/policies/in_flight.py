"""Groups of a pipeline whose steps differ at random: the mean time between a group's steps.

Several groups are in flight, each step goes through all stages in order, and a group's next step
starts when its tokens are back at the head, in its turn. Where all steps are equal that time is
max(groups * slowest stage, sum over stages). Where some steps also encode, one long step holds up
all groups behind it (the bubbles of the paper's Figure 1, ORCA): the mean has no closed form (it is
the growth rate of a product of random max-plus matrices), so the recurrence is run over a short
fixed sequence of steps, the same for every configuration, in which each size has its exact share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.lengths import FloatArray, IntArray

STEPS = 384  # of the sequence, at least: rounds times groups
MIN_ROUNDS = 32
WARM_UP_ROUNDS = 3
LEAST_ENCODES = 24  # of the sequence: fewer would not show the sizes in their shares
_SEED = 5  # of the order of the sequence: the same wherever it is computed


class Intervals(NamedTuple):
    """[configs] mean seconds from a step's start to the group's next turn."""

    any_s: FloatArray
    encode_s: FloatArray  # of those that encode
    plain_s: FloatArray  # of the others


def intervals(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray,
              groups: IntArray) -> Intervals:
    """plain_s: [configs, stages] a step that only decodes; encode_s: [configs, sizes, stages] one
    that encodes, all sizes equally likely; share: [configs] of steps that encode; groups:
    [configs]."""
    found = [np.empty(len(groups)) for _ in range(3)]
    for count in np.unique(groups):
        rows = np.flatnonzero(groups == count)
        part = (plain_s[rows], encode_s[rows], share[rows])
        result = _alone(*part) if plain_s.shape[1] == count == 1 else _seldom(*part, int(count))
        for column, values in zip(found, result, strict=True):
            column[rows] = values
    return Intervals(*found)


def _alone(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray) -> Intervals:
    """One stage, one group: nothing waits for anything."""
    encode, plain = encode_s.mean(axis=1)[:, 0], plain_s[:, 0]
    return Intervals(share * encode + (1 - share) * plain, encode, plain)


def _seldom(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray,
            groups: int) -> Intervals:
    """As `_rounds`; where few of the sequence's steps would encode, what they add is in
    proportion to their share."""
    least = LEAST_ENCODES / _count(groups)
    part = np.minimum(share / least, 1.0)
    found = _rounds(plain_s, encode_s, np.maximum(share, least), groups)
    without = np.maximum(groups * plain_s.max(axis=1), plain_s.sum(axis=1))
    return Intervals(without + part * (found.any_s - without), found.encode_s,
                     without + part * (found.plain_s - without))


def _count(groups: int) -> int:
    return max(-(-STEPS // groups), MIN_ROUNDS) * groups


def _rounds(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray,
            groups: int) -> Intervals:
    configs, sizes, stages = encode_s.shape
    count, warm = _count(groups), WARM_UP_ROUNDS * groups
    order = np.random.default_rng(_SEED).permutation(count)
    rows = np.arange(configs)
    table = np.concatenate([encode_s, plain_s[:, None]], axis=1)
    free, ready = np.zeros((configs, stages)), [np.zeros(configs) for _ in range(groups)]
    starts: list[FloatArray] = []
    total, of_encodes, num_encodes = np.zeros(configs), np.zeros(configs), np.zeros(configs)
    encodes: list[FloatArray] = []
    for turn in range(warm + count + groups):
        group = turn % groups
        place = (order[(turn - warm) % count] + 0.5) / count
        is_encode = place < share
        index = np.where(is_encode, place / np.maximum(share, 1e-12) * sizes, sizes)
        step = table[rows, np.minimum(index.astype(np.int64), sizes)]
        starts.append(np.maximum(free[:, 0], ready[group]))
        encodes.append(is_encode.astype(float))
        through = np.cumsum(step, axis=1)
        ahead = free + step - through  # see xsimulator.pipeline: a running maximum along stages
        ahead[:, 0] = starts[-1]
        free = np.maximum.accumulate(ahead, axis=1) + through
        ready[group] = free[:, -1]
        if warm + groups <= turn:
            between, was_encode = starts[turn] - starts[turn - groups], encodes[turn - groups]
            total += between
            of_encodes += between * was_encode
            num_encodes += was_encode
    mean = total / count
    encode = np.where(num_encodes > 0, of_encodes / np.maximum(num_encodes, 1), mean)
    plain = (total - of_encodes) / np.maximum(count - num_encodes, 1)
    return Intervals(mean, encode, np.where(num_encodes < count, plain, mean))
