"""What is known of a job's own queries before they run: their lengths, in the order of its file."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.lengths import IntArray


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
