"""Admission by free blocks or by a token budget, step by step, over arrays of configurations.

Where KV in blocks runs out, queries are admitted as others end and evicted as those present grow:
how often depends on how both scatter, which no mean tells. The walk keeps, for each configuration,
the number of queries that run, the free tokens, and the latest admitted (who are evicted first);
who ends, and how much it frees, is drawn once for all configurations. Ages are not followed: a
query ends with chance 1 / E[D] per step, and frees more where those present hold more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.lengths import FloatArray
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK

STEPS = 448
_WARM_UP = 64
_DEPTH = 24  # latest admitted, and evicted, queries that are remembered
_AT_ONCE = 128  # most queries that end, are evicted or join at one step
_HALF_BLOCK = (BLOCK_TOKENS - 1) / 2  # what a query's last block leaves empty, in the mean
_SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """[configs] unless said; means over steps that decode."""

    running: FloatArray
    tokens: FloatArray  # [configs, steps] encoded beside or after each
    joined: FloatArray  # [configs, steps] queries whose encoding ends
    again: FloatArray  # tokens encoded again, per token encoded for the first time
    evicted: FloatArray  # queries that wait to be encoded again
    chunks: FloatArray  # steps that a query's encoding takes


class _Stack:
    """[configs] stacks of sizes; the oldest of a full one are forgotten."""

    def __init__(self, configs: int) -> None:
        self.sizes = np.zeros((configs, _DEPTH))
        self.count = np.zeros(configs, np.int64)
        self._rows = np.arange(configs)

    def push(self, where: np.ndarray, values: FloatArray) -> None:
        rows = np.flatnonzero(where)
        full = rows[self.count[rows] == _DEPTH]
        self.sizes[full, :-1] = self.sizes[full, 1:]
        self.count[full] -= 1
        self.sizes[rows, self.count[rows]] = values[rows]
        self.count[rows] += 1

    def top(self, otherwise: FloatArray) -> FloatArray:
        found = self.sizes[self._rows, np.maximum(self.count - 1, 0)]
        return np.where(self.count > 0, found, otherwise)

    def pop(self, where: np.ndarray) -> None:
        self.count = np.where(where, np.maximum(self.count - 1, 0), self.count)


def walk(*, slots: FloatArray, room: FloatArray, budget: FloatArray, is_chunked: bool,
         iterations: float, held: float, input_sizes: FloatArray,
         last_sizes: FloatArray) -> Walk:
    """slots, room (tokens), budget (tokens a step, where `is_chunked`): [configs] of one group.

    iterations: E[D]; held: tokens of a query present, in the mean; input_sizes, last_sizes:
    equally likely input tokens of a query, and what it holds when it ends."""
    rng = np.random.default_rng(_SEED)
    configs = len(slots)
    inputs = np.concatenate([rng.permutation(input_sizes) for _ in range(64)])
    lasts = np.concatenate([rng.permutation(last_sizes) for _ in range(64)])
    gaps = -np.log1p(-(rng.permutation(lasts.size) + 0.5) / lasts.size)
    slots = np.maximum(np.rint(slots), 1.0)
    running = np.minimum(slots, 0.95 * room / held)
    if is_chunked:  # no more than the budget keeps supplied
        running = np.minimum(running, budget * iterations / (iterations + input_sizes.mean()))
    running = np.maximum(np.floor(running), 1.0)
    free = room - running * held
    watermark = np.floor(WATERMARK * room / BLOCK_TOKENS) * BLOCK_TOKENS
    latest, waiting = _Stack(configs), _Stack(configs)
    drawn, ended = np.zeros(configs, np.int64), np.zeros(configs, np.int64)
    hazard, part, whole = np.zeros(configs), np.zeros(configs), np.zeros(configs)
    none = np.zeros(configs)
    shape = (STEPS, configs)
    tokens, joined, run, waits = (np.zeros(shape) for _ in range(4))
    anew, fresh, pieces, done = none.copy(), none.copy(), none.copy(), none.copy()
    for step in range(STEPS):
        may_admit = np.ones(configs, bool)
        for _ in range(_AT_ONCE):  # evict until all can grow
            short = (free < running) & (running > 1)
            if not short.any():
                break
            may_admit &= ~short | (not is_chunked)
            partly = short & (part > 0)
            free += np.where(partly, whole + _HALF_BLOCK, 0.0)
            waiting.push(partly, whole)
            part = np.where(partly, 0.0, part)
            short &= ~partly
            size = latest.top(none + held - step) + step
            free += np.where(short, size, 0.0)
            running = running - short
            latest.pop(short)
            waiting.push(short, size - _HALF_BLOCK + 1)
        free = free - running
        run[step], waits[step] = running, waiting.count
        left = budget - running if is_chunked else none + np.inf
        count_before = running.copy()
        for _ in range(_AT_ONCE):  # admit
            starts = (part == 0) & may_admit & (left > 0)
            size = waiting.top(inputs[drawn % inputs.size])
            present = running + (part > 0)
            starts &= (present < slots) & (
                (free - size - _HALF_BLOCK >= watermark) | (present == 0))
            again = starts & (waiting.count > 0)
            waiting.pop(again)
            drawn += starts & ~again
            anew += np.where(again, size, 0.0)
            fresh += np.where(starts & ~again, size, 0.0)
            free -= np.where(starts, size + _HALF_BLOCK, 0.0)
            part, whole = np.where(starts, size, part), np.where(starts, size, whole)
            works = (part > 0) & (left > 0)
            if not works.any():
                break
            take = np.where(works, np.minimum(part, left), 0.0)
            tokens[step] += take
            left, part = left - take, part - take
            finished = works & (part <= 0)
            pieces += works
            done += finished
            running = running + finished
            joined[step] += finished
            latest.push(finished, whole + _HALF_BLOCK - (step + 1))
        hazard += count_before / iterations
        for _ in range(_AT_ONCE):  # end
            gap = gaps[ended % gaps.size]
            ends = (hazard >= gap) & (running > 0)
            if not ends.any():
                break
            ratio = np.clip((room - free) / np.maximum(running, 1.0) / held, 0.5, 2.0)
            free += np.where(ends, (lasts[ended % lasts.size] + _HALF_BLOCK) * ratio, 0.0)
            running = running - ends
            hazard -= np.where(ends, gap, 0.0)
            ended += ends
        free = np.minimum(free, room)
        latest.count = np.minimum(latest.count, running.astype(np.int64))
    kept = slice(_WARM_UP, None)
    return Walk(
        running=run[kept].mean(axis=0), tokens=tokens[kept].T, joined=joined[kept].T,
        again=anew / np.maximum(fresh, 1e-12), evicted=waits[kept].mean(axis=0),
        chunks=pieces / np.maximum(done, 1.0))


def equally_likely(tokens: FloatArray, joined: FloatArray,
                   sizes: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Share of steps that encode [configs], and `sizes` equally likely ones of them in rising
    order: tokens and queries [configs, sizes]."""
    order = np.argsort(tokens, axis=1)
    tokens, joined = (np.take_along_axis(a, order, axis=1) for a in (tokens, joined))
    steps = tokens.shape[1]
    number = (tokens > 0).sum(axis=1)
    edges = steps - number[:, None] * (1 - np.arange(sizes + 1) / sizes)  # [configs, sizes + 1]
    found = []
    for values in (tokens, joined):
        sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        low = np.minimum(edges.astype(np.int64), steps - 1)
        at = np.take_along_axis(sums, low, axis=1)
        after = np.take_along_axis(sums, low + 1, axis=1)
        between = at + (edges - low) * (after - at)
        found.append(np.diff(between, axis=1) * sizes / np.maximum(number, 1)[:, None])
    return number / steps, found[0], found[1]

