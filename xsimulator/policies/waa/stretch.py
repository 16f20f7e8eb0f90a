"""How far the sizes that WAA's two pools present to the timing source lie beyond what was measured
(xsimulator.policies.measured_range)."""

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.policies.measured_range import MeasuredRange, Presented
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan


class Stretch:
    """That of one problem's configurations. `adjustment`: share of a batch's tokens by which its
    upper threshold lies above the mean."""

    def __init__(self, problem: Problem, timing: TimingSource, adjustment: float) -> None:
        self._problem, self._adjustment = problem, adjustment
        self._range = MeasuredRange(problem, timing)

    def of(self, plan: WaaPlan, configs: WaaConfigs, rows: FloatArray) -> FloatArray:
        """Of the sizes that both pools present, in decode steps of so many queries [configs]."""
        return np.maximum(
            self._range.stretch(plan.encode.times.degrees, self._encoded(configs.batch)),
            self._range.stretch(plan.decode.times.degrees, self._decoded(rows, configs.chunk)))

    def least(self, batch: FloatArray, degrees: Sequence[int]) -> FloatArray:
        """No configuration of such an encode_batch [batches] or a larger one, with stages of these
        degrees, presents a smaller size in relation to what was measured."""
        one, none = np.ones_like(batch), np.zeros_like(batch)
        encode, decode = (
            np.min([self._range.stretch((degree,), presented) for degree in degrees], axis=0)
            for presented in (self._encoded(batch), self._decoded(one, none)))
        return np.asarray(np.maximum(encode, decode))

    def _encoded(self, batch: FloatArray) -> Presented:
        """The encode pool presents such sizes to the timing source."""
        inputs = self._problem.lengths.inputs
        return Presented(encode_tokens=batch * inputs.mean * (1 + self._adjustment),
                         input_tokens=inputs.max)

    def _decoded(self, rows: FloatArray, chunk: FloatArray) -> Presented:
        """The decode pool presents such sizes, in steps of that many queries and tokens of
        inputs."""
        lengths, is_apart = self._problem.lengths, self._problem.model.is_encoder_decoder
        is_mixed = chunk > 0
        return Presented(encode_tokens=np.where(is_mixed, rows + chunk, 0.0),
                         input_tokens=lengths.inputs.max if is_mixed.any() else 0.0,
                         decode_queries=rows, context=lengths.outputs.max + (
            0 if is_apart else lengths.inputs.max))
