"""What a decode pool brings that takes chunks of inputs while the encode pool is behind, in closed
form (docs/design.md).

Symbols: as in waa.closed_form; c = encode_chunk, L = input tokens, lambda_E = B_E / T_E, what the
encode pool sends when it never waits, n* = B_E E[S], the decode batch as planned. A group's step
with t tokens of inputs beside its queries makes an iteration last T(n, t). Little's law holds of
both ways of encoding together: in an iteration come lambda_E T queries by the encode pool and G t /
E[L] by chunks, so that

    n = E[D] (lambda_E T(n, t) + G t / E[L])

The encode pool is behind where that is below n* with t = 0. Then either every step has a whole
chunk and n is still below n* (t = c), or chunks keep it at n*, in a share f of the steps.

*What they hold.* A query is begun as another one leaves, while no more are there than planned. In a
group's step m = n* / (E[D] G) leave in the mean, nearly Poisson's number; where any do, they are
m' = m / (1 - exp(-m)), and a chunk has that many inputs' tokens, or c: c' = min(c, E[L] m'), in
f = x E[L] / (G c') of the steps, where x queries in an iteration are encoded in chunks.

*What they take.* Let a and b be a short and a long step's seconds on the slowest stage, A and B
through all of them, and a' = max(a, A / G) a short step's share of an iteration without long ones.
An iteration of G steps takes as long as the longest path through the pipeline does in the mean. One
stays on the slowest stage, one follows a group, and one goes through all stages with a long step,
back to its group's next turn, and over (1 - f) / f short steps to the next long one:

    T = max( G (f b + (1 - f) a), f B + (1 - f) A, G (f B' + (1 - f) a') / (f G + 1 - f) )

with B' = B - (G - 1) / 2 (a' - a), since what is left of a whole turn of short steps goes by on a
stage. The last is what short steps lose behind long ones, where groups are not many more than
stages. Against the recurrence of random steps it is 0 to 7 % short, by more the more they differ.
Where inputs decide what a chunk holds, one holds much and another little, nearly exponentially: the
same holds of the longer ones alone, exp(-1) f of the steps of 2 c' tokens (or c) in the mean, among
all others.
lambda = n / (E[D] T).

Of all queries the share 1 - lambda_E / lambda is encoded in chunks. One of L tokens has its first
token (L - 1) / c iterations and a step after its first chunk begins, for where in a chunk its input
begins is as good as random."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xgpt.core.problem import Problem
from xsimulator.occupancy import QueryFlow
from xsimulator.policies.waa.divided import Divided
from xsimulator.policies.waa.plans import WaaPlan
from xsimulator.policies.waa.pool_times import DEVIATIONS, PoolRates, PoolTimes, root

_BEHIND = 1e-9  # of the planned decode batch
# Chunks that lie ready in a decode pool besides those of an encode step, while whose head hears of
# nothing: one is encoded, the next is begun before word of that is there.
_SPARE_CHUNKS = 2.0
_ACCURACY = 1e-9  # of queries in an iteration
_LONGER = math.exp(-1)  # of the long steps, those that are longer than these are in the mean


class ChunkRates(NamedTuple):
    """`rates` with chunks [configs]; the `share` of queries that the decode pool encodes (0 where
    none is planned to be), of one such seconds from its first chunk to its first token, in the mean
    and of the bound's query; and the tokens of inputs that lie ready for them (1: the encode pool
    is not behind)."""

    rates: PoolRates
    share: FloatArray
    taken_s: FloatArray
    bounded_taken_s: FloatArray
    stock_tokens: FloatArray


class StepSeconds(NamedTuple):
    """A step takes so long [configs] on the slowest stage, and through all."""

    slowest: FloatArray
    through: FloatArray


class ChunkedPools:
    """The rates of one problem's configurations whose decode pools take chunks."""

    def __init__(self, problem: Problem, times: PoolTimes, flow: QueryFlow, *,
                 padded: bool) -> None:
        self._times, self._flow, self._padded = times, flow, padded
        lengths, constraint = problem.lengths, problem.constraint
        self._inputs, self._outputs = lengths.inputs, lengths.outputs.mean
        self._bounded_input = lengths.inputs.mean  # mean input of the queries that the bound is on
        if constraint.kind == "sequence":
            self._bounded_input = float(lengths.mean_input_given_output()[
                lengths.outputs.quantile(constraint.quantile) - 1])

    def with_chunks(self, divided: Divided, alone: PoolRates) -> ChunkRates:
        """`alone`: the rates of the same configurations without chunks."""
        configs = divided.configs
        most = configs.batch * self._outputs
        rows = np.flatnonzero((configs.chunk > 0) & (alone.throughput_qps > 0)
                              & (alone.decode_batch < most * (1 - _BEHIND)))
        taken: FloatArray = np.zeros((3, len(most)))
        stock = np.minimum(configs.chunk, 1.0)
        if not len(rows):
            return ChunkRates(alone, taken[0], taken[1], taken[2], stock)
        least = PoolRates(*(values[rows] for values in alone))
        rates, taken[:, rows], stock[rows], is_timed = self._behind(
            divided.take(rows), least, most[rows])
        columns = []
        for before, after, refused in zip(alone, rates, _REFUSED, strict=True):
            column = before.copy()
            column[rows] = np.where(is_timed, after, before[rows] if refused is None else refused)
            columns.append(column)
        return ChunkRates(PoolRates(*columns), taken[0], taken[1], taken[2], stock)

    def step_s(self, divided: Divided, chunk: FloatArray) -> Callable[[FloatArray], StepSeconds]:
        """What says of so many queries, together in each configuration's groups, how long a step of
        one of these takes that encodes `chunk` tokens."""
        encoded = chunk / self._inputs.mean
        attention = {plan: {degree: encoded[own] * one for degree, one in
                            plan.decode.times.mean_attention_s(encoded[own] + 1).items()}
                     for plan, own in divided.each()}

        def of_decoding(decoding: FloatArray) -> StepSeconds:
            rows = np.maximum(decoding / divided.configs.groups, 1.0)
            context = self._flow.charged_context(rows, padded=self._padded)
            return StepSeconds(*divided.gathered(lambda plan, own: _summed(
                plan, plan.decode.steps.mixed_s(chunk[own], encoded[own], attention[plan],
                                                rows[own], context[own]))))

        return of_decoding

    def iteration_s(self, divided: Divided) -> Callable[[FloatArray],
                                                        tuple[FloatArray, FloatArray]]:
        """What says of so many queries, in each configuration's groups, T(n, t), and a step's
        seconds through all stages [configs]. Every step encodes a whole chunk, and every group
        takes steps, though fewer queries may decode."""
        step_s = self.step_s(divided, divided.configs.chunk)

        def of_decoding(decoding: FloatArray) -> tuple[FloatArray, FloatArray]:
            step = step_s(decoding)
            return np.asarray(np.maximum(divided.configs.groups * step.slowest,
                                         step.through)), step.through

        return of_decoding

    def _plain_s(self, divided: Divided, decoding: FloatArray) -> StepSeconds:
        """A step that encodes nothing. Rows that joining queries take over are not compacted."""
        rows = np.maximum(decoding / divided.configs.groups, 1.0)
        context = self._flow.charged_context(rows, padded=self._padded)
        return StepSeconds(*divided.gathered(lambda plan, own: _summed(
            plan, plan.decode.steps.decode_s(rows[own], context[own]))))

    def _behind(self, divided: Divided, alone: PoolRates, most: FloatArray,
                ) -> tuple[PoolRates, FloatArray, FloatArray, BoolArray]:
        """Of configurations whose encode pools are behind: their rates, (share, taken_s,
        bounded_taken_s), stock_tokens, and whether the timing source answers."""
        configs, iterations = divided.configs, self._times.mean_iterations
        chunk, groups = configs.chunk, configs.groups
        brought = groups * chunk / self._inputs.mean  # queries in an iteration, by whole chunks
        (between_s,) = divided.gathered(lambda plan, rows: (
            self._times.between_s(plan, configs.batch[rows]),))
        sent = configs.batch / between_s  # lambda_E
        iteration_s = self.iteration_s(divided)
        whole_s, _ = iteration_s(most)
        is_timed = np.isfinite(whole_s)
        whole_s = np.where(is_timed, whole_s, 1.0)

        def excess(decoding: FloatArray) -> FloatArray:
            seconds = np.where(is_timed, iteration_s(decoding)[0], 1.0)
            return iterations * (sent * seconds + brought) - decoding

        of_most = iterations * (sent * whole_s + brought) - most
        decoding = root(excess, most, np.minimum(of_most, 0.0))
        every_s, through = iteration_s(decoding)
        iteration = every_s
        if len(rows := np.flatnonzero(is_timed & (of_most >= 0))):
            iteration[rows], through[rows] = self._as_planned(
                divided.take(rows), most[rows], sent[rows])
        stock = np.ceil(groups * chunk * (1 / (sent / configs.batch * iteration) + _SPARE_CHUNKS))
        # with one that exceeds it, and one of each group that is encoded in part
        beside = stock / self._inputs.mean + 1 + groups
        away = sent * (alone.encode_s + alone.handover_s + 0.5 * iteration)
        # both are the same but where a time leaps at just so many queries
        rate = np.minimum(decoding / iterations, sent * iteration + brought) / iteration
        rates = PoolRates(
            throughput_qps=rate, decode_batch=decoding,
            iteration_s=iteration, encode_s=alone.encode_s, handover_s=alone.handover_s,
            present=np.ceil(decoding + away + beside + 2 * configs.batch
                            + DEVIATIONS * np.sqrt(np.maximum(decoding, 1.0))))
        taken_s, bounded_s = (max(tokens - 1, 0.0) / chunk * iteration + through
                              for tokens in (self._inputs.mean, self._bounded_input))
        is_had = rate > 0  # not where a size is refused
        share = np.clip(1 - sent / np.where(is_had, rate, 1.0), 0.0, 1.0)
        taken = np.stack([np.where(is_had, share, 0.0), taken_s, bounded_s])
        return rates, np.where(is_timed, taken, 0.0), np.where(is_timed, stock, 0.0), is_timed

    def _as_planned(self, divided: Divided, most: FloatArray,
                    sent: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(T, seconds of a step with a chunk through all stages) where chunks keep the decode batch
        at n*."""
        configs, mean = divided.configs, self._inputs.mean
        groups = configs.groups
        wanted, plain = most / self._times.mean_iterations, self._plain_s(divided, most)
        leaving = wanted / groups
        chunk = np.minimum(configs.chunk, mean * leaving / -np.expm1(-leaving))
        long, brought = self.step_s(divided, chunk)(most), groups * chunk / mean

        def iteration_s(share: FloatArray) -> FloatArray:
            return mixed_s(groups, share, plain, long, np.minimum(configs.chunk / chunk, 2.0))

        def lacking(share: FloatArray) -> FloatArray:
            return np.asarray(wanted - sent * iteration_s(share) - share * brought)

        whole = np.ones(len(most))
        share = np.clip(root(lacking, whole, np.minimum(lacking(whole), 0.0), _ACCURACY), 0.0, 1.0)
        return iteration_s(share), long.through


def mixed_s(groups: FloatArray, share: FloatArray, short: StepSeconds, long: StepSeconds,
            longer: FloatArray) -> FloatArray:
    """T [configs] of so many groups' steps, a share of which is long, and of these a part so many
    times `longer` in what they take more than short ones."""
    rest = 1 - share
    in_turn = groups * (share * long.slowest + rest * short.slowest)
    one_group = share * long.through + rest * short.through
    few = share * _LONGER
    between = (share - few * longer) / (1 - few)
    held_up = np.maximum(_held_up_s(groups, share, short, long), _held_up_s(
        groups, few, _beside(short, long, between), _beside(short, long, longer)))
    return np.asarray(np.maximum(np.maximum(in_turn, one_group), held_up))


def _beside(short: StepSeconds, long: StepSeconds, times: FloatArray) -> StepSeconds:
    """A step that takes so many times what a long one takes more than a short one."""
    return StepSeconds(short.slowest + times * (long.slowest - short.slowest),
                       short.through + times * (long.through - short.through))


def _held_up_s(groups: FloatArray, share: FloatArray, short: StepSeconds,
               long: StepSeconds) -> FloatArray:
    rest, turn = 1 - share, np.maximum(short.slowest, short.through / groups)
    through = long.through - (groups - 1) / 2 * (turn - short.slowest)
    return np.asarray(groups * (share * through + rest * turn) / (share * groups + rest))


def _summed(plan: WaaPlan, kinds: Sequence[FloatArray]) -> StepSeconds:
    """Of a step's seconds [configs] on each kind of stages, which are few."""
    number = plan.decode.steps.stages_of_kinds
    slowest, through = kinds[0], number[0] * kinds[0]
    for count, seconds in zip(number[1:], kinds[1:], strict=True):
        slowest, through = np.maximum(slowest, seconds), through + count * seconds
    return StepSeconds(slowest, through)


# What a configuration has whose sizes are refused, of each of PoolRates; None: as without chunks.
_REFUSED: tuple[float | None, ...] = (0.0, None, np.inf, None, None, None)
