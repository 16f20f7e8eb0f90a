"""Fits factors on step times to measured closed loops: one on encode and one on decode steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import FloatArray
from xprofiler.profile_timing import DECODE, ENCODE, Factor
from xsimulator.closed_loop import LoopTimes
from xsimulator.measured_loops import ServingPoint

_ROUNDS, _STEP = 3, 0.05  # chosen: of Gauss and Newton; rise of a logarithm for its slope


class FittedLoops(NamedTuple):
    """Factors by kind of step. `before`, `after`: mean |predicted / measured - 1| of the latencies
    without factors, and with factors fitted to the other loops."""

    factors: dict[str, Factor]
    before: float
    after: float


def fitted_loops(points: Sequence[ServingPoint],
                 predict: Callable[[ServingPoint, Mapping[str, Factor]], LoopTimes], *,
                 typical: float, scatter: float) -> FittedLoops:
    """Factors with the least squared errors of the loops' latency and TPOT.

    Few loops must not be followed too closely: a factor of exp(`typical`) costs as much as an error
    of `scatter`. `typical`: error that predictions have before; `scatter`: that single loops keep.
    TTFT is not compared alone, since it depends on how requests arrive."""
    middle = [float(np.exp(np.mean(np.log(own)))) for own in (
        [point.concurrency + point.input_tokens for point in points],  # one prompt, and decoding
        [point.concurrency for point in points])]

    def scaled(logs: FloatArray) -> dict[str, Factor]:
        return {kind: Factor(round(rows, 1), round(math.exp(log), 4)) for kind, rows, log in zip(
            (ENCODE, DECODE), middle, logs.tolist(), strict=True)}

    def misses(logs: FloatArray) -> FloatArray:
        """[points, 2] logarithms of measured over predicted latency and TPOT."""
        times = [predict(point, scaled(logs)) for point in points]
        return np.array([[math.log(point.latency_s / own.latency_s),
                          math.log(point.tpot_s / own.tpot_s) if point.output_tokens > 1 else 0.0]
                         for point, own in zip(points, times, strict=True)])

    def solved(left_out: Sequence[int] = ()) -> ArrayLike:
        own, missed = (np.delete(one, left_out, axis=0) / scatter for one in (slopes, target))
        own = own.reshape(-1, 2)
        return np.linalg.solve(own.T @ own + np.eye(2) / typical**2, own.T @ missed.ravel())

    logs: FloatArray = np.zeros(2)
    first = misses(logs)
    for _ in range(_ROUNDS):
        missed = misses(logs)
        slopes = np.stack([(missed - misses(logs + _STEP * unit)) / _STEP for unit in np.eye(2)],
                          axis=-1)
        target = missed + slopes @ logs
        logs = np.asarray(solved())
    left = [target[at, 0] - slopes[at, 0] @ solved([at]) for at in range(len(points))]
    return FittedLoops(scaled(logs), *(float(np.mean(np.abs(np.expm1(-np.asarray(one)))))
                                       for one in (first[:, 0], left)))
