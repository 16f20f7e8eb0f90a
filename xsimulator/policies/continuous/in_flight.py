"""Groups of a pipeline whose steps differ at random: the mean time between a group's steps.

Several groups are in flight, each step goes through all stages in order, and a group's next step
starts when its tokens are back at the head, in its turn. Where all steps are equal that time is
max(groups * slowest stage, sum over stages). Where some steps also encode, one long step holds up
all groups behind it (the bubbles of the paper's Figure 1, ORCA): the mean has no closed form (it is
the growth rate of a product of random max-plus matrices), so the recurrence is run over a short
fixed sequence of steps, the same for every configuration, in which each size has about its share:
by csrc/planning.cpp where it can be had, to the bit as it is run here (continuous.native)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.policies.continuous.native import native

STEPS = 768  # of the sequence, at least: rounds times stages
MIN_ROUNDS = 32
WARM_UP_ROUNDS = 3
LEAST_ENCODES = 8  # of the sequence: fewer would not show what their sizes do
_TOGETHER = 4096  # numbers of an array that a turn works on: what stays in a core's cache
_SEED = 5  # of the order of the sequence: the same wherever it is computed


class Intervals(NamedTuple):
    """Mean seconds [configs] pass from a step's start to the group's next turn."""

    any_s: FloatArray
    encode_s: FloatArray  # of those that encode
    plain_s: FloatArray  # of the others


def least_intervals(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray,
                    groups: IntArray, kind_of: Sequence[int] | None = None) -> Intervals:
    """No order of the steps goes below this in the mean: a group's steps one after the other, and
    all steps through the slowest stage; of the two kinds of steps apart, about. Arguments as of
    `intervals`."""
    kinds = np.arange(plain_s.shape[1]) if kind_of is None else np.array(kind_of)
    encode_mean_s = encode_s.mean(axis=1)
    mean_s = share[:, None] * encode_mean_s + (1 - share)[:, None] * plain_s
    any_s = _least(mean_s, groups, kinds)
    waits = any_s / mean_s[:, kinds].sum(axis=1)  # of steps of either kind alike
    return Intervals(any_s, encode_mean_s[:, kinds].sum(axis=1) * waits,
                     plain_s[:, kinds].sum(axis=1) * waits)


def _least(step_s: FloatArray, groups: IntArray, kinds: IntArray) -> FloatArray:
    """The least interval where steps take `step_s` [configs, kinds] in the mean."""
    number = np.bincount(kinds, minlength=step_s.shape[1])
    return np.asarray(np.maximum(step_s @ number, groups * step_s.max(axis=1)))


def intervals(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray, groups: IntArray,
              kind_of: Sequence[int] | None = None, *, alternates: bool = False) -> Intervals:
    """plain_s: [configs, kinds] a step that only decodes; encode_s: [configs, sizes, kinds] one
    that encodes, all sizes equally likely; share: [configs] of steps that encode; groups:
    [configs], no more than stages; kind_of: the kind of each stage, by default its own;
    `alternates`: a group that has encoded decodes next, if their shares allow."""
    kinds = np.arange(plain_s.shape[1]) if kind_of is None else np.array(kind_of)
    assert (groups <= len(kinds)).all(), f"{groups.max() = } {len(kinds) = }"
    columns = [least_intervals(plain_s, encode_s, share, groups, kinds.tolist()).any_s,
             (encode_s.mean(axis=1)[:, kinds]).sum(axis=1),
             plain_s[:, kinds].sum(axis=1)]  # one group alone waits for nothing
    rows = np.flatnonzero(groups > 1)
    size = max(_TOGETHER // len(kinds), 1)
    for part in np.array_split(rows, -(-len(rows) // size) or 1):
        if part.size:
            result = _seldom(plain_s[part], encode_s[part], share[part], groups[part], kinds,
                             alternates)
            for column, values in zip(columns, result, strict=True):
                column[part] = values
    return Intervals(*columns)


def _seldom(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray, groups: IntArray,
            kinds: IntArray, alternates: bool) -> Intervals:
    """As `_rounds`; where few of the sequence's steps would encode, what they add is in
    proportion to their share."""
    least = np.minimum(LEAST_ENCODES / (_count(len(kinds)) * groups), 0.5)
    part = np.minimum(share / least, 1.0)
    means = _rounds(plain_s, encode_s, np.maximum(share, least), groups, kinds, alternates)
    without = _least(plain_s, groups, kinds)
    return Intervals(without + part * (means.any_s - without), means.encode_s,
                     without + part * (means.plain_s - without))


def _count(stages: int) -> int:
    """Each group has as many turns, one a round."""
    return max(-(-STEPS // stages), MIN_ROUNDS)


def _rounds(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray, groups: IntArray,
            kinds: IntArray, alternates: bool) -> Intervals:
    """A front moves through the pipeline: at place w the turn w - s is on stage s. There are as
    many turns in a round as stages; those beyond the groups are empty, and hold nobody up."""
    configs, stages = len(groups), len(kinds)
    rounds = _count(stages)
    index, is_encode, is_real = _sequence(share, groups, stages, rounds, encode_s.shape[1],
                                          alternates)
    table = np.concatenate([encode_s, plain_s[:, None], np.zeros_like(plain_s)[:, None]], axis=1)
    table = np.ascontiguousarray(table.transpose(1, 2, 0))  # [sizes + 2, kinds, configs]
    library, empty = native(), table.shape[0] - 1
    starts = starts_in_numpy(table, index, kinds, is_real) if library is None else (
        library.starts(table, index, kinds, is_real))
    # the means are taken over the rounds after the warm-up [rounds, stages, configs]
    between = np.diff(starts.reshape(-1, stages, configs), axis=0)[-rounds:] * is_real
    encodes = is_encode[-rounds - 1:-1]
    of_encodes, number = (between * encodes).sum(axis=(0, 1)), encodes.sum(axis=(0, 1))
    total, count = between.sum(axis=(0, 1)), rounds * groups
    mean = total / count
    encode = np.where(number > 0, of_encodes / np.maximum(number, 1), mean)
    plain = (total - of_encodes) / np.maximum(count - number, 1)
    # a short sequence has not quite the mean step that it stands for
    drawn = index[-(rounds + 1) * stages:-stages] + np.arange(configs) * (empty + 1)
    counts = np.bincount(drawn.ravel(), minlength=configs * (empty + 1))
    weights = counts.reshape(configs, -1)[:, :empty] / (rounds * groups)[:, None]
    mean_s = np.einsum("cs,skc->ck", weights, table[:empty])
    exact_s = share[:, None] * encode_s.mean(axis=1) + (1 - share)[:, None] * plain_s
    ratio = _least(exact_s, groups, kinds) / _least(mean_s, groups, kinds)
    return Intervals(mean * ratio, encode, np.where(number < count, plain, mean))


def starts_in_numpy(table: FloatArray, index: IntArray, kinds: IntArray,
                    is_real: FloatArray) -> FloatArray:
    """[turns, configs] when each turn begins on the first stage, where it takes `table` [rows,
    kinds, configs] at its row `index` [turns, configs], before the first the last row. kinds:
    [stages]; is_real: [stages, configs] of the turns of a round."""
    configs, stages, turns = table.shape[2], len(kinds), len(index)
    base = kinds[:, None] * configs + np.arange(configs)
    padding = np.full((stages - 1, configs), table.shape[0] - 1)
    # latest turn first: a window of it is the turns on all stages
    upstream = np.concatenate([padding, index])[::-1] * (table.shape[1] * configs)
    flat = table.ravel()
    done, then = np.zeros((stages + 1, configs)), np.zeros((stages + 1, configs))
    starts, steps = np.empty((turns, configs)), np.empty((stages, configs))
    where = np.empty((stages, configs), np.int64)
    for turn in range(turns):
        # its group's tokens are back: the turn a round before has left the last stage just now
        np.multiply(done[stages], is_real[turn % stages], out=done[0])
        first = turns - 1 - turn
        np.add(upstream[first:first + stages], base, out=where)
        flat.take(where, out=steps, mode="clip")
        np.maximum(done[1:], done[:-1], out=then[1:])
        starts[turn] = then[1]
        then[1:] += steps
        done, then = then, done
    return starts


def _sequence(share: FloatArray, groups: IntArray, stages: int, rounds: int, sizes: int,
              alternates: bool) -> tuple[IntArray, BoolArray, FloatArray]:
    """Row of the table of each turn [turns, configs]; whether it encodes [rounds, stages, configs];
    which turns of a round there are, 1 or 0 [stages, configs]."""
    some, of_some = np.unique(groups, return_inverse=True)
    places = np.stack([_places(count, stages, rounds) for count in some.tolist()], axis=2)
    place = places[:, :, of_some]
    chance = np.maximum(share, 1e-12)
    is_encode = place < chance
    if alternates:
        after_plain = np.minimum(chance / np.maximum(1 - share, 1e-12), 1.0)
        after_encode = np.maximum(2 - 1 / chance, 1e-12)
        chance = np.broadcast_to(chance, place.shape).copy()
        for number in range(1, len(place)):
            chance[number] = np.where(is_encode[number - 1], after_encode, after_plain)
            is_encode[number] = place[number] < chance[number]
    index = np.where(is_encode, place / chance * sizes, sizes)
    index = np.minimum(index.astype(np.int64), sizes)
    index += place >= 2
    return index.reshape(-1, len(groups)), is_encode, (place[0] < 2).astype(float)


@lru_cache(maxsize=128)
def _places(groups: int, stages: int, rounds: int) -> FloatArray:
    """[all rounds, stages] place of each turn in the order of steps that encode, as a share; 2,
    beyond any share, of those that are empty."""
    all_rounds = WARM_UP_ROUNDS + rounds + 1
    places = np.full((all_rounds, stages), 2.0)
    order = np.random.default_rng(_SEED).permutation(rounds * groups).reshape(rounds, groups)
    turn = (np.arange(all_rounds) - WARM_UP_ROUNDS) % rounds
    places[:, :groups] = (order[turn] + 0.5) / (rounds * groups)
    return places
