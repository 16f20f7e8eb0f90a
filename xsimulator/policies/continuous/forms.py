"""How many queries a group of a continuously batching engine holds, what its steps encode, and how
long they take.

The queue never runs empty. Symbols: D = decode iterations of a query, L = its input tokens, n =
queries present in a group, a = queries encoded per decode step. Little's law: every query is
present for D decode steps, so n = a E[D]; those present are length-biased. What ends at a step is
binomial, each of the n being at its last iteration with chance 1 / E[D].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

from xgpt.core.lengths import FloatArray, IntArray, JointLengths, Lengths
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import Operator, TimingSource
from xrunner.rules.paged import BLOCK_TOKENS
from xsimulator.longest_context import expected_maximum
from xsimulator.occupancy import Occupancy
from xsimulator.plans import Plan
from xsimulator.policies.continuous.paged_walk import Walk
from xsimulator.stage_times import PerDegree

SIZES = 24  # equally likely sizes that stand for a distribution of steps
_COLUMNS = 12  # batches of more queries take their tokens from a normal distribution
_WINDOW = 32  # counts looked at on each side of the mean
_SEED = 11  # of the order in which sizes are combined


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """Moments over the queries present, which are length-biased."""

    iterations: float  # E[D]
    reserve: float  # tokens reserved, of those present from admission to their last token
    reserve_std: float
    context: float  # tokens in the cache of a query that decodes
    context_std: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """What the steps of one group hold, [configs] unless said. `per_step`: queries that finish per
    step of any kind."""

    per_step: FloatArray
    share: FloatArray  # of steps that encode
    tokens: FloatArray  # [configs, SIZES] encoded in such a step, equally likely
    encoded: FloatArray  # [configs, SIZES] queries, likewise
    beside: FloatArray  # queries that decode in a step that encodes
    alone: FloatArray  # and in one that does not
    ended: FloatArray  # queries that end with a step that decodes
    decoding: FloatArray  # queries in a step that decodes, in the mean
    present: FloatArray
    encode_steps: FloatArray  # steps until a query is encoded
    waits: FloatArray  # steps that evictions cost a query
    between: FloatArray  # steps of others that encode, between two of its tokens

    def take(self, rows: IntArray) -> Load:
        """Of these configurations."""
        return Load(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Step times of one plan; 1 s where not timed."""

    encode_s: FloatArray  # [configs, SIZES, kinds]
    plain_s: FloatArray  # [configs, kinds]
    is_timed: NDArray[np.bool_]
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    kind_of: list[int]  # each stage's kind


class LoadTimes:
    """How long the steps of loads take on one plan."""

    def __init__(self, plan: Plan, timing: TimingSource, lengths: JointLengths,
                 occupancy: Occupancy) -> None:
        """`occupancy`: of the queries present, of which their context is taken."""
        self._times, self._tables = plan.times, plan.steps
        self._timing, self._inputs = timing, lengths.inputs
        self._occupancy = occupancy

    def __call__(self, load: Load) -> Steps:
        beside, alone = (self._context(n) for n in (load.beside, load.alone))
        encode_s = self._encode_s(load, beside)
        plain_s = np.stack(self._tables.decode_s(load.alone, alone), axis=-1)
        stretch = self._stretch(load, np.maximum(beside, alone))
        is_timed = (np.isfinite(encode_s).all(axis=(1, 2)) & np.isfinite(plain_s).all(axis=1)
                    & (stretch <= REFUSED_BEYOND))
        encode_s[~is_timed], plain_s[~is_timed] = 1.0, 1.0
        return Steps(encode_s=encode_s, plain_s=plain_s, is_timed=is_timed, stretch=stretch,
                     kind_of=self._tables.kind_of)

    def _encode_s(self, load: Load, context: FloatArray) -> FloatArray:
        """[configs, SIZES, kinds] of steps that encode, beside decoding where that has `context`
        tokens a query."""
        times, tables, kind_of = self._times, self._tables, self._tables.kind_of
        attention, queries = self._attention_s(load), load.beside[:, None]
        if times.is_encoder_decoder:  # one after the other
            encode = tables.encode_s(load.tokens, load.encoded, attention)
            decode = tables.decode_s(queries, context[:, None])
            return np.stack([a + np.where(queries > 0, b - times.overhead_s, 0.0)
                             for a, b in zip(encode, decode, strict=True)], axis=-1)
        # all rows together, attention apart
        encode = tables.encode_s(load.tokens + queries, load.encoded + queries, attention)
        own = times.decode_attention_s(queries, context[:, None])
        stages = [kind_of.index(kind) for kind in range(max(kind_of) + 1)]
        return np.stack([
            seconds + own[times.stages[stage].tp_degree] * times.decoder_layers[stage]
            for seconds, stage in zip(encode, stages, strict=True)], axis=-1)

    def _attention_s(self, load: Load) -> PerDegree:
        """Of what one step encodes, in one layer."""
        single = self._times.encode_attention_s(load.tokens, 1.0)
        several = self._times.mean_attention_s(load.encoded)
        is_single, mean = load.encoded < 1.5, self._inputs.mean
        return {degree: np.where(is_single, single[degree], load.tokens / mean * several[degree])
                for degree in single}

    def _context(self, queries: FloatArray) -> FloatArray:
        """Tokens of context that each of so many decoding queries is charged."""
        occupancy = self._occupancy
        mean = np.full_like(queries, occupancy.context[0] / max(occupancy.active[0], 1e-12))
        if occupancy.maximum_context is None:
            return mean
        return np.maximum(mean, expected_maximum(
            occupancy.maximum_context, queries[:, None])[:, 0])

    def _stretch(self, load: Load, context: FloatArray) -> FloatArray:
        is_apart = self._times.is_encoder_decoder
        encode = Operator.ENCODER_REST if is_apart else Operator.LAYER_REST
        beside = np.zeros_like(load.beside) if is_apart else load.beside
        decoding = np.maximum(load.beside, load.alone)
        heads = np.maximum(load.alone, beside + load.encoded.max(axis=1))
        tokens = load.tokens.max(axis=1) + beside
        found = np.zeros(len(context))
        for degree in self._times.degrees:
            rest, head, decode, attend = (self._timing.reach(op, degree) for op in (
                encode, Operator.HEAD, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION))
            for size, measured in ((tokens, rest.x), (heads, head.x), (decoding, decode.x),
                                   (context, decode.y), (self._inputs.max, attend.x)):
                found = np.maximum(found, np.asarray(size, float) / measured)
        return found


