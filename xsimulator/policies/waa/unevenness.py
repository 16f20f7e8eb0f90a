"""What uneven batches cost WAA's encode pool, which no more than a few steps may be under way in.

Batches of four and more are kept even (xrunner.rules.batch_sizer); those of one to three are not,
nor any where a job asks for no adjustment. With P stages, P + 2 steps may be under way, their
handover included, so a batch of long inputs passes P stages while those behind it wait for its
place: the slowest stage idles. The time from one step to the next is that of the longest path of

    end(n, j) = max( end(n, j - 1), end(n - 1, j) ) + t(n, j)
    start(n) >= end(n - P - 2, handover)

in the mean over n. That has no formula; it is worked out over a sequence of batches whose inputs
are fixed quantiles of their distribution in a fixed order, so that the same question has the same
answer. A path that changes stages at the longest batch of each round of P + 2 shows when it
matters: P - 1 times what the longest is above the mean must exceed two steps less the handover."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.native import native

SPARE_STEPS = 2  # under way beyond one for each stage: one waits for its tokens, one is handed over
_STEPS = 600  # of the sequence
_BEGIN = 100  # those before fill the pool
_UNEVEN_RATIO = 2  # between batches that are looked at, where none are kept even
_EVEN = 0.02  # tokens' deviation over their mean below which nothing is lost
_MOST_KNOWN = 4096  # pools whose answers are kept: both policies, and searches of parts of a
# cluster, ask for the same ones
_known: dict[tuple[bytes, ...], FloatArray] = {}


class UnevenPool(NamedTuple):
    """Seconds of an encode pool with each kind of batch: of its stages [batches, stages], what a
    step of twice the tokens takes more, and the mean batch's handover [batches]."""

    steps: FloatArray
    rises: FloatArray
    handover: FloatArray


class Unevenness:
    """Batches of one distribution of inputs."""

    def __init__(self, inputs: Lengths, adjustment: float) -> None:
        self._inputs = inputs
        spread = inputs.std / inputs.mean
        most = LEAST_ADJUSTED - 1 if adjustment > 0 else int((spread / _EVEN) ** 2) + 1
        # where all are uneven, so many kinds of batches, and what is lost in between is linear
        self.batches: FloatArray = np.unique(np.append(_UNEVEN_RATIO ** np.arange(
            int(np.log2(most)) + 1), most)).astype(float)
        if adjustment > 0:
            self.batches = np.arange(1.0, LEAST_ADJUSTED)
        self.batches.flags.writeable = False
        self._shares: FloatArray | None = None
        self._name = b""  # of the sequence, once there is one

    def lengthened(self, pools: Sequence[UnevenPool]) -> list[FloatArray]:
        """Of each pool the time between two steps over that of the slowest stage, of `batches`. All
        pools that are new are worked out together."""
        tokens = self._tokens()
        keys = [(self._name, *(part.tobytes() for part in pool)) for pool in pools]
        new = {key: pool for key, pool in zip(keys, pools, strict=True) if key not in _known}
        if new:
            found = _between_s(tokens, list(new.values()))
            for (key, (steps, _, handover)), paced in zip(new.items(), found, strict=True):
                with np.errstate(invalid="ignore"):  # refused sizes are infinite
                    ratio = np.maximum(paced / np.maximum(steps.max(axis=1), handover), 1.0)
                _known[key] = np.where(np.isfinite(ratio), ratio, 1.0)
        ratios = [_known[key] for key in keys]
        while len(_known) > _MOST_KNOWN:
            del _known[next(iter(_known))]
        return ratios

    def interpolated(self, ratios: FloatArray, batch: FloatArray) -> FloatArray:
        """The ratios of `batches` as those of these batches; 1 of those that are kept even."""
        return np.asarray(np.interp(batch, np.append(self.batches, self.batches[-1] + 1),
                                    np.append(ratios, 1.0)))

    def _tokens(self) -> FloatArray:
        """Tokens of the sequence's batches over their mean [batches, sequence]."""
        if self._shares is None:
            rng = np.random.default_rng(0)
            levels = (np.arange(_STEPS) + 0.5) / _STEPS
            lengths = self._inputs.support[np.searchsorted(np.cumsum(self._inputs.pmf), levels)]
            shares = np.empty((len(self.batches), _STEPS))
            for row, batch in enumerate(self.batches):
                shares[row] = sum(rng.permutation(lengths) for _ in range(int(batch)))
            # of those counted the mean is exact, or one stage alone would seem to gain or lose
            self._shares = shares / shares[:, _BEGIN:].mean(axis=1, keepdims=True)
            self._name = self._shares.tobytes()
        return self._shares


def _between_s(shares: FloatArray, pools: Sequence[UnevenPool]) -> FloatArray:
    """Seconds [pools, batches] from one step to the next, the longest path's in the mean. Pools of
    fewer stages than others have some that take no time."""
    batches, stages = len(shares), [pool.steps.shape[1] for pool in pools]
    rows, most = batches * len(pools), max(stages)
    steps, rises = (np.zeros((len(pools), batches, most)) for _ in range(2))
    for number, pool in enumerate(pools):
        steps[number, :, :stages[number]] = pool.steps
        rises[number, :, :stages[number]] = pool.rises
    steps, rises = steps.reshape(rows, most), rises.reshape(rows, most)
    handover = np.concatenate([pool.handover for pool in pools])
    limits, row = np.repeat(np.array(stages) + SPARE_STEPS, batches), np.arange(rows)
    if (library := native()) is not None:
        return library.between_s(shares, limits, steps, rises, handover, _BEGIN).reshape(
            len(pools), batches)
    ends = np.zeros((most + SPARE_STEPS, rows))  # of the last steps' handovers
    before = np.zeros((rows, most + 1))
    began, seconds = np.zeros(rows), np.empty((rows, most + 1))
    with np.errstate(invalid="ignore"):  # refused sizes are infinite
        for step in range(shares.shape[1]):
            share = np.tile(shares[:, step], len(pools))
            seconds[:, :-1] = np.maximum(steps + (share - 1)[:, None] * rises, 0.0)
            seconds[:, -1] = share * handover
            so_far = np.cumsum(seconds, axis=1)
            # end(j) = so_far(j) + the largest, over i <= j, of when stage i is free less
            # so_far(i - 1)
            free = before - so_far + seconds
            place = step % limits
            free[:, 0] = np.maximum(before[:, 0], ends[place, row])
            before = so_far + np.maximum.accumulate(free, axis=1)
            ends[place, row] = before[:, -1]
            if step == _BEGIN - 1:
                began = before[:, -1].copy()
    between = (before[:, -1] - began) / (shares.shape[1] - _BEGIN)
    return np.asarray(between.reshape(len(pools), batches))
