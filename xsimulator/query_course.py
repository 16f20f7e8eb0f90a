"""What is left of a query, and what it holds, at each of its decode iterations.

Symbols: S = output tokens, D = decode iterations a query needs (S - 1 for decoder-only models,
whose encode yields the first token; S otherwise), k = iteration of a query, from 1 on.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths


class QueryCourse:
    """Expectations over the joint distribution of lengths; arrays are over k = 1..max D."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_output_tokens: int = 0) -> None:
        """`reserved_output_tokens`: output tokens a query may generate, and so reserves, where that
        is more than the distribution's longest."""
        self.lengths = lengths
        self.iterations_fewer = 0 if is_encoder_decoder else 1
        self._reserved_output_tokens = max(reserved_output_tokens, lengths.outputs.max)
        # largest D, at least 1
        self.max_iterations = max(lengths.outputs.max - self.iterations_fewer, 1)
        # KV tokens that the longest query reserves at admission
        self.max_reserve_tokens = lengths.inputs.max + self._reserved_output_tokens

    def iterations_of(self, output_tokens: int) -> int:
        """D of a query with that many output tokens."""
        return output_tokens - self.iterations_fewer

    @cached_property
    def by_iteration(self) -> FloatArray:
        """[4, max D] P(D >= k), context, and what is reserved, with its square."""
        return np.stack([self.survival, self.context, self._reserve, self._reserve_squared])

    def _tail(self, per_output: FloatArray) -> FloatArray:
        """Sums over D >= k, k = 1..max, of what `per_output` gives for each output length."""
        tail = np.cumsum(per_output[::-1])[::-1][self.iterations_fewer:]
        return tail if tail.size else np.zeros(1)

    @cached_property
    def survival(self) -> FloatArray:
        """P(D >= k)."""
        return np.minimum(self._tail(self.lengths.outputs.pmf), 1.0)

    @cached_property
    def context(self) -> FloatArray:
        """E[(input + k) 1{D >= k}]: tokens of KV read at a query's k-th decode iteration."""
        inputs = self._tail(self.lengths.outputs.pmf * self.lengths.mean_input_given_output())
        return inputs + self.survival * np.arange(1, self.max_iterations + 1)

    @cached_property
    def mean_context_read(self) -> float:
        """Tokens of context that a query's decode iterations read in all, in the mean."""
        return float(self.context.sum())

    @cached_property
    def _reserve(self) -> FloatArray:
        """E[(input + max output) 1{D >= k}]."""
        return self._tail(self._reserve_per_output[0])

    @cached_property
    def _reserve_squared(self) -> FloatArray:
        return self._tail(self._reserve_per_output[1])

    @cached_property
    def all_reserve(self) -> tuple[float, float]:
        """What is reserved, and its square, over all queries, those with D = 0 included."""
        first, second = self._reserve_per_output
        return float(first.sum()), float(second.sum())

    @cached_property
    def _reserve_per_output(self) -> tuple[FloatArray, FloatArray]:
        pmf, cap = self.lengths.outputs.pmf, self._reserved_output_tokens
        mean = self.lengths.mean_input_given_output()
        square = _mean_squared_input_given_output(self.lengths)
        return pmf * (mean + cap), pmf * (square + 2 * cap * mean + cap**2)


def _mean_squared_input_given_output(lengths: JointLengths) -> FloatArray:
    """E[input^2 | output = k], k = 1..max; the overall value where P(k) = 0."""
    inputs = lengths.inputs
    overall = np.full(lengths.outputs.max, float(inputs.pmf @ inputs.support.astype(float) ** 2))
    if lengths.pairs is None:
        return overall
    outputs: IntArray = lengths.pairs[:, 1]
    size = lengths.outputs.max + 1
    counts = np.bincount(outputs, minlength=size)[1:]
    sums = np.bincount(outputs, weights=lengths.pairs[:, 0].astype(float) ** 2, minlength=size)[1:]
    return np.where(counts > 0, sums / np.maximum(counts, 1), overall)
