"""Groups of a pipeline whose steps differ at random: the mean time between a group's steps.

Several groups are in flight, each step goes through all stages in order, and a group's next step
starts when its tokens are back at the head, in its turn. Where all steps are equal that time is
max(groups * slowest stage, sum over stages). Where some steps also encode, one long step holds up
all groups behind it (the bubbles of the paper's Figure 1, ORCA): the mean has no closed form (it is
the growth rate of a product of random max-plus matrices), so the recurrence is run over a short
fixed sequence of steps, the same for every configuration, in which each size has about its share:
by csrc/planning.cpp where it can be had, to the bit as it is run here (xsimulator.native)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.native import native

STEPS = 768  # of the sequence, at least: rounds times stages
MIN_ROUNDS = 32
WARM_UP_ROUNDS = 3
LEAST_ENCODES = 8  # of the sequence: fewer would not show what their sizes do
EMPTY = 2.0  # place of a turn that nobody takes, beyond any share
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


class InStep(NamedTuple):
    """Groups encode in the same `rounds` of a `cycle` of so many [configs]: in as many as the group
    of most queries does, beside which the others' last steps decode. What is encoded falls so often
    in a cycle, from a mean step's to nothing; a group's encoding takes a part `filled` of the
    longest's. Where groups drift apart, `rounds` are those in which any encodes, and all do in
    `together`."""

    rounds: FloatArray
    together: FloatArray
    cycle: FloatArray
    falls: FloatArray
    filled: FloatArray


def intervals_in_step(plain_s: FloatArray, encode_s: FloatArray, share: FloatArray, found: InStep,
                      groups: IntArray, kind_of: Sequence[int]) -> Intervals:
    """Where groups encode in the same rounds: the round after a longer one waits until the last of
    the long steps is through, and one in which any group's step is of the longer kind is as long.
    The other arguments are as of `intervals`."""
    rounds, together, cycle, falls, filled = found
    kinds, by_size = np.array(kind_of), np.moveaxis(encode_s, 1, 0)
    encodes_s = np.mean([_least(own, groups, kinds) for own in by_size], axis=0)
    plains_s = _least(plain_s, groups, kinds)
    longest_s = encode_s.mean(axis=1)
    mean_s = plain_s + filled[:, None] * (longest_s - plain_s)
    behind_s, plain_behind_s = (np.minimum(
        (groups - 1) * mean.max(axis=1), own[:, kinds].sum(axis=1) - own.max(axis=1))
        for own, mean in ((longest_s, mean_s), (plain_s, plain_s)))
    rounds = np.where(encodes_s >= plains_s, rounds, together)
    late_s = falls * np.abs(behind_s - plain_behind_s)
    any_s = (rounds * encodes_s + (cycle - rounds) * plains_s + late_s) / cycle
    rest_s = (any_s - share * encodes_s) / np.maximum(1 - share, 1e-12)
    return Intervals(any_s, np.where(share < 1, encodes_s, any_s),
                     np.where(share < 1, rest_s, plains_s))


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
    rows = np.flatnonzero(groups > 1)
    columns = list(np.empty((3, len(groups)))) if len(rows) == len(groups) else [
        least_intervals(plain_s, encode_s, share, groups, kinds.tolist()).any_s,
        (encode_s.mean(axis=1)[:, kinds]).sum(axis=1),
        plain_s[:, kinds].sum(axis=1)]  # one group alone waits for nothing
    size = max(_TOGETHER // len(kinds), 1)
    for part in np.array_split(rows, -(-len(rows) // size)) if len(rows) else ():
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
    rounds, some = _count(len(kinds)), np.unique(groups)
    places = np.stack([_places(count, len(kinds), rounds) for count in some.tolist()])
    of_places = np.searchsorted(some, groups)
    table = np.concatenate([encode_s, plain_s[:, None], np.zeros_like(plain_s)[:, None]], axis=1)
    table = np.ascontiguousarray(table.transpose(1, 2, 0))  # [sizes + 2, kinds, configs]
    summed = _in_numpy if (library := native()) is None else library.rounds
    (total, of_encodes, number), counts = summed(
        table, places, of_places, share, kinds, warm_up=WARM_UP_ROUNDS, alternates=alternates)
    count = rounds * groups
    mean = total / count
    encode = np.where(number > 0, of_encodes / np.maximum(number, 1), mean)
    plain = (total - of_encodes) / np.maximum(count - number, 1)
    # a short sequence has not quite the mean step that it stands for
    mean_s = np.einsum("cs,skc->ck", counts / count[:, None], table[:-1])
    exact_s = share[:, None] * encode_s.mean(axis=1) + (1 - share)[:, None] * plain_s
    ratio = _least(exact_s, groups, kinds) / _least(mean_s, groups, kinds)
    return Intervals(mean * ratio, encode, np.where(number < count, plain, mean))


def _in_numpy(table: FloatArray, places: FloatArray, of_places: IntArray, share: FloatArray,
              kinds: IntArray, *, warm_up: int,
              alternates: bool) -> tuple[FloatArray, FloatArray]:
    """See Native.rounds."""
    (rows, _, configs), stages = table.shape, len(kinds)
    place = np.moveaxis(places[of_places], 0, 2)  # [rounds, stages, configs]
    index, is_encode = _sequence(share, place, rows - 2, alternates)
    is_real = (place[0] < EMPTY).astype(float)  # of the turns of a round
    starts = _starts(table, index.reshape(-1, configs), kinds, is_real)
    # over the rounds after the warm-up [rounds, stages, configs]
    between = np.diff(starts.reshape(-1, stages, configs), axis=0)[warm_up:] * is_real
    encodes, drawn = is_encode[warm_up:-1], index[warm_up:-1]
    counts = np.bincount((drawn + np.arange(configs) * rows).ravel(), minlength=configs * rows)
    return np.stack([between.sum(axis=(0, 1)), (between * encodes).sum(axis=(0, 1)),
                     encodes.sum(axis=(0, 1))]), counts.reshape(configs, rows)[:, :-1].astype(float)


def _starts(table: FloatArray, index: IntArray, kinds: IntArray,
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


def _sequence(share: FloatArray, place: FloatArray, sizes: int,
              alternates: bool) -> tuple[IntArray, BoolArray]:
    """[rounds, stages, configs] row of the table of each turn, and whether it encodes."""
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
    index += place >= EMPTY
    return index, is_encode


@lru_cache(maxsize=128)
def _places(groups: int, stages: int, rounds: int) -> FloatArray:
    """[all rounds, stages] place of each turn in the order of steps that encode, as a share; EMPTY
    of those that are."""
    all_rounds = WARM_UP_ROUNDS + rounds + 1
    places = np.full((all_rounds, stages), EMPTY)
    order = np.random.default_rng(_SEED).permutation(rounds * groups).reshape(rounds, groups)
    turn = (np.arange(all_rounds) - WARM_UP_ROUNDS) % rounds
    places[:, :groups] = (order[turn] + 0.5) / (rounds * groups)
    return places
