"""When each query of a job came, was begun, and got its first and its last token."""

from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray


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
        return self.last_token_s - self.start_s

    @property
    def ttft_s(self) -> FloatArray:
        """[queries] to the first token, from the arrival on: waiting for its turn counts."""
        return self.first_token_s - self.arrival_s

    def tpot_s(self, output_tokens: IntArray) -> FloatArray:
        """[queries of more than one output token] mean time of each token after the first."""
        after = np.asarray(output_tokens) - 1
        has_more = after > 0
        return np.asarray((self.last_token_s - self.first_token_s)[has_more] / after[has_more])
