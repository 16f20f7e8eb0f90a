"""What RRA's groups are dealt and encode in chunks, phase by phase, by the rule itself.

Symbols: as in rra.chunked. Where inputs scatter far, a phase is not like another: a group that has
more tokens than its chunks of a phase hold takes up no more while as many queries as it would take
wait, all groups then encode in every iteration, and a batch with one long input is made of few
(xrunner.rules.batch_sizer). So queries whose lengths are spread evenly over their distribution are
dealt in the same order twice, as by xrunner.rules.rra and xrunner.rules.chunks; what the second lap
finds is taken for the steady state. That needs no steps: chunks follow from sums of tokens. How
decode batches are led back to their mean, and the groups' room, are left aside.

By csrc/planning_dealt.cpp where it can be had, to the token as it is here."""

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths, Lengths
from xrunner.rules.batch_sizer import BatchSizer
from xsimulator.addresses import address_of
from xsimulator.native import native

LAPS = 2
MOST_PHASES = 1 << 14  # of all laps: a long input may fill its group's chunks for thousands
_SEED = 3  # of the order of the queries: the same wherever it is computed


class Rule(NamedTuple):
    """Queries of a phase, its iterations, tokens of a chunk, and groups."""

    batch: int
    iterations: int
    chunk: int
    groups: int


class Cells(NamedTuple):
    """[phases, groups] queries dealt, tokens of a chunk, and tokens encoded in the phases before;
    [phases] iterations from one chunk to the next."""

    counts: IntArray
    sizes: IntArray
    before: IntArray
    every: IntArray


def cells_of(inputs: IntArray, sizer: BatchSizer, rule: Rule) -> Cells:
    """What LAPS laps over the inputs [queries] are dealt as."""
    library = native()
    if library is None:
        return cells_by_rule(inputs, sizer, rule)
    facts = np.array([len(inputs), *rule, LAPS, MOST_PHASES], np.int64)
    even = np.array([sizer.mean_input, sizer.adjustment])
    found = [np.empty((MOST_PHASES, rule.groups), np.int64) for _ in range(3)]
    every, inputs = np.empty(MOST_PHASES, np.int64), np.ascontiguousarray(inputs, np.int64)
    phases = library.dealt(address_of(facts), address_of(even), address_of(inputs),
                           *(address_of(own) for own in found), address_of(every))
    counts, sizes, before = (own[:phases] for own in found)
    return Cells(counts, sizes, before, every[:phases])


