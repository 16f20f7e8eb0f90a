"""How many of the waiting queries make one encode batch (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizer:
    """Keeps a batch's input tokens within a share `adjustment` of what the batch has in the mean,
    as far as whole queries allow it: fewer queries where inputs are long, more where they are
    short, never more than twice as many. 0: the number is kept, whatever the tokens."""

    mean_input: float
    adjustment: float = 0.0

    def most(self, batch: int) -> int:
        """Queries of the largest batch."""
        return 2 * batch if self.adjustment > 0 else batch

    def count(self, inputs: Sequence[int], batch: int) -> int:
        """How many of `inputs` (tokens, in order, the first `most` at least if there are as many)
        are taken where `batch` is the plan."""
        if self.adjustment <= 0:
            return min(batch, len(inputs))
        target = batch * self.mean_input
        low, high = target * (1 - self.adjustment), target * (1 + self.adjustment)
        tokens = taken = 0
        for length in inputs[:self.most(batch)]:
            if taken and (tokens + length > high or (taken >= batch and tokens >= low)):
                break
            tokens, taken = tokens + length, taken + 1
        return taken
