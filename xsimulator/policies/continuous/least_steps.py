"""What the steps of a group of a continuously batching engine take at least, by what they hold.

A step either decodes alone, at least

    P_k(n) = the time of stage k for n queries that decode, n = max(n_0, y D)

since whoever is present is in each of them, or encodes, too. With a share s of steps that encode, a
step takes in the mean over both kinds at least

    (1 - s) P_k + s C_k(y L / s) + y A_k

C_k: convex below the time of a step's rows (xsimulator.convex_steps), so that no mix of large and
small inputs gets below; A_k: a query's encoding attention. It falls with s, since C_k(0) <= P_k:
the largest share that there can be bounds it. Symbols otherwise as in continuous.bounds."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.closed_form import Continuous
from xsimulator.policies.continuous.filling import OrcaFilling, SarathiFilling

EVICTIONS = 1.0  # of a query in the mean, at most
SPLIT = 1.1  # times as many steps as inputs and parts of them ask for, at most: budgets scatter
ONE_FITS = 0.98  # share of a query that memory holds below which one alone is taken to scatter
COUNTS = np.unique(np.concatenate([
    np.arange(1.0, 65.0), np.rint(2.0 ** np.arange(6, 17, 1 / 16))]))
_LENGTHS = np.unique(np.rint(2.0 ** np.arange(0, 20, 1 / 8)))


class Attention(NamedTuple):
    """One layer's seconds, at least: `encode_s` of encoding a query; [counts] `decode_s` of an
    iteration of so many that decode, or more; `each_s` of one of so many, or fewer."""

    encode_s: float
    decode_s: FloatArray
    each_s: FloatArray


class HeldLines(NamedTuple):
    """[lines] of one plan, budgets from `least` to `most` tokens, with what they hold at most: see
    continuous.bounds. `decoding`: queries in a step that decodes, at least; `top`: queries that may
    end per step of a group."""

    plan: StagePlan
    groups: int
    held: FloatArray
    least: FloatArray
    most: FloatArray
    iterations: FloatArray
    is_crowded: BoolArray
    decoding: FloatArray
    top: FloatArray

    def take(self, rows: IntArray) -> HeldLines:
        """Some of the lines."""
        return HeldLines(self.plan, self.groups, self.held[rows], self.least[rows],
                         self.most[rows], self.iterations[rows], self.is_crowded[rows],
                         self.decoding[rows], self.top[rows])


class LeastSteps:
    """Lower bounds of one problem's steps."""

    def __init__(self, form: Continuous) -> None:
        self._form = form
        self._inputs, self.name = form.problem.lengths.inputs, form.name
        self.mean_input = self._inputs.mean
        self.iterations = max(form.queries.present.iterations, 1e-9)
        self.attention = cache(self._find_attention)
        # tokens for which a step that is full has no use, in the mean
        self.unused = (self._inputs.mean + self._inputs.std**2 / self._inputs.mean) / 2

    def decoding(self, plan: StagePlan, room: FloatArray, budget: FloatArray) -> FloatArray:
        """[lines] n_0: queries in a step that decodes, at least, where a group has room for `room`
        tokens, and a step for `budget`: one, or the share of the time in which it decodes."""
        alone = self._form.filling.most_present(np.ones(len(room)), np.maximum(room, 1.0))
        alone = np.where(alone < ONE_FITS, alone / 2, 1.0)
        if isinstance(self._form.filling, SarathiFilling):
            pieces = 1 + self._inputs.max / np.maximum(budget - 1, 1.0)
            alone = alone * self.iterations / (self.iterations + pieces)
        return np.asarray(alone)

    def plain_s(self, plan: StagePlan, decoding: FloatArray) -> FloatArray:
        """[kinds, *decoding.shape] P_k of a step of so many queries or more."""
        attention_s = {degree: np.interp(decoding, COUNTS, self.attention(degree).decode_s)
                       for degree in set(plan.convex_steps.degrees)}
        seconds = np.stack(plan.least_steps.decode_rows_s(decoding, attention_s))
        return np.where(np.isfinite(seconds), seconds, 0.0)  # of what is refused nothing is said

    def each_s(self, degree: int, held: FloatArray) -> FloatArray:
        """[lines] a layer's attention, at least, of an iteration of one of so many, or fewer."""
        return np.interp(held, COUNTS, self.attention(degree).each_s)

    def most_share(self, rates: FloatArray, again: FloatArray, budget: FloatArray,
                   iterations: FloatArray) -> FloatArray:
        """[lines, rates] share of steps that encode, at most, where y = `rates` queries end a step,
        of which `again` [lines, rates] are encoded twice."""
        if isinstance(self._form.filling, OrcaFilling):
            return rates
        mean = self._inputs.mean
        if isinstance(self._form.filling, SarathiFilling):
            # a step that encodes ends an input, or is full
            room = budget[:, None] - 2 * (rates * (iterations[:, None] + 1) + 1)
        else:
            room = np.maximum(budget[:, None] - self.unused, mean)
        each = 1 + mean / np.maximum(room, 1.0)
        return np.minimum(SPLIT * rates * (1 + again) * each, 1.0)

    def mixed_s(self, plan: StagePlan, plain_s: FloatArray, rates: FloatArray,
                share: FloatArray) -> FloatArray:
        """[kinds, lines, rates] what a step takes in the mean, `plain_s` if it decodes alone."""
        tokens = rates * self._inputs.mean / np.maximum(share, 1e-300)
        steps = plan.convex_steps
        return np.stack([
            (1 - share) * alone + share * rows.mean_s(tokens)
            + rates * layers * self.attention(degree).encode_s
            for alone, rows, degree, layers in zip(
                plain_s, steps.rows, steps.degrees, plan.layers_of_kinds, strict=True)])

    def own_encoding_s(self, plan: StagePlan, rates: FloatArray, budget: FloatArray) -> FloatArray:
        """[lines, rates] from where a query's encoding begins to its first token, in the mean."""
        tokens, pieces = np.full(rates.shape, self._inputs.mean), np.ones(rates.shape)
        if isinstance(self._form.filling, SarathiFilling):
            pieces = np.broadcast_to(np.maximum(tokens / budget[:, None], 1.0), rates.shape)
        elif not isinstance(self._form.filling, OrcaFilling):
            # where several are encoded together, they may be so in parts
            tokens = tokens / (1 + np.minimum(2 * rates, 1.0))
        steps, total = plan.convex_steps, np.zeros(rates.shape)
        for number, rows, degree, layers in zip(
                steps.number, steps.rows, steps.degrees, plan.layers_of_kinds, strict=True):
            total += number * (rows.whole_s(tokens, pieces)
                               + layers * self.attention(degree).encode_s * tokens
                               / self._inputs.mean)
        return np.asarray(total + steps.head.mean_s(np.ones(1)))

    def _find_attention(self, degree: int) -> Attention:
        layers, form = self._form.plans.layers, self._form
        inputs, mean = self._inputs, self._inputs.mean
        lengths = np.append(_LENGTHS[inputs.max > _LENGTHS], float(inputs.max))
        single = layers.encode_attention_s(lengths, 1.0, degree) / lengths
        together = layers.mean_attention_s(np.arange(1.0, 129.0), degree) / mean
        sizes = form.queries.input_sizes
        own = float(layers.encode_attention_s(sizes, 1.0, degree).mean())
        least = mean * float(min(np.nanmin(single), np.nanmin(together)))
        if isinstance(form.filling, OrcaFilling):  # each query is encoded alone, and whole
            least = own
        context = form.flow.charged_context(COUNTS, padded=form.timing.facts.is_padded)
        decode = layers.decode_attention_s(COUNTS, context, degree)
        decode = np.where(np.isfinite(decode), decode, np.inf)
        several = np.minimum.accumulate(decode[::-1])[::-1]
        each = np.minimum.accumulate(decode / COUNTS)
        last = several[np.isfinite(several)].max(initial=0.0)
        return Attention(least if np.isfinite(least) else 0.0,
                         np.where(np.isfinite(several), several, last),
                         np.where(np.isfinite(each), each, 0.0))
