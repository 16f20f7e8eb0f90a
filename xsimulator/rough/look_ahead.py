"""KV tokens of the requests at work as admission counts them (xrunner.rules.room), in steady state.

At a look-ahead of t iterations a request counts with all tokens that it then holds, if its forecast
reaches so far. `future-peak` takes the t of the highest sum, `greedy` and `reserve-dynamic` the
present. `reserve-static` counts every request at the end of its forecast."""

from typing import NamedTuple

import numpy as np

from xgpt.core.controls import CAP, Admission
from xgpt.core.lengths import FloatArray, IntArray, JointLengths

MOST_PAIRS = 1 << 18  # chosen: of a forecast and an age, or a look-ahead, that are told apart


class Counted(NamedTuple):
    """KV tokens that admission counts, per request encoded: mean, variance, and mean square. The
    requests of each age come and go independently."""

    mean: float
    variance: float
    square: float


class LookAhead:
    """KV tokens counted under one admission rule."""

    def __init__(self, admission: Admission, lengths: JointLengths, most_output: int,
                 fewer: int) -> None:
        """most_output: cap of every request. fewer: output tokens that encoding yields."""
        self._rule, self._fewer = admission.rule or "reserve", fewer
        outputs = lengths.outputs.support
        forecasts = _forecasts(admission, outputs, most_output)
        self._ends = np.unique(forecasts)  # [kinds] total output tokens forecast
        pmf = np.where(forecasts == self._ends[:, None], lengths.outputs.pmf, 0.0)
        # [shares, inputs, squares of inputs; kinds; ages] of requests with more tokens to write
        each = np.stack([pmf, pmf * lengths.mean_input_given_output(),
                         pmf * lengths.mean_input_given_output(power=2)])
        tails = np.zeros((*each.shape[:2], each.shape[2] + 1))
        tails[..., :-1] = np.cumsum(each[..., ::-1], axis=-1)[..., ::-1]
        self._all, self._tails = tails[..., 0], tails[..., fewer:]

    def counted(self, every: int = 1, *, has_ended: bool = True) -> Counted:
        """KV tokens counted right after requests were encoded, if some are every `every`
        iterations. has_ended: also those that end with their first token."""
        present, inputs, squares = self._tails[..., ::every].copy()
        if has_ended:
            present[:, 0], inputs[:, 0], squares[:, 0] = self._all
        written = self._fewer + every * np.arange(present.shape[1])
        ends = self._ends[:, None]
        if self._rule in ("reserve", "reserve-static"):
            counts, held = np.ones(present.shape, bool), np.broadcast_to(ends, present.shape)
        else:
            ahead = self._peak(every, present, inputs + written * present)
            counts, held = written + ahead <= ends, written + ahead
        means = (counts * (inputs + held * present)).sum(axis=0)
        square = (counts * (squares + 2 * held * inputs + held**2 * present)).sum(axis=0)
        return Counted(float(means.sum()), max(float((square - means**2).sum()), 0.0),
                       float(square.sum()))

    def _peak(self, every: int, present: FloatArray, tokens: FloatArray) -> int:
        """The look-ahead, in iterations, at which most tokens are counted. present, tokens: shares
        of the requests, and the tokens that they hold, [kinds, ages]."""
        if self._rule != "future-peak":
            return 0
        left = self._ends[:, None] - self._fewer  # to write, of a request just encoded
        ahead = np.unique(np.maximum(left - every * np.arange(present.shape[1]), 0))
        ahead = ahead[::-(-ahead.size * len(left) // MOST_PAIRS)]
        # [kinds, look-aheads] number of ages whose forecast reaches so far
        ages = np.clip((left - ahead) // every + 1, 0, present.shape[1])
        rows, held = (np.take_along_axis(np.pad(np.cumsum(own, axis=1), ((0, 0), (1, 0))), ages, 1)
                      for own in (present, tokens))
        return int(ahead[np.argmax((held + ahead * rows).sum(axis=0))])


def _forecasts(admission: Admission, outputs: IntArray, most_output: int) -> IntArray:
    """[outputs] total tokens that each output length is forecast to have."""
    forecast = admission.forecast
    is_cap = forecast.kind == CAP or (forecast.kind == "distribution" and forecast.use == "most")
    if is_cap or admission.rule in (None, "reserve"):
        return np.full(len(outputs), most_output)
    width = forecast.width if forecast.kind == "class" else 1  # the others are taken as right
    width = max(width, -(-len(outputs) // max(MOST_PAIRS // len(outputs), 1)))
    return np.minimum(-(-outputs // width) * width, most_output)