class Flow:
    """What the lengths say about queries present and batches encoded."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_outputs: int) -> None:
        self.lengths = lengths
        self._fewer = 0 if is_encoder_decoder else 1
        self._reserved_outputs = reserved_outputs

    @cached_property
    def present(self) -> Present:
        outputs = self.lengths.outputs
        count = (outputs.support - self._fewer).astype(float)
        first, second = (_given_output(self.lengths, power) for power in (1, 2))

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
    def decoding_share(self) -> float:
        """Of the queries: those that are not done with their first token."""
        return float(self.lengths.outputs.pmf[self._fewer:].sum())

    @cached_property
    def input_sizes(self) -> FloatArray:
        """[SIZES] input tokens, equally likely: means over slices of the distribution."""
        return slices(self.lengths.inputs)

    @cached_property
    def last_sizes(self) -> FloatArray:
        """[SIZES] tokens a query holds at its last iteration, equally likely."""
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
        """[SIZES, _COLUMNS] tokens of 1, 2, .. inputs together, each with the exact mean."""
        rng = np.random.default_rng(_SEED)
        columns = [self.input_sizes] + [rng.permutation(self.input_sizes)
                                        for _ in range(_COLUMNS - 1)]
        return np.cumsum(np.stack(columns, axis=1), axis=1)

    def batch_tokens(self, counts: FloatArray) -> FloatArray:
        """[..., SIZES] tokens of batches of `counts` [..., SIZES] queries; the mean is exact."""
        inputs = self.lengths.inputs
        whole = np.clip(np.rint(counts).astype(np.int64), 1, _COLUMNS)
        few = self._sums[np.arange(SIZES), whole - 1]
        scores = np.random.default_rng(_SEED).permutation(normal_scores())
        many = counts * inputs.mean + np.sqrt(counts) * inputs.std * scores
        tokens = np.where(counts > _COLUMNS, np.maximum(many, counts), few)
        wanted = counts.mean(axis=-1) * inputs.mean
        scaled: FloatArray = tokens * (wanted / tokens.mean(axis=-1))[..., None]
        return scaled


def normal_scores() -> FloatArray:
    """[SIZES] equally likely values of a standard normal."""
    return np.asarray(special.ndtri((np.arange(SIZES) + 0.5) / SIZES))


def slices(lengths: Lengths) -> FloatArray:
    """[SIZES] means over slices of equal probability."""
    share = np.concatenate([[0.0], np.cumsum(lengths.pmf)])
    tokens = np.concatenate([[0.0], np.cumsum(lengths.pmf * lengths.support)])
    edges = np.interp(np.linspace(0.0, share[-1], SIZES + 1), share, tokens)
    found: FloatArray = np.diff(edges) * SIZES / share[-1]
    return found


def _given_output(lengths: JointLengths, power: int) -> FloatArray:
    """[max output] E[input ** power | output]; the overall mean where an output never occurs."""
    overall = float(lengths.inputs.pmf @ lengths.inputs.support.astype(float) ** power)
    if lengths.pairs is None:
        return np.full(lengths.outputs.max, overall)
    size = lengths.outputs.max + 1
    outputs = lengths.pairs[:, 1]
    counts = np.bincount(outputs, minlength=size)[1:]
    sums = np.bincount(outputs, lengths.pairs[:, 0].astype(float) ** power, minlength=size)[1:]
    return np.where(counts > 0, sums / np.maximum(counts, 1), overall)


def most_that_fit(slots: FloatArray, room: FloatArray, mean: float, std: float) -> FloatArray:
    """[configs] expected queries present: as many of mean size `mean` as `room` holds, at most
    `slots`: the sum over j of the chance that j fit."""
    middle = np.floor(room / mean)
    low = np.maximum(middle - _WINDOW, 0.0)
    j = low[:, None] + np.arange(1, 2 * _WINDOW + 2)
    spread = np.maximum(std * np.sqrt(j), 1e-9 * mean)
    fit = special.ndtr((room[:, None] - j * mean) / spread + 1e-6)
    inside = np.clip(slots[:, None] - j + 1, 0.0, 1.0)  # of a fractional number of slots too
    return np.asarray(np.minimum(low, slots) + (fit * inside).sum(axis=1))


def one_at_a_time(present: FloatArray, iterations: float) -> FloatArray:
    """[configs] share of steps that encode, where one step encodes one query and `present` places
    are taken or wait for one: a place is busy for 1 + E[D] steps, then waits in a queue that one
    step serves (M/D/1 in slotted time, less what a finite number of places cannot bring)."""
    busy, places = iterations + 1.0, np.maximum(present, 1.0)
    square, linear = 2 * busy - (1 - 1 / places), places + busy
    root = np.sqrt(np.maximum(linear**2 - 2 * places * square, 0.0))
    return np.asarray(np.clip((linear - root) / square, 0.0, 1.0))


def ends_per_step(present: FloatArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Chance that any query ends at a step [configs], and how many do then [configs, SIZES]."""
    chance = np.clip(chance, 0.0, 1.0 - 1e-9)
    mean = present * chance
    none = np.exp(present * np.log1p(-chance))
    places = (np.arange(SIZES) + 0.5) / SIZES
    wanted = none[:, None] + places * (1 - none)[:, None]
    counts = np.ones((len(present), SIZES))
    mass, below = none.copy(), none.copy()
    odds = chance / (1 - chance)
    for k in range(1, int(min(mean.max(initial=0.0), 30.0) * 2 + 12)):
        mass = mass * np.maximum(present - k + 1, 0.0) / k * odds
        below = below + mass
        counts += wanted > below[:, None]
    many = mean[:, None] + np.sqrt(mean * (1 - chance))[:, None] * normal_scores()
    counts = np.where(mean[:, None] > 30.0, np.maximum(many, 1.0), counts)
    # so few sizes cannot have the exact mean; it is what throughput hangs on
    exact = mean / np.maximum(1 - none, 1e-300)
    return 1 - none, counts * (exact / counts.mean(axis=1))[:, None]


