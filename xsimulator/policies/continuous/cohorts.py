"""Cohorts of queries that are all of one length: who begin together end together, and so do those
that take their places, over and over.

Symbols: L = input tokens, D = decode iterations, n = a group's queries, B = its token budget, all
whole numbers. vLLM encodes B // L queries a step until its slots are taken, and decodes all of them
D times: a cycle of ceil(n / (B // L)) + D steps. What Sarathi does is followed step by step: each
decodes all that run, and what B has left is encoded of those whose slots are free; while that is
nothing, the steps until the next cohort ends are taken at once. After SETTLED cycles one is nearly
like the next: cohorts that a budget cuts spread a little further each time.

Where KV in blocks runs out, fewer are taken up; where those grow until it runs out at the fullest
step, some are evicted, and what follows is no cycle."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK, blocks_of
from xsimulator.policies.continuous.load import Load, joined
from xsimulator.policies.continuous.query_sizes import SIZES

SETTLED = 6  # cycles before those that are counted
_COUNTED = 2  # cycles, at least
_COUNTED_STEPS = 96  # at least: few may not be whole cycles
_HALF_BLOCK = (BLOCK_TOKENS - 1) / 2  # what a query's last block leaves empty, in the mean
_PARTS = 8  # of an encode step, among those that others take meanwhile
_MOST_KEPT = 4096


class Cycle(NamedTuple):
    """What a group's steps do, over and over."""

    rate: float  # queries that end per step
    tokens: IntArray  # [steps that encode]
    queries: FloatArray  # a step's tokens are of so many inputs, likewise
    share: float  # of steps that encode
    falls: float  # see Load
    decoding: float  # queries in a step that decodes, in the mean
    beside: float  # and in one that encodes
    chunks: float  # steps that a query's encoding takes
    after: float  # steps that encode between its own encoding and its first that decodes
    room: float  # tokens in blocks with which nobody is evicted, nor waits for blocks


CycleOf = Callable[[int, int, int, int], Cycle]  # of L, D, n and B


def load(cycle_of: CycleOf, inputs: int, iterations: int, held: Sequence[FloatArray],
         otherwise: Callable[..., Load]) -> Load:
    """What each group holds with `held`: its slots, KV tokens, tokens a step and the number of
    groups, all [configs]; `otherwise` says it of those where KV runs out."""
    # where some groups have a slot more than others all wait for these
    most = np.maximum(np.ceil(held[0] - 1e-9), 1.0)
    taken_up, is_kept = _taken_up(inputs, iterations, held[1])
    most = np.where(is_kept, np.minimum(most, taken_up), most)
    cycles = [cycle_of(inputs, iterations, *pair)
              for pair in zip(most.astype(int).tolist(), held[2].astype(int).tolist(), strict=True)]
    fits = (np.array([cycle.room for cycle in cycles]) <= held[1]) | is_kept
    filled = np.minimum(held[0] / most, 1.0)
    parts = []
    if fits.any():
        rows = np.flatnonzero(fits)
        own = _load([cycles[row] for row in rows], iterations, filled[rows])
        parts.append(_drifting(own, rows, cycles, most, held[0], partial(
            cycle_of, inputs, iterations), held[2]) if cycle_of is whole else own)
    if not fits.all():
        parts.append(otherwise(*(own[~fits] for own in held)))
    return joined(parts, np.argsort(~fits, kind="stable"))


