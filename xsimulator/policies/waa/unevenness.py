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

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xrunner.rules.batch_sizer import LEAST_ADJUSTED

SPARE_STEPS = 2  # under way beyond one for each stage: one waits for its tokens, one is handed over
_STEPS = 600  # of the sequence
_BEGIN = 100  # those before fill the pool
_UNEVEN_RATIO = 2  # between batches that are looked at, where none are kept even
_EVEN = 0.02  # tokens' deviation over their mean below which nothing is lost


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
        self._shares: FloatArray | None = None

    def lengthened(self, steps: FloatArray, rises: FloatArray, handover: FloatArray) -> FloatArray:
        """The time between two steps over that of the slowest stage, of `batches`. Of each there
        are `steps`, seconds of the stages [batches, stages], `rises`, what a step of twice the
        tokens takes more, and `handover`, seconds of the mean batch."""
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            paced = _between_s(self._tokens(), steps, rises, handover)
            ratio = np.maximum(paced / np.maximum(steps.max(axis=1), handover), 1.0)
        return np.where(np.isfinite(ratio), ratio, 1.0)

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
        return self._shares


def _between_s(shares: FloatArray, steps: FloatArray, rises: FloatArray,
               handover: FloatArray) -> FloatArray:
    """Seconds [batches] from one step to the next, the longest path's in the mean."""
    rows, stages = steps.shape
    limit = stages + SPARE_STEPS
    ends = np.zeros((limit, rows))  # of the last steps' handovers
    before = np.zeros((rows, stages + 1))
    began = np.zeros(rows)
    for step in range(shares.shape[1]):
        share = shares[:, step, None]
        seconds = np.concatenate([np.maximum(steps + (share - 1) * rises, 0.0),
                                  share * handover[:, None]], axis=1)
        so_far = np.cumsum(seconds, axis=1)
        # end(j) = so_far(j) + the largest, over i <= j, of when stage i is free less so_far(i - 1)
        free = before - so_far + seconds
        free[:, 0] = np.maximum(before[:, 0], ends[step % limit])
        before = so_far + np.maximum.accumulate(free, axis=1)
        ends[step % limit] = before[:, -1]
        if step == _BEGIN - 1:
            began = before[:, -1].copy()
    return np.asarray((before[:, -1] - began) / (shares.shape[1] - _BEGIN))
