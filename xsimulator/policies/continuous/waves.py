"""Encode steps of vLLM's rule between two steps that decode: one after the other, as long as slots
are free, since a query whose output is its first token leaves its slot with the step that encodes
it.

Symbols: p = share of the queries that decode at all, q = 1 - p, k = slots that a step which decodes
leaves free, c = k / p = queries encoded until decoding queries have taken them all. The first
encode step takes k queries, of which k q leave at once, so the next takes k q, then k q^2, ..:
wave w is there at all with chance

    a_w = 1 - (1 - q^w)^k

and has k q^w / a_w queries then. So with one token for half of the queries 14 free slots take five
encode steps, not one of 28 queries. A batch of more tokens than a step's budget takes several steps
in its turn. A query that decodes waits for all that come after its own: later ones have fewer
tokens, and take less, though not in proportion, so what it waits for is counted half by steps and
half by tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray

_WHOLE = 24  # waves that are told apart; later ones in groups, each a fifth longer
_LEAST = 0.02  # of a query: what is expected to come after it is left out
_MOST = 4096.0  # queries encoded in a phase of which that holds
_SOME = 1e-6  # share of queries that leave at once, below which there is one wave


class EncodeSteps(NamedTuple):
    """Of a phase between two steps that decode, [configs]: `number` of encode steps; [configs,
    SIZES] equally likely `tokens` and `queries` of one, rising; what a query which decodes waits
    for `after` its own, in mean steps."""

    number: FloatArray
    tokens: FloatArray
    queries: FloatArray
    after: FloatArray


class _Waves(NamedTuple):
    """[waves] of them that are alike: how many, the part of all queries that one has, and what is
    left of the slots on the way to it."""

    number: FloatArray
    part: FloatArray
    left: FloatArray


def encode_steps(tokens: FloatArray, queries: FloatArray, decoding_share: float,
                 budget: FloatArray, filled: FloatArray) -> EncodeSteps:
    """tokens, queries [configs, SIZES]: what is encoded in a phase, equally likely, if any is.
    `filled` [configs]: tokens of a step that is full, as `budget` says it is."""
    waves = _waves_of(decoding_share)
    part = waves.part * waves.number
    freed = np.maximum(queries * decoding_share, 1.0)[..., None]  # [configs, SIZES, waves]
    chance = 1 - (1 - waves.left) ** freed
    held = tokens[..., None] * (waves.part / np.maximum(chance, 1e-300))
    full = np.where(held > budget[:, None, None], np.ceil(held / filled[:, None, None]) - 1, 0.0)
    last = np.maximum(held - full * filled[:, None, None], 1.0)
    weight, size = (np.stack(pair, axis=-1).reshape(len(tokens), -1) for pair in (
        (chance * waves.number * full, chance * waves.number),
        (np.broadcast_to(filled[:, None, None], held.shape), last)))
    of_step, of_tokens = _equally_likely(weight, size, tokens.shape[1])
    number, mean = of_step / tokens.shape[1], tokens.mean(axis=1)
    of_tokens *= (mean / (number * of_tokens.mean(axis=1)))[:, None]
    # one that decodes has a slot, and waits for what fills the others
    others = (1 - (1 - waves.left) ** (freed - 1)) * (full + 1)
    by_steps = _behind(others * waves.number, others, waves) + full / 2 + 1
    by_tokens = tokens[..., None] * _behind(part, waves.part, waves) * (1 - 1 / freed)
    by_tokens = by_tokens + held * (full + 2) / (2 * full + 2)
    both = (by_steps + by_tokens * (number / mean)[:, None, None]) / 2
    whose = queries[..., None] * part
    return EncodeSteps(
        number, of_tokens, of_tokens * (queries.mean(axis=1) / mean)[:, None],
        after=np.maximum((both * whose).sum(axis=(1, 2)) / whose.sum(axis=(1, 2)) - 1, 0.0))


def _behind(every: FloatArray, one: FloatArray, waves: _Waves) -> FloatArray:
    """What comes behind each wave [..., waves], in the mean of those alike, where so much is of
    them all, and of one."""
    return np.asarray(np.cumsum(every[..., ::-1], axis=-1)[..., ::-1]
                      - one * (waves.number + 1) / 2)


@lru_cache(maxsize=8)
def _waves_of(decoding_share: float) -> _Waves:
    leaving = 1 - decoding_share
    if leaving < _SOME:
        return _Waves(np.ones(1), np.ones(1), np.ones(1))
    last = np.log(_LEAST / (_MOST * decoding_share + _LEAST)) / np.log(leaving) + 1
    edges = [float(wave) for wave in range(_WHOLE + 1)]
    while edges[-1] < last:
        edges.append(np.ceil(1.2 * edges[-1]))
    edge = np.array(edges[:max(int(np.searchsorted(edges, last)) + 1, 2)])
    number = np.diff(edge)
    part = -np.diff(leaving ** edge)  # of all: p q^w, summed
    part = part / part.sum() / number
    return _Waves(number, part, part / part[0])


def _equally_likely(weight: FloatArray, values: FloatArray,
                    sizes: int) -> tuple[FloatArray, FloatArray]:
    """The sum of the weights [configs], and the values [configs, kinds] as `sizes` that are equally
    likely, rising."""
    order = np.argsort(values, axis=1)
    weight, values = (np.take_along_axis(own, order, axis=1) for own in (weight, values))
    start: FloatArray = np.zeros((len(weight), 1))
    share, sums = (np.concatenate([start, np.cumsum(own, axis=1)], axis=1)
                   for own in (weight, weight * values))
    total = share[:, -1:]
    row = 2.0 * np.arange(len(weight))[:, None]  # all rows lie behind each other
    edges = np.linspace(0.0, 1.0, sizes + 1)
    below = np.interp((row + edges).ravel(), (row + share / total).ravel(), sums.ravel())
    return total[:, 0], np.diff(below.reshape(len(weight), -1), axis=1) * sizes / total
