"""Loads of a continuously batching engine: how many queries a group holds, what its steps encode,
and how long they take.

The queue never runs empty. Symbols: D = decode iterations of a query, L = its input tokens, n =
queries present in a group, a = queries encoded per decode step. Little's law: every query is
present for D decode steps, so n = a E[D]; those present are length-biased. What ends at a step is
binomial, each of the n being at its last iteration with chance 1 / E[D]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray, Lengths
from xprofiler.interpolation import REFUSED_BEYOND
from xrunner.rules.paged import BLOCK_TOKENS
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.paged_walk import Walk
from xsimulator.policies.continuous.query_sizes import SIZES, normal_scores
from xsimulator.policies.measured_range import MeasuredRange, Presented

_WINDOW = 32  # counts looked at on each side of the mean
_FILLS = 6  # rounds in which steps with room take what others have none for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A load is what the steps of one group hold, [configs] unless said; `per_step` queries finish
    per step of any kind."""

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
    after: FloatArray  # and between its own encoding and its first step that decodes
    in_step: FloatArray  # share of the time in which all groups encode in the same rounds
    # of those: tokens that a step encodes more than the next, in the mean of all steps, over those
    # of a step that encodes; 0: a cycle's last encoding alone is followed by less
    falls: FloatArray
    filled: FloatArray  # and what a group encodes in the mean, over what the fullest one does
    apart: FloatArray  # and rounds in which any group encodes, over those in which one does
    together: FloatArray  # and in which all do

    def take(self, rows: IntArray) -> Load:
        """The load of some of the configurations."""
        return Load(**{name: getattr(self, name)[rows] for name in self.__slots__})


def joined(parts: Sequence[Load], order: IntArray) -> Load:
    """The loads of all parts' configurations, the n-th at place `order`[n]."""
    back = np.argsort(order)
    return Load(**{name: np.concatenate([getattr(part, name) for part in parts])[back]
                   for name in Load.__slots__})


def most_that_fit(slots: FloatArray, room: FloatArray, mean: float, std: float) -> FloatArray:
    """[configs] expected queries present: as many of mean size `mean` as `room` holds, at most
    `slots`: the sum over j of the chance that j fit."""
    from scipy import special  # here: the planner imports this module, and seldom asks for it

    middle = np.floor(room / mean)
    low = np.maximum(middle - _WINDOW, 0.0)
    j = low[:, None] + np.arange(1, 2 * _WINDOW + 2)
    spread = np.maximum(std * np.sqrt(j), 1e-9 * mean)
    fit = special.ndtr((room[:, None] - j * mean) / spread + 1e-6)
    inside = np.clip(slots[:, None] - j + 1, 0.0, 1.0)  # of a fractional number of slots too
    return np.asarray(np.minimum(low, slots) + (fit * inside).sum(axis=1))


def one_at_a_time(present: FloatArray, iterations: float, *, in_step: bool = False) -> FloatArray:
    """[configs] share of steps that encode, where one step encodes one query and `present` places
    are taken or wait for one: a place is busy for 1 + E[D] steps, then waits in a queue that one
    step serves (M/D/1 in slotted time, less what a finite number of places cannot bring).
    `in_step`: all are busy equally long: places come free one by one, and none waits."""
    busy, places = iterations + 1.0, np.maximum(present, 1.0)
    if in_step:
        return np.asarray(np.minimum(places / busy, 1.0))
    square, linear = 2 * busy - (1 - 1 / places), places + busy
    root = np.sqrt(np.maximum(linear**2 - 2 * places * square, 0.0))
    return np.asarray(np.clip((linear - root) / square, 0.0, 1.0))


