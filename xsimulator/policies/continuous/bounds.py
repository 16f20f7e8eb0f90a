"""Upper bounds on what continuously batching engines answer, from the least work a query takes.

Symbols, of a query in the mean: L = input tokens, D = decode iterations; of a group of n: y =
queries that end per step. A step of stage k takes, in the mean over a group's steps, at least

    W_k(y) = C_k(y (L + D)) + y A_k [+ H(y (1 + D)) on the last stage]

C_k: the greatest convex function below the time of a step's rows (products, collectives, messages,
the host), which by Jensen's inequality no mix of large and small steps gets below, at least
x R_k(m) / m for the largest step m; H: the same of the output head; A_k: a query's attention, at
its cheapest. Times are lower envelopes (xsimulator.envelope), so they may be not monotone. With W_k

(and what continuous.least_steps says of steps that decode alone and those that encode, too, which
is more where few are present)

    I(y) = max(sum of W_k, n max W_k)      seconds between a group's steps, at least
    throughput = n y / I(y)

which rises with y, since W_k(y) / y falls. y itself is held by memory, slots and budget, and by the
latency, which is at least about I(y) for each decode iteration.

What is assumed of the walks (continuous.paged_walk): those present are no more than PRESENT times
what memory holds in the mean, and no query is evicted more than EVICTIONS times in the mean."""

from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.native import native
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous import load as loads
from xsimulator.policies.continuous.closed_form import Continuous
from xsimulator.policies.continuous.filling import OrcaFilling, SarathiFilling, VllmFilling
from xsimulator.policies.continuous.least_steps import EVICTIONS, HeldLines, LeastSteps
from xsimulator.policies.continuous.load import one_at_a_time
from xsimulator.policies.continuous.native_least import NativeLeast

PRESENT = 1.06
SLACK = 1.001  # of the largest rate among a few looked at
LEAST = 0.985  # of the latency found here, which has means for sizes that scatter
CROWDED = 0.25  # of what memory holds: with fewer present nobody is evicted
LARGEST = 1.1  # times the budget: vLLM's steps of parts of a batch scatter
RATES = 40  # values of y looked at together


class Lines(NamedTuple):
    """[lines] configurations of one plan: at most so many queries, budgets from `least` to `most`
    tokens."""

    most_active: FloatArray
    least: FloatArray
    most: FloatArray