def _taken_up(inputs: int, iterations: int, tokens: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Queries that a group with room for so many tokens [configs] takes up at a time, whatever its
    slots, and whether all have room until they end: of few output tokens, none of these is
    evicted."""
    number = tokens // BLOCK_TOKENS
    taken_up = (number - np.floor(WATERMARK * number)) // blocks_of(inputs)
    return taken_up, (taken_up >= 1) & (taken_up * blocks_of(inputs + iterations) <= number)


def _load(cycles: list[Cycle], iterations: int, filled: FloatArray) -> Load:
    """`filled` [configs]: queries of a group in the mean over those of the largest, whose cycles
    these are."""
    rate, share, falls, decoding, beside, chunks, after = (
        np.array([getattr(cycle, name) for cycle in cycles])
        for name in ("rate", "share", "falls", "decoding", "beside", "chunks", "after"))
    of_plain, none = rate * iterations - share * beside, np.zeros(len(cycles))
    alone = np.maximum(of_plain / np.maximum(1 - share, 1e-12), 0.0)
    return Load(
        per_step=rate * filled, share=share, beside=beside,
        tokens=np.stack([_slices(cycle.tokens) for cycle in cycles]),
        encoded=np.stack([_slices(cycle.queries) for cycle in cycles]),
        alone=np.where(share < 1, alone, decoding), ended=rate * filled,
        decoding=decoding * filled, present=(decoding + rate) * filled, encode_steps=chunks,
        between=none, waits=none, after=after, in_step=np.ones(len(cycles)), falls=falls,
        filled=filled, apart=np.ones(len(cycles)), together=np.ones(len(cycles)))


def _drifting(load: Load, rows: IntArray, cycles: list[Cycle], most: FloatArray, slots: FloatArray,
              cycle_of: Callable[[int, int], Cycle], budgets: FloatArray) -> Load:
    """Groups with a query more than others need an encode step more for it, and fall behind these
    by a round each cycle: in the long run the two kinds encode in rounds that have nothing to do
    with each other, and a round in which either does takes as long as one in which both do: as the
    longer of their steps, and the others' are all of whole budgets. So it is with rounds in which
    either decodes alone, where many do and these are longer."""
    changed = {name: getattr(load, name).copy() for name in (
        "per_step", "tokens", "encoded", "falls", "filled", "apart", "together")}
    for place, row in enumerate(rows.tolist()):
        cycle = cycles[row]
        if load.filled[place] == 1 or cycle.queries[-1] != 1:
            continue
        other, part = cycle_of(int(most[row]) - 1, int(budgets[row])), 1 - most[row] + slots[row]
        changed["per_step"][place] = part * cycle.rate + (1 - part) * other.rate
        either = cycle.share + (1 - cycle.share) * other.share
        for name, own, most_of in (("tokens", cycle.tokens, other.tokens.max()),
                                   ("encoded", cycle.queries, other.queries.max())):
            changed[name][place] = _slices(np.append(np.repeat(own, _PARTS), np.full(round(
                _PARTS * len(own) * other.share / (either - other.share)), most_of)))
        changed["apart"][place] = either / cycle.share
        changed["together"][place] = other.share
        changed["falls"][place] = (part * (1 - other.share) * cycle.falls
                                   + (1 - part) * (1 - cycle.share) * other.falls)
        changed["filled"][place] = 1.0
    return replace(load, **changed)


def at_quantile(load: Load, quantile: float) -> Load:
    """The load with the steps that a query's encoding and what is encoded after it take at this
    quantile of all queries, no fewer than in the mean: the first ones of a cohort wait for all
    others of it, and some inputs are cut once more."""
    number = 2 * load.after + 1  # of a cohort's encode steps, each as likely a query's own
    after = np.maximum(np.ceil(quantile * number - 1e-9) - 1, load.after)
    steps = np.maximum(np.ceil(load.encode_steps - (1 - quantile)), load.encode_steps)
    return replace(load, after=np.where(load.in_step > 0, after, load.after),
                   encode_steps=np.where(load.in_step > 0, steps, load.encode_steps))


def _slices(values: FloatArray | IntArray) -> FloatArray:
    """The means [SIZES] are over equal parts of the values, rising."""
    sums = np.concatenate([[0.0], np.cumsum(np.sort(values))])
    edges = np.linspace(0.0, len(values), SIZES + 1)
    of_parts = np.diff(np.interp(edges, np.arange(len(sums)), sums))
    return np.asarray(of_parts * SIZES / len(values))


@lru_cache(maxsize=_MOST_KEPT)
def whole(inputs: int, iterations: int, slots: int, budget: int) -> Cycle:
    """vLLM's cycle of L, D, n and B."""
    each = max(budget // inputs, 1)
    full, rest = divmod(slots, each)
    queries = np.array([each] * full + [rest] * (rest > 0))
    number = len(queries)
    after = float(queries @ np.arange(number)[::-1]) / slots
    falls = float(queries[0]) * number / slots / (number + iterations)
    return Cycle(slots / (number + iterations), queries * inputs, queries.astype(float),
                 number / (number + iterations), falls, slots, 0.0, 1.0, after,
                 slots * BLOCK_TOKENS * max(blocks_of(inputs + iterations),
                                            blocks_of(inputs) / (1 - WATERMARK)))


@lru_cache(maxsize=_MOST_KEPT)
def chunked(inputs: int, iterations: int, slots: int, budget: int) -> Cycle:
    """Sarathi's cycle of L, D, n and B: n is no more than B."""
    ends = deque[tuple[int, int]]()  # (first step without them, queries)
    step = running = part = begun = 0
    held = most_held = 0.0
    # of a last block, in the mean or where all end
    empty = max(blocks_of(inputs + iterations) * BLOCK_TOKENS - inputs - iterations, _HALF_BLOCK)
    # a cycle's queries: all slots', or what the budget has tokens for until the first one ends
    each = min(slots, -(-budget * (iterations + 1) // (inputs + iterations)))
    cycles = max(_COUNTED, -(-_COUNTED_STEPS // (iterations + 1)))
    first, last = SETTLED * each, (SETTLED + cycles + 1) * each
    rows = list[tuple[int, int, int, int, int]]()  # step, tokens, decoding, chunks, begun
    while begun < last:
        while ends and ends[0][0] <= step:
            most_held = max(most_held, held)
            number = ends.popleft()[1]
            running -= number
            held -= number * (inputs + iterations + empty)
        work = part + (slots - running - (part > 0)) * inputs
        take = min(budget - running, work)
        if take <= 0:
            held += running * (ends[0][0] - step)
            step = ends[0][0]
            continue
        done = (inputs - part if part else 0) + take
        joined, left = divmod(done, inputs)
        chunks = joined + (left > 0)
        new = chunks - (part > 0)
        rows.append((step, take, running, chunks, new))
        if joined:
            ends.append((step + iterations + 1, joined))
        held += running + new * (inputs + empty)
        part = inputs - left if left else 0
        running, begun = running + joined, begun + new
        step += 1
    of_steps = np.array(rows).T
    follows = np.append(np.diff(of_steps[0]) == 1, False)
    falls = np.maximum(of_steps[1] - np.append(of_steps[1][1:], 0) * follows, 0)
    # who begins has the slot of one that began a cycle before, so `each` queries
    began = np.repeat(of_steps[0], of_steps[4])[first:]
    rate = each * cycles / float((began[cycles * each:][:each] - began[:each]).mean())
    rate = min(rate, slots / (iterations + 1), budget / (inputs + iterations))
    until = np.cumsum(of_steps[4])
    is_counted = (until > first) & (until <= last - each)
    _, tokens, beside, chunks, _ = of_steps[:, is_counted]
    queries = tokens / inputs
    share = min(rate / float(queries.mean()), 1.0)
    return Cycle(rate, tokens, queries, share,
                 share * float(falls[is_counted].sum() / tokens.sum()), rate * iterations,
                 float(beside.mean()), float(chunks.sum() / queries.sum()), 0.0,
                 max(most_held, held) / (1 - WATERMARK))