def cells_by_rule(inputs: IntArray, sizer: BatchSizer, rule: Rule) -> Cells:
    """The same by the Python classes of the rule."""
    batch, iterations, chunk, groups = rule
    tokens, place = inputs.tolist(), 0
    lap = len(tokens)
    tokens *= LAPS + 1 + sizer.most(-(-batch // groups)) * groups // lap
    starts: list[list[int]] = [[] for _ in range(groups)]  # tokens of the group before each query
    dealt, done, begun = [0] * groups, [0] * groups, [0] * groups
    base, odd = divmod(batch, groups)
    rows: list[tuple[list[int], list[int], list[int], int]] = []
    while place < LAPS * lap and len(rows) < MOST_PHASES:
        counts = [0] * groups
        for group in range(groups):
            quota = base + ((group + len(rows) * odd) % groups < odd)
            if len(starts[group]) - begun[group] >= quota:
                continue
            counts[group] = sizer.count(tokens[place:place + sizer.most(quota)], quota)
            for size in tokens[place:place + counts[group]]:
                starts[group].append(dealt[group])
                dealt[group] += size
            place += counts[group]
        left = [own - before for own, before in zip(dealt, done, strict=True)]
        every = min(max(chunk * iterations // max(*left, 1), 1), iterations)
        times = -(-iterations // every)
        sizes = [min(-(-own // times), chunk) for own in left]
        rows.append((counts, sizes, list(done), every))
        for group, own in enumerate(starts):
            done[group] += min(left[group], sizes[group] * times)
            while begun[group] < len(own) and own[begun[group]] < done[group]:
                begun[group] += 1
    return Cells(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


class Dealt(NamedTuple):
    """Of the queries [queries] that join decoding within the phases of the last lap: their group,
    the first and the last iteration of their encoding, counted from where these phases begin, their
    decode iterations, and tokens of their inputs. Of these phases: iterations from one chunk to the
    next [phases], tokens that are encoded and in how many chunks [phases, groups]."""

    iterations: int  # of a phase
    group: IntArray
    begins: IntArray
    joins: IntArray
    stays: IntArray
    inputs: IntArray
    every: IntArray
    tokens: IntArray
    chunks: IntArray

    @classmethod
    def of(cls, inputs: IntArray, stays: IntArray, sizer: BatchSizer, rule: Rule) -> "Dealt":
        """Of queries in this order: tokens of their inputs, and decode iterations."""
        cells, iterations = cells_of(inputs, sizer, rule), rule.iterations
        counts, times = cells.counts, -(-iterations // cells.every)[:, None]
        place = np.arange(counts.sum()) % len(inputs)
        group = np.repeat(np.arange(counts.size) % rule.groups, counts.ravel())
        order = np.argsort(group, kind="stable")  # by group, as dealt to each
        group, place = group[order], place[order]
        own, ends = inputs[place], np.cumsum(inputs[place])
        most = np.bincount(group, own, rule.groups).astype(np.int64)  # tokens of each group
        base = (np.cumsum(most) - most)
        until = ends - base[group]
        # what is encoded up to the end of each phase never exceeds what was dealt by then
        number = np.cumsum(counts, axis=0)
        held = np.append(0, ends)[(np.cumsum(number[-1]) - number[-1]) + number] - base
        taken = np.minimum(held - cells.before, cells.sizes * times)
        # one row of all groups' phases, each group's after the one's before it
        away = np.arange(rule.groups) * (int(most.max()) + 1)
        row = (cells.before + taken + away).T.ravel()
        phases = len(counts)
        first = np.searchsorted(row, until - own + away[group], side="right")
        last = np.searchsorted(row, until + away[group], side="left")
        start = int(np.searchsorted(np.cumsum(counts.sum(axis=1)), (LAPS - 1) * len(inputs)) + 1)
        start = start if start < phases else phases // LAPS
        known = (last < (group + 1) * phases) & (last - group * phases >= start)
        group, first, last = group[known], first[known], last[known]
        spans = (np.broadcast_to(cells.every, (rule.groups, phases)).ravel(),
                 cells.before.T.ravel(), np.maximum(cells.sizes.T.ravel(), 1))

        def at(cell: IntArray, chunk_of: IntArray) -> IntArray:  # the iteration of such a chunk
            return (cell % phases - start) * iterations + spans[0][cell] * chunk_of

        begins = (until - own)[known] - spans[1][first]
        joins = until[known] - spans[1][last]
        later = slice(start, phases)
        return cls(iterations, group, at(first, begins // spans[2][first]),
                   at(last, -(-joins // spans[2][last]) - 1), stays[place][known], own[known],
                   cells.every[later], taken[later],
                   (-(-taken // np.maximum(cells.sizes, 1)))[later])


def spread(lengths: JointLengths, count: int, fewer: int) -> tuple[IntArray, IntArray]:
    """(inputs, decode iterations) of so many queries, spread evenly over their distribution, in an
    order that is random, but always the same. Inputs have the mean of theirs, however far these
    reach; pairs that were observed have where each is taken equally often."""
    rng, places = np.random.default_rng(_SEED), (np.arange(count) + 0.5) / count
    if lengths.pairs is None:
        outputs = lengths.outputs.support[np.searchsorted(
            np.cumsum(lengths.outputs.pmf), places).clip(0, len(lengths.outputs.support) - 1)]
        inputs, outputs = _means_of_shares(lengths.inputs, count), outputs[rng.permutation(count)]
    else:
        order = np.lexsort(lengths.pairs.T)
        inputs, outputs = lengths.pairs[order[(places * len(order)).astype(np.int64)]].T
    shuffled = rng.permutation(count)
    return inputs[shuffled].astype(np.int64), np.maximum(outputs[shuffled] - fewer, 0)


def _means_of_shares(lengths: Lengths, count: int) -> IntArray:
    """[count] the mean of each of so many equal shares, in whole tokens; their sum is that of all,
    to a token each."""
    below: FloatArray = np.append(0.0, np.cumsum(lengths.pmf))
    tokens = np.append(0.0, np.cumsum(lengths.pmf * lengths.support))
    until = np.interp(np.linspace(0.0, below[-1], count + 1), below, tokens) * count
    return np.asarray(np.maximum(np.diff(np.rint(until)), 1), np.int64)