class ContinuousBounds:
    """Bounds of one problem's configurations."""

    def __init__(self, form: Continuous) -> None:
        self.form = form
        self._inputs, self._outputs = form.problem.lengths.inputs, form.problem.lengths.outputs
        self.iterations = max(form.queries.present.iterations, 1e-9)
        self._mean = self._inputs.mean
        watched = self._outputs.quantile(form.problem.constraint.quantile)
        self._watched = float(form.flow.iterations_of(watched))
        self._least = LeastSteps(form)
        self._orca_weights = cache(self._find_orca_weights)
        self._native: NativeLeast | None = None
        # vLLM's queries that all decode equally long
        self._in_cohorts = (isinstance(form.filling, VllmFilling) and form.queries.are_equal
                            and form.queries.decoding_share > 0)

    def held(self, plan: StagePlan, lines: Lines) -> HeldLines:
        """What lines of a plan hold at most."""
        groups, filling = len(plan.stages), self.form.filling
        slots = np.maximum(lines.most_active / groups, 1.0)
        step_tokens = filling.step_tokens(np.ones(len(slots)), lines.least)
        room = self.form.memory.most_tokens(plan, groups, step_tokens)
        held = np.minimum(filling.most_present(slots, np.maximum(room, 1.0)) * PRESENT + 1.0, slots)
        # fewer groups than stages hold one query each
        alone = self.form.memory.most_tokens(plan, 1, step_tokens)
        held = np.where(room > 0, held, np.where(alone > 0, 1.0, 0.0))
        # as many iterations as are certain: encoding an evicted query again yields a token too
        is_crowded = held < slots
        iterations = np.where(is_crowded, np.maximum(
            self.iterations - EVICTIONS, self.iterations / 2), self.iterations)
        return HeldLines(plan, groups, held, lines.least, lines.most, iterations, is_crowded,
                         self._least.decoding(plan, room, lines.least),
                         self._most_rate(held, lines.most, iterations))

    def _most_rate(self, held: FloatArray, budget: FloatArray,
                   iterations: FloatArray) -> FloatArray:
        """[lines] queries that may end per step of a group."""
        most = held / iterations
        if isinstance(self.form.filling, OrcaFilling):
            # as good as rising with the places: where outputs are of a token or two it falls a bit
            places = np.maximum(held[:, None] ** np.linspace(0.0, 1.0, RATES), 1.0)
            return np.asarray(SLACK * self._one_at_a_time(places).max(axis=1))
        if isinstance(self.form.filling, SarathiFilling):
            return np.minimum(most, budget / (self._mean + iterations))
        return most

    def interval_s(self, of: HeldLines, lines: IntArray, rates: FloatArray) -> FloatArray:
        """[lines, rates] I(y) of some lines."""
        found = self._natively(of, lines, rates, None)
        return self._interval_s(of.take(lines), rates) if found is None else found

    def least_latency_s(self, of: HeldLines, lines: IntArray, rates: FloatArray) -> FloatArray:
        """[lines, rates] of some lines: no latency is less."""
        weights = self._weights(of, rates)
        found = self._natively(of, lines, rates, weights)
        return self._least_latency_s(of.take(lines), rates, weights) if found is None else found

    def _natively(self, of: HeldLines, lines: IntArray, rates: FloatArray,
                  weights: FloatArray | None) -> FloatArray | None:
        """By csrc/planning_least.cpp, to the bit; None where arrays have to serve."""
        if (library := native()) is None or (weights is not None and self._in_cohorts):
            return None
        if self._native is None:
            self._native = NativeLeast(library, self._least, watched=self._watched,
                                       crowded=CROWDED, latency=LEAST)
        return self._native.seconds(of, self._largest(of), lines, rates, weights)

    def _interval_s(self, at: HeldLines, rates: FloatArray) -> FloatArray:
        work = self._work_s(at, rates, self._plain_s(at, rates))
        return np.asarray(np.maximum(_sum(at.plan, work), at.groups * np.max(work, axis=0)))

    def _work_s(self, at: HeldLines, rates: FloatArray, plain_s: FloatArray) -> FloatArray:
        """[kinds, lines, rates] W_k(y); `plain_s`: of steps that decode alone."""
        steps, least = at.plan.convex_steps, self._least
        iterations, largest = at.iterations[:, None], self._largest(at)[:, None]
        rows = rates * (self._mean + iterations)
        heads = rates * (1 + iterations)
        work = []
        for kind, (of_rows, degree, layers) in enumerate(zip(
                steps.rows, steps.degrees, at.plan.layers_of_kinds, strict=True)):
            own = np.maximum(of_rows.mean_s(rows), rows * of_rows.rate_s(largest))
            if isinstance(self.form.filling, VllmFilling):  # its steps encode, or decode
                own = np.maximum(own, rates * self._mean * of_rows.rate_s(largest)
                                 + rates * iterations * of_rows.rate_s(at.held[:, None]))
            own = own + rates * layers * (least.attention(degree).encode_s + iterations
                                          * least.each_s(degree, at.held)[:, None])
            if kind == steps.last:
                own = own + np.maximum(steps.head.mean_s(heads), heads * steps.head.rate_s(
                    np.maximum(largest, at.held[:, None])))
            work.append(own)
        share = least.most_share(rates, self._again(at, rates), at.least, at.iterations)
        return np.maximum(work, least.mixed_s(at.plan, plain_s, rates, share))

    def _again(self, at: HeldLines, rates: FloatArray) -> FloatArray:
        """[lines, rates] evictions of a query, at most."""
        is_full = rates * (at.iterations[:, None] + 1) >= CROWDED * at.held[:, None]
        return np.where(at.is_crowded[:, None] & is_full, EVICTIONS, 0.0)

    def _plain_s(self, at: HeldLines, rates: FloatArray) -> FloatArray:
        """[kinds, lines, rates] of a step that does not encode: who decodes is there in each of
        them, y D in the mean."""
        return self._least.plain_s(at.plan, np.maximum(
            rates * at.iterations[:, None], at.decoding[:, None]))

    def _largest(self, at: HeldLines) -> FloatArray:
        """[lines] rows of a step at most."""
        if isinstance(self.form.filling, SarathiFilling):
            return at.most
        if isinstance(self.form.filling, OrcaFilling):
            return self._inputs.max + at.held + 1
        return LARGEST * np.maximum(np.maximum(at.most, self._inputs.max), at.held)

    def _weights(self, at: HeldLines, rates: FloatArray) -> FloatArray:
        """[lines, rates] what `_least_latency_s` has of functions that each library rounds in its
        own way: Sarathi's share of steps that encode, in the eyes of who is present; how often
        ORCA's decoding query is in such a step, over all steps'; no use for vLLM."""
        mean, filling = self.iterations, self.form.filling
        if isinstance(filling, SarathiFilling):
            # those present are in the steps that encode less often by one in D + 1
            share = -np.expm1(rates * (mean + 1) * np.log1p(-1 / (mean + 1)))
            return np.asarray(np.maximum(share, 1e-12))
        if isinstance(filling, OrcaFilling):
            return np.interp(rates, *self._orca_weights(float(at.held.max(initial=1.0))))
        return rates

    def _least_latency_s(self, at: HeldLines, rates: FloatArray,
                         weights: FloatArray) -> FloatArray:
        """[lines, rates] of the sequence that the bound is for, or of the quantile of all.

        With a share s of steps that encode, each E seconds, and P the others, I = s E + (1 - s) P.
        A query that decodes is seldom in a step that encodes, by the factor k, and its own
        encoding is one: together w ((1 - k) P + k I) + E, w its iterations."""
        watched, mean, filling = self._watched, self.iterations, self.form.filling
        again, plain = self._again(at, rates), self._plain_s(at, rates)
        work = self._work_s(at, rates, plain)
        plain_s, through_s = _sum(at.plan, plain), _sum(at.plan, work)
        # fewer groups than stages hold one query each, and wait for none
        is_filled = rates * mean > 1
        interval_s = np.where(is_filled, np.maximum(
            through_s, at.groups * np.max(work, axis=0)), through_s)
        lower_s = np.minimum(plain_s, interval_s)
        own_s = self._least.own_encoding_s(at.plan, rates, at.most)
        # what is seen by one that decodes is no shorter than a step that does not encode
        alone_s = own_s + np.maximum(watched - again, 0.0) * lower_s
        if isinstance(filling, SarathiFilling):
            longer = max(watched / mean - 1, 0.0)
            times = np.minimum(watched * (mean + 1) / mean - longer / weights, watched + 1)
            seconds = times * interval_s + longer * (1 / weights - 1) * lower_s
            # more steps where an input is larger than a step has room for
            pieces = np.maximum(self._mean / at.most, 1.0)[:, None]
            seconds = seconds + (pieces - 1 - again) * interval_s
        elif isinstance(filling, VllmFilling):
            # steps that encode others come between two of its tokens
            others = np.maximum(1 - 1 / np.maximum(rates * mean, 1.0), 0.0)
            seconds = own_s + np.maximum(watched - again, 0.0) * lower_s + np.maximum(
                watched - 1 - again, 0.0) * others * (interval_s - lower_s)
            if self._in_cohorts:
                # or all encode before all decode: half of the others' steps come after one's own
                seconds = np.minimum(seconds, own_s / 2 + np.maximum(
                    watched - again, 0.0) * (lower_s + interval_s) / 2)
        else:
            seconds = watched * (weights * interval_s + (1 - weights) * lower_s) + (
                1 - again) * np.maximum(interval_s, own_s)
        return np.asarray(LEAST * np.maximum(seconds, alone_s))

    def _one_at_a_time(self, places: FloatArray) -> FloatArray:
        return one_at_a_time(places, self.iterations, in_step=self.form.queries.are_equal)

    def _find_orca_weights(self, held: float) -> tuple[FloatArray, FloatArray]:
        """(rates, how often a decoding query is in a step that encodes, over all steps'), at
        numbers of places from 1 to `held`."""
        places = np.geomspace(1.0, max(held, 1.0) + 1.0, 200)
        rates = self._one_at_a_time(places)
        decoding = np.maximum(rates * self.iterations, 1e-12)
        beside = loads.beside(decoding, np.maximum(places, decoding), rates)
        return rates, np.minimum(beside / decoding, 1.0)


def _sum(plan: StagePlan, of_kinds: FloatArray) -> FloatArray:
    """Over all stages, of what is [kinds, ...]; in this order wherever it is summed."""
    number = plan.convex_steps.number
    total = number[0] * of_kinds[0]
    for count, own in zip(number[1:], of_kinds[1:], strict=True):
        total = total + count * own
    return np.asarray(total)
