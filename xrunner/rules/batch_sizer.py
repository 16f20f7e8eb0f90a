"""How many of the waiting queries make one encode batch (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Small enough that uneven batches no longer hold up a pipeline, large enough that most batches of
# ordinary size are left as they are.
ADJUSTMENT = 0.1
# Of fewer, one more or less is too coarse: short inputs would bring more, long ones hardly fewer.
LEAST_ADJUSTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizer:
    """Keeps a batch's input tokens near what such a batch has in the mean: where they leave that by
    more than a share `adjustment`, as many queries are taken as come nearest to it, never more than
    twice the plan. Nearest, and not next below: the mean over batches must stay what was planned.
    0, or a batch of few: the number is kept, whatever the tokens."""

    mean_input: float
    adjustment: float = 0.0

    def most(self, batch: int) -> int:
        """Queries of the largest batch."""
        is_adjusted = self.adjustment > 0 and batch >= LEAST_ADJUSTED
        return 2 * batch if is_adjusted else batch

    def count(self, inputs: Sequence[int], batch: int) -> int:
        """How many of `inputs` (tokens, in order, the first `most` at least if there are as many)
        are taken where `batch` is the plan."""
        planned = min(batch, len(inputs))
        if self.adjustment <= 0 or batch < LEAST_ADJUSTED or planned < batch:
            return planned
        target, tokens = batch * self.mean_input, sum(inputs[:batch])
        if abs(tokens - target) <= self.adjustment * target:
            return batch
        best, tokens = (target, 0), 0  # (distance, queries)
        for taken, length in enumerate(inputs[:self.most(batch)], start=1):
            tokens += length
            best = min(best, (abs(tokens - target), taken))
            if tokens >= target:
                break
        return max(best[1], 1)
