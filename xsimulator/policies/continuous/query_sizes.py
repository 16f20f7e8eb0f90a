"""What the lengths of queries say about those present in a continuously batching engine, and about
those that it encodes together."""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths, Lengths
from xgpt.core.normal import ndtri
from xsimulator.occupancy import inputs_given_output

SIZES = 24  # equally likely sizes that stand for a distribution of steps
_COLUMNS = 12  # batches of more queries take their tokens from a normal distribution
_SEED = 11  # of the order in which sizes are combined


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The moments are over the queries present, which are length-biased."""

    iterations: float  # E[D]
    reserve: float  # tokens reserved, of those present from admission to their last token
    reserve_std: float
    context: float  # tokens in the cache of a query that decodes
    context_std: float


class QuerySizes:
    """The queries of one workload have these moments and equally likely sizes."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_outputs: int) -> None:
        self.lengths = lengths
        self._fewer = 0 if is_encoder_decoder else 1
        self._reserved_outputs = reserved_outputs
        self.longest = lengths.inputs.max + reserved_outputs  # tokens a query has at most
        # of the queries, is not done with its first token
        self.decoding_share = float(lengths.outputs.pmf[self._fewer:].sum())

    @cached_property
    def are_equal(self) -> bool:
        """Whether all inputs are of one length, and all outputs."""
        return self.lengths.inputs.std == 0 and self.lengths.outputs.std == 0

    @cached_property
    def present(self) -> Present:
        outputs = self.lengths.outputs
        count = (outputs.support - self._fewer).astype(float)
        first, second = (inputs_given_output(self.lengths, power) for power in (1, 2))

        def mean(values: FloatArray) -> float:
            return float(outputs.pmf @ values)

        stay, decoding = mean(count + 1), max(mean(count), 1e-12)
        steps = count * (count + 1) / 2  # sum of k = 1..D
        squares = steps * (2 * count + 1) / 3
        context = mean(count * first + steps) / decoding
        square = mean(count * second + 2 * first * steps + squares) / decoding
        inputs = mean((count + 1) * first) / stay
        input_square = mean((count + 1) * second) / stay
        return Present(
            iterations=mean(count), reserve=inputs + self._reserved_outputs, context=context,
            reserve_std=float(np.sqrt(max(input_square - inputs**2, 0.0))),
            context_std=float(np.sqrt(max(square - context**2, 0.0))))

    @cached_property
    def input_sizes(self) -> FloatArray:
        """Input tokens [SIZES] are equally likely: means over slices of the distribution."""
        return slices(self.lengths.inputs)

    @cached_property
    def last_sizes(self) -> FloatArray:
        """A query holds these tokens [SIZES], equally likely, at its last iteration."""
        outputs = self.lengths.outputs
        if self.lengths.pairs is None:
            rng = np.random.default_rng(_SEED)
            whole: FloatArray = self.input_sizes + rng.permutation(slices(outputs))
            return whole - self._fewer
        sums = np.sort(self.lengths.pairs.sum(axis=1)) - self._fewer
        places = (np.arange(SIZES) + 0.5) / SIZES  # of any number of pairs
        return np.asarray(np.interp(places, (np.arange(len(sums)) + 0.5) / len(sums), sums))

    @cached_property
    def _sums(self) -> FloatArray:
        """Tokens of 1, 2, .. inputs together over shares 0, 1 / SIZES, .. 1 of such batches, the
        smallest first: means times the share [_COLUMNS, SIZES + 1]."""
        rng = np.random.default_rng(_SEED)
        columns = [self.input_sizes] + [rng.permutation(self.input_sizes)
                                        for _ in range(_COLUMNS - 1)]
        sums = np.sort(np.cumsum(np.stack(columns), axis=0), axis=1) / SIZES
        return np.concatenate([np.zeros((_COLUMNS, 1)), np.cumsum(sums, axis=1)], axis=1)

    def batch_tokens(self, counts: FloatArray) -> FloatArray:
        """Batches of `counts` [..., SIZES] queries, the fewest first, have these tokens; the mean
        is exact. Those of as many queries have all the sizes that so many inputs have, for a batch
        of few is not one of small inputs."""
        inputs = self.lengths.inputs
        whole = np.clip(np.rint(counts).astype(np.int64), 1, _COLUMNS)
        alike = (whole[..., None] == np.arange(1, _COLUMNS + 1)).sum(axis=-2)  # [..., _COLUMNS]
        first = np.take_along_axis(np.cumsum(alike, axis=-1) - alike, whole - 1, axis=-1)
        number = np.take_along_axis(alike, whole - 1, axis=-1)
        place = np.arange(SIZES) - first  # among them
        few = number * (self._tokens_below(whole, (place + 1) / number)
                        - self._tokens_below(whole, place / number))
        many = counts * inputs.mean + np.sqrt(counts) * inputs.std * _mixed_scores()
        tokens = np.where(counts > _COLUMNS, np.maximum(many, counts), few)
        wanted = counts.mean(axis=-1) * inputs.mean
        return np.asarray(tokens * (wanted / tokens.mean(axis=-1))[..., None])

    def _tokens_below(self, whole: IntArray, share: FloatArray) -> FloatArray:
        """`_sums` of so many inputs at any share."""
        low = np.minimum((share * SIZES).astype(np.int64), SIZES - 1)
        here, there = self._sums[whole - 1, low], self._sums[whole - 1, low + 1]
        return np.asarray(here + (there - here) * (share * SIZES - low))


@cache
def normal_scores() -> FloatArray:
    """The values [SIZES] of a standard normal are equally likely; not to be written to."""
    return ndtri((np.arange(SIZES) + 0.5) / SIZES)


@cache
def _mixed_scores() -> FloatArray:
    return np.random.default_rng(_SEED).permutation(normal_scores())


def slices(lengths: Lengths) -> FloatArray:
    """The means [SIZES] are over slices of equal probability."""
    share = np.concatenate([[0.0], np.cumsum(lengths.pmf)])
    tokens = np.concatenate([[0.0], np.cumsum(lengths.pmf * lengths.support)])
    edges = np.interp(np.linspace(0.0, share[-1], SIZES + 1), share, tokens)
    return np.asarray(np.diff(edges) * SIZES / share[-1])