def blocks_tokens(tokens: FloatArray | float) -> FloatArray:
    """Tokens in whole blocks that hold so many, in the mean."""
    return np.asarray(tokens, float) + (BLOCK_TOKENS - 1) / 2


def beside(decoding: FloatArray, alone: FloatArray, share: FloatArray) -> FloatArray:
    """Queries decoding in the steps that encode, where `alone` do in the others and `decoding` in
    the mean."""
    rest: FloatArray = np.maximum(decoding - (1 - share) * alone, 0.0) / np.maximum(share, 1e-12)
    return rest


def in_pieces(tokens: FloatArray, counts: FloatArray, pieces: FloatArray,
               filled: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Equally likely tokens and queries of encode steps, where a batch takes `pieces` steps: all
    but one of `filled` tokens each, and what is left. All but `filled` [configs, SIZES]."""
    is_split = (pieces > 1).any(axis=1, keepdims=True)
    left = np.sort(np.maximum(tokens - (pieces - 1) * filled[:, None], 1.0), axis=1)
    full = 1 - 1 / pieces.mean(axis=1)[:, None]  # share of the steps
    places = (np.arange(SIZES) + 0.5) / SIZES
    index = np.maximum((places - full) / (1 - full), 0.0) * SIZES
    remaining = np.take_along_axis(left, index.astype(np.int64), axis=1)
    parts = np.where(places < full, filled[:, None], remaining)
    wanted = tokens.mean(axis=1) / pieces.mean(axis=1)
    parts *= (wanted / parts.mean(axis=1))[:, None]
    each = parts * (counts.mean(axis=1) / tokens.mean(axis=1))[:, None]
    return (np.where(is_split, parts, tokens),
            np.where(is_split, each, counts))


def scaled(found: Walk, rate: FloatArray,
            mean_input: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(share of steps that encode, tokens, queries) of a walk, in the mean exactly what `rate`
    queries a step need: a walk's own draws are too few for that."""
    wanted = rate * mean_input * (1 + found.again)
    ratio = wanted / np.maximum(found.share * found.tokens.mean(axis=1), 1e-12)
    more_often = np.clip(ratio, found.share, 1 / np.maximum(found.share, 1e-12))
    share = np.minimum(found.share * more_often, 1.0)
    return share, found.tokens * (ratio / more_often)[:, None], found.joined
