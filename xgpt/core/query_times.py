"""When what happened to each query, in seconds since the run (or the replay) began."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray


class QueryTimes(NamedTuple):
    """[queries] each. A query arrives, its encoding starts, and it has its first and last token."""

    arrival_s: FloatArray
    start_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray

    @property
    def latency_s(self) -> FloatArray:
        """From the start of its encoding to the last token (docs/design.md, words)."""
        return self.last_token_s - self.start_s

    @property
    def time_to_first_token_s(self) -> FloatArray:
        """From the start of its encoding to the first token."""
        return self.first_token_s - self.start_s

    def time_per_output_token_s(self, output_tokens: FloatArray) -> FloatArray:
        """Mean time between two tokens, given each query's number of them; NaN where there is but
        one."""
        gaps = np.asarray(output_tokens, float) - 1
        return np.where(gaps > 0, (self.last_token_s - self.first_token_s)
                        / np.where(gaps > 0, gaps, 1.0), np.nan)
