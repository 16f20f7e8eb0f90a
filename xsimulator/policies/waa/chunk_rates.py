"""What a decode pool brings that takes chunks of inputs while the encode pool is behind, in closed
form (docs/design.md).

Symbols: as in waa.closed_form; c = encode_chunk, L = input tokens, lambda_E = B_E / T_E, what the
encode pool sends when it never waits, n* = B_E E[S], the decode batch as planned. A group's step
with t tokens of inputs beside its queries makes an iteration last T(n, t). Little's law holds of
both ways of encoding together: in an iteration come lambda_E T queries by the encode pool and G t /
E[L] by chunks, so that

    n = E[D] (lambda_E T(n, t) + G t / E[L])

The encode pool is behind where that is below n* with t = 0. Then either every step has a whole
chunk and n is still below n* (t = c), or whole chunks keep it at n*, in a share f of the steps. On
one stage T is linear in f. On several a long step holds up the short ones of groups behind it, as
if there were more long ones: 1 - (1 - f)^2 of the steps, as the replay has it on four and five
stages. So chunks that are too large do not pay. lambda = n / (E[D] T)."""

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xgpt.core.problem import Problem
from xsimulator.occupancy import QueryFlow
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan
from xsimulator.policies.waa.pool_times import DEVIATIONS, PoolRates, PoolTimes, root

_BEHIND = 1e-9  # of the planned decode batch
# Chunks that lie ready in a decode pool besides those of an encode step, while whose head hears of
# nothing: one is encoded, the next is begun before word of that is there.
_SPARE_CHUNKS = 2.0
_HELD_UP = 2.0  # exponent of the steps without a chunk that one does not hold up, on several stages


class ChunkRates(NamedTuple):
    """`rates` with chunks; of a query that the decode pool encodes the seconds [configs] from its
    first chunk to its first token (0 where none is planned to be), and the tokens of inputs that
    lie ready for it (1: the encode pool is not behind)."""

    rates: PoolRates
    taken_s: FloatArray
    stock_tokens: FloatArray


class ChunkedPools:
    """The rates of one problem's configurations whose decode pools take chunks."""

    def __init__(self, problem: Problem, times: PoolTimes, flow: QueryFlow, *,
                 padded: bool) -> None:
        self._times, self._flow, self._padded = times, flow, padded
        self._inputs, self._outputs = problem.lengths.inputs, problem.lengths.outputs.mean

    def with_chunks(self, plan: WaaPlan, configs: WaaConfigs, alone: PoolRates) -> ChunkRates:
        """`alone`: the rates of the same configurations without chunks."""
        most = configs.batch * self._outputs
        rows = np.flatnonzero((configs.chunk > 0) & (alone.throughput_qps > 0)
                              & (alone.decode_batch < most * (1 - _BEHIND)))
        taken: FloatArray = np.zeros(len(most))
        stock = np.minimum(configs.chunk, 1.0)
        if not len(rows):
            return ChunkRates(alone, taken, stock)
        own, least = configs.take(rows), PoolRates(*(values[rows] for values in alone))
        rates, taken[rows], stock[rows], is_timed = self._behind(plan, own, least, most[rows])
        columns = []
        for before, after, refused in zip(alone, rates, _REFUSED, strict=True):
            column = before.copy()
            column[rows] = np.where(is_timed, after, before[rows] if refused is None else refused)
            columns.append(column)
        return ChunkRates(PoolRates(*columns), taken, stock)

    def iteration_s(self, plan: WaaPlan, decoding: FloatArray, groups: FloatArray,
                    chunk: FloatArray) -> tuple[FloatArray, FloatArray]:
        """T(n, t), and a step's seconds through all stages [configs]: `decoding` queries in so many
        groups, each of which encodes `chunk` tokens in every step. Every group takes steps, though
        fewer queries may decode."""
        pool, mean = plan.decode, self._inputs.mean
        rows = np.maximum(decoding / groups, 1.0)
        attention = {degree: chunk / mean * one for degree, one in
                     pool.times.mean_attention_s(chunk / mean + 1).items()}
        kinds = np.stack(pool.steps.mixed_s(
            chunk, chunk / mean, attention, rows,
            self._flow.charged_context(rows, padded=self._padded)))
        return self._timed(plan, groups, kinds)

    def _plain_s(self, plan: WaaPlan, decoding: FloatArray, groups: FloatArray) -> FloatArray:
        """T(n, 0). Rows that joining queries take over are not compacted."""
        rows = np.maximum(decoding / groups, 1.0)
        kinds = np.stack(plan.decode.steps.decode_s(rows, self._flow.charged_context(
            rows, padded=self._padded)))
        return self._timed(plan, np.minimum(groups, np.maximum(decoding, 1.0)), kinds)[0]

    @staticmethod
    def _timed(plan: WaaPlan, steps: FloatArray, kinds: FloatArray,
               ) -> tuple[FloatArray, FloatArray]:
        """(seconds of an iteration, through all stages) of as many `steps` of each kind of
        stage."""
        through = (np.bincount(plan.decode.steps.kind_of)[:, None] * kinds).sum(axis=0)
        return np.asarray(np.maximum(steps * kinds.max(axis=0), through)), np.asarray(through)

    def _behind(self, plan: WaaPlan, configs: WaaConfigs, alone: PoolRates, most: FloatArray,
                ) -> tuple[PoolRates, FloatArray, FloatArray, BoolArray]:
        """Of configurations whose encode pools are behind: their rates, taken_s, stock_tokens, and
        whether the timing source answers."""
        chunk, groups, iterations = configs.chunk, configs.groups, self._times.mean_iterations
        brought = groups * chunk / self._inputs.mean  # queries in an iteration, by whole chunks
        sent = configs.batch / self._times.between_s(plan, configs.batch)  # lambda_E
        whole_s, _ = self.iteration_s(plan, most, groups, chunk)
        is_timed = np.isfinite(whole_s)
        whole_s = np.where(is_timed, whole_s, 1.0)

        def excess(decoding: FloatArray) -> FloatArray:
            seconds = np.where(is_timed, self.iteration_s(plan, decoding, groups, chunk)[0], 1.0)
            return iterations * (sent * seconds + brought) - decoding

        of_most = iterations * (sent * whole_s + brought) - most
        decoding = root(excess, most, np.minimum(of_most, 0.0))
        plain_s = self._plain_s(plan, most, groups)
        held_up = _HELD_UP if len(plan.decode.stages) > 1 else 1.0

        def mixed_s(share: FloatArray) -> FloatArray:
            return np.asarray(plain_s + (1 - (1 - share) ** held_up) * (whole_s - plain_s))

        def lacking(share: FloatArray) -> FloatArray:
            return np.asarray(most / iterations - sent * mixed_s(share) - share * brought)

        whole = np.ones(len(most))
        share = np.clip(root(lacking, whole, np.minimum(-of_most / iterations, 0.0)), 0.0, 1.0)
        every_s, through = self.iteration_s(plan, decoding, groups, chunk)
        iteration = np.where(of_most >= 0, mixed_s(share), every_s)
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
        taken = np.maximum(self._inputs.mean - 1, 0.0) / chunk * iteration + through
        return rates, np.where(is_timed, taken, 0.0), np.where(is_timed, stock, 0.0), is_timed


# What a configuration has whose sizes are refused, of each of PoolRates; None: as without chunks.
_REFUSED: tuple[float | None, ...] = (0.0, None, np.inf, None, None, None)
