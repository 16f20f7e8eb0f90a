"""What is known of a job's own queries: how long they are, before they run, and when each of them
came, was begun, and got its first and its last token; and what a model's positions leave for their
outputs. Those of an encoder-decoder model's encoder and decoder are apart: an input takes none of
its output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.model import ModelSpec

UNLIMITED = 2**31 - 1  # tokens; no request may ask for more


def output_room(model: ModelSpec, inputs: Any) -> Any:
    """Most tokens of output after so many tokens of `inputs` (a number or an array): below 1 where
    an input leaves no room for one, UNLIMITED of a model without positions."""
    most = model.max_positions
    if most is None:
        return np.full_like(inputs, UNLIMITED)
    if model.is_encoder_decoder:
        return np.where(np.asarray(inputs) <= most, most, 0)
    return most - inputs


def has_room(model: ModelSpec, inputs: IntArray, forced: IntArray) -> BoolArray:
    """Which queries a model's positions hold: some output after so many tokens of `inputs`, and all
    of it where its length is `forced` (0: the model decides)."""
    return np.asarray(np.maximum(forced, 1) <= output_room(model, inputs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryLengths:
    """Tokens of each query, [queries]. `most_outputs`: what it may write at most, and so reserves.
    `outputs` None: how much it writes depends on what the model says."""

    inputs: IntArray
    most_outputs: IntArray
    outputs: IntArray | None = None

    @property
    def reserves(self) -> IntArray:
        """[queries] tokens of KV cache that each may need."""
        total: IntArray = self.inputs + self.most_outputs
        return total

    def take(self, rows: IntArray) -> QueryLengths:
        """The queries of these rows, in this order."""
        return QueryLengths(inputs=self.inputs[rows], most_outputs=self.most_outputs[rows],
                            outputs=None if self.outputs is None else self.outputs[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTimes:
    """[queries] seconds since the start of the job, of a replay or of a run. A token counts when
    the head takes it up; where a batch is answered as a whole, the last ones all do at its end."""

    arrival_s: FloatArray
    start_s: FloatArray  # of the encoding
    first_token_s: FloatArray
    last_token_s: FloatArray

    @property
    def latency_s(self) -> FloatArray:
        """[queries] from the start of the encoding to the last token."""
        return _since(self.start_s, self.last_token_s)

    @property
    def encoding_s(self) -> FloatArray:
        """[queries] from the start of the encoding to the first token."""
        return _since(self.start_s, self.first_token_s)

    @property
    def ttft_s(self) -> FloatArray:
        """[queries] to the first token, from the arrival on: waiting for its turn counts."""
        return _since(self.arrival_s, self.first_token_s)

    @property
    def is_known(self) -> bool:
        """Whether all queries end: a replay met no step larger than any that was timed."""
        return bool(np.isfinite(self.last_token_s).all())

    def tpot_s(self, output_tokens: IntArray) -> FloatArray:
        """[queries of more than one output token] mean time of each token after the first."""
        after = np.asarray(output_tokens) - 1
        has_more = after > 0
        return np.asarray(_since(self.first_token_s, self.last_token_s)[has_more]
                          / after[has_more])


def _since(start_s: FloatArray, end_s: FloatArray) -> FloatArray:
    """[queries]; infinite where an end is: a replay met a step larger than any that was timed."""
    return np.subtract(end_s, start_s, out=np.full_like(end_s, np.inf), where=np.isfinite(end_s))
