"""What it takes to move a query's KV entries from WAA's encode pool to its decode pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import StageAssignment
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import MessageKind, TimingSource
from xsimulator import memory


class HandoverCost:
    """Seconds from the encode pool's caches to the decode pool's (paper section 3, XRunner).

    Stages send at once, each to all that need its layers, so the rank with the most to send, or to
    receive, decides. An encoder-decoder model's encoder output goes whole to every decode stage.
    """

    def __init__(self, problem: Problem, timing: TimingSource, encode: Sequence[StageAssignment],
                 decode: Sequence[StageAssignment]) -> None:
        """`encode`, `decode`: the stages of the two pools."""
        model, item = problem.model, DTYPE_BYTES[problem.dtype]
        self._timing, self._link = timing, _widest(problem, encode, decode)
        if model.is_encoder_decoder:
            self.bytes_per_token = float(model.hidden_size * item * len(decode))
        else:
            self.bytes_per_token = float(max(
                memory.kv_bytes(model, pool, problem.dtype, 1.0).max()
                for pool in (encode, decode)))

    def seconds(self, tokens: float) -> float:
        return float(self.many(np.asarray(tokens, float)))

    def many(self, tokens: FloatArray) -> FloatArray:
        """Seconds for each number of tokens."""
        return self._timing.message_s(MessageKind.HANDOVER, tokens * self.bytes_per_token,
                                      self._link)


def _widest(problem: Problem, encode: Sequence[StageAssignment],
            decode: Sequence[StageAssignment]) -> Link:
    """The link between the ranks that are furthest apart is the slowest of those used."""
    cluster = problem.cluster
    return cluster.link_between(encode[0].ranks[0], decode[-1].ranks[-1])
