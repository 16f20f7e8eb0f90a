"""How long the steps of a continuously batching engine take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xprofiler.interpolation import REFUSED_BEYOND
from xsimulator.plans import Plan
from xsimulator.policies.continuous.load import Load
from xsimulator.policies.figures import BoolArray
from xsimulator.policies.measured_range import MeasuredRange, Presented
from xsimulator.stage_times import PerDegree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps of one plan take so long; 1 s stands where they are not timed."""

    encode_s: FloatArray  # [configs, SIZES, kinds]
    plain_s: FloatArray  # [configs, kinds]
    is_timed: BoolArray
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    kind_of: list[int]  # each stage's kind


class LoadTimes:
    """It says how long the steps of loads take on one plan."""

    def __init__(self, plan: Plan, inputs: Lengths, context: Callable[[FloatArray], FloatArray],
                 measured: MeasuredRange) -> None:
        """`context` gives the tokens that each of so many decoding queries is charged."""
        self._times, self._tables, self._inputs = plan.times, plan.steps, inputs
        self._context, self._measured = context, measured

    def __call__(self, load: Load) -> Steps:
        beside, alone = (self._context(n) for n in (load.beside, load.alone))
        encode_s = self._encode_s(load, beside)
        plain_s = np.stack(self._tables.decode_s(load.alone, alone), axis=-1)
        stretch = self._measured.stretch(self._times.degrees, self._presented(
            load, np.maximum(beside, alone)))
        is_timed = (np.isfinite(encode_s).all(axis=(1, 2)) & np.isfinite(plain_s).all(axis=1)
                    & (stretch <= REFUSED_BEYOND))
        encode_s[~is_timed], plain_s[~is_timed] = 1.0, 1.0
        return Steps(encode_s=encode_s, plain_s=plain_s, is_timed=is_timed, stretch=stretch,
                     kind_of=self._tables.kind_of)

    def _encode_s(self, load: Load, context: FloatArray) -> FloatArray:
        """[configs, SIZES, kinds] of steps that encode, beside decoding where that has `context`
        tokens a query."""
        return np.stack(self._tables.mixed_s(
            load.tokens, load.encoded, self._attention_s(load), load.beside[:, None],
            context[:, None]), axis=-1)

    def _attention_s(self, load: Load) -> PerDegree:
        """Attention takes so long for what one step encodes, in one layer."""
        single = self._times.encode_attention_s(load.tokens, 1.0)
        several = self._times.mean_attention_s(load.encoded)
        is_single, mean = load.encoded < 1.5, self._inputs.mean
        return {degree: np.where(is_single, single[degree], load.tokens / mean * several[degree])
                for degree in single}

    def _presented(self, load: Load, context: FloatArray) -> Presented:
        beside = np.zeros_like(load.beside) if self._times.is_encoder_decoder else load.beside
        return Presented(
            encode_tokens=load.tokens.max(axis=1) + beside,
            encode_queries=np.maximum(load.alone, beside + load.encoded.max(axis=1)),
            decode_queries=np.maximum(load.beside, load.alone), context=context,
            input_tokens=self._inputs.max)