def ends_per_step(present: FloatArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The chance [configs] that any query ends at a step, and how many do then [configs, SIZES],
    follow from the chance of each."""
    chance = np.clip(chance, 0.0, 1.0 - 1e-9)
    mean = present * chance
    none = np.exp(present * np.log1p(-chance))
    places = (np.arange(SIZES) + 0.5) / SIZES
    wanted = none[:, None] + places * (1 - none)[:, None]
    odds = chance / (1 - chance)
    mass = [none]  # of none, one, two ..
    for k in range(1, int(min(mean.max(initial=0.0), 30.0) * 2 + 12)):
        mass.append(mass[-1] * np.maximum(present - k + 1, 0.0) / k * odds)
    below = np.cumsum(mass, axis=0)[1:, :, None]
    counts: FloatArray = 1.0 + (wanted > below).sum(axis=0)
    many = mean[:, None] + np.sqrt(mean * (1 - chance))[:, None] * normal_scores()
    counts = np.where(mean[:, None] > 30.0, np.maximum(many, 1.0), counts)
    # so few sizes cannot have the exact mean; it is what throughput hangs on
    exact = mean / np.maximum(1 - none, 1e-300)
    return 1 - none, counts * (exact / counts.mean(axis=1))[:, None]


def blocks_tokens(tokens: FloatArray | float) -> FloatArray:
    """Whole blocks that hold so many tokens have room for this many, in the mean."""
    return np.asarray(tokens, float) + (BLOCK_TOKENS - 1) / 2


def beside(decoding: FloatArray, alone: FloatArray, share: FloatArray) -> FloatArray:
    """Queries decoding in the steps that encode, where `alone` do in the others and `decoding` in
    the mean."""
    return np.asarray(np.maximum(decoding - (1 - share) * alone, 0.0) / np.maximum(share, 1e-12))


def scaled(walk: Walk, rate: FloatArray,
            mean_input: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(share of steps that encode, tokens, queries) of a walk, in the mean exactly what `rate`
    queries a step need: a walk's own draws are too few for that."""
    wanted = rate * mean_input * (1 + walk.again)
    ratio = wanted / np.maximum(walk.share * walk.tokens.mean(axis=1), 1e-12)
    more_often = np.clip(ratio, walk.share, 1 / np.maximum(walk.share, 1e-12))
    share = np.minimum(walk.share * more_often, 1.0)
    return share, walk.tokens * (ratio / more_often)[:, None], walk.joined


def no_more_than(most: FloatArray, share: FloatArray,
                 tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(share of steps that encode, their tokens) where no step has more than `most`, all [configs]
    but `tokens` [configs, SIZES]: what larger ones had is encoded in others, in as many more steps
    as it takes."""
    wanted = share * tokens.mean(axis=1)
    share = np.clip(wanted / np.maximum(most, 1e-12), share, 1.0)
    mean = np.minimum(wanted / np.maximum(share, 1e-12), most)
    for _ in range(_FILLS):
        tokens = np.minimum(tokens * (mean / np.maximum(tokens.mean(axis=1), 1e-12))[:, None],
                            most[:, None])
    return share, tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps of one plan take so long; 1 s stands where they are not timed."""

    encode_s: FloatArray  # [configs, SIZES, kinds]
    plain_s: FloatArray  # [configs, kinds]
    is_timed: BoolArray
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    kind_of: list[int]  # each stage's kind


class LoadTimes:
    """It says how long the steps of loads take on one plan."""

    def __init__(self, plan: StagePlan, inputs: Lengths,
                 context: Callable[[FloatArray], FloatArray], measured: MeasuredRange) -> None:
        """`context` gives the tokens that each of so many decoding queries is charged."""
        self._times, self._tables, self._inputs = plan.times, plan.steps, inputs
        self._context, self._measured = context, measured

    def __call__(self, load: Load) -> Steps:
        beside, alone = (self._context(n) for n in (load.beside, load.alone))
        # attention of what one step encodes, in one layer
        single = self._times.encode_attention_s(load.tokens, 1.0)
        several = self._times.mean_attention_s(load.encoded)
        is_single, each = load.encoded < 1.5, load.tokens / self._inputs.mean
        attention_s = {degree: np.where(is_single, own, each * several[degree])
                       for degree, own in single.items()}
        encode_s = _by_kind(self._tables.mixed_s(
            load.tokens, load.encoded, attention_s, load.beside[:, None], beside[:, None]))
        plain_s = _by_kind(self._tables.decode_s(load.alone, alone))
        stretch = np.zeros(len(load.share))
        if not self._measured.is_endless(self._times.degrees):
            stretch = self._measured.stretch(self._times.degrees, self._presented(
                load, np.maximum(beside, alone)))
        is_timed = (np.isfinite(encode_s).all(axis=(1, 2)) & np.isfinite(plain_s).all(axis=1)
                    & (stretch <= REFUSED_BEYOND))
        if not is_timed.all():
            encode_s[~is_timed], plain_s[~is_timed] = 1.0, 1.0
        return Steps(encode_s=encode_s, plain_s=plain_s, is_timed=is_timed, stretch=stretch,
                     kind_of=self._tables.kind_of)

    def _presented(self, load: Load, context: FloatArray) -> Presented:
        beside = np.zeros_like(load.beside) if self._times.is_encoder_decoder else load.beside
        return Presented(
            encode_tokens=load.tokens.max(axis=1) + beside,
            encode_queries=np.maximum(load.alone, beside + load.encoded.max(axis=1)),
            decode_queries=np.maximum(load.beside, load.alone), context=context,
            input_tokens=self._inputs.max)


def _by_kind(seconds: Sequence[FloatArray]) -> FloatArray:
    """[..., kinds] of those of each kind, as np.stack has them, which takes five times as long."""
    found = np.empty((*seconds[0].shape, len(seconds)))
    for kind, own in enumerate(seconds):
        found[..., kind] = own
    return found
