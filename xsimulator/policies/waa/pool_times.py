"""WAA's two pools: how long their steps take, what one query costs in a single group, and where the
two meet, in throughput and decode batch (waa.closed_form has the equations)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.fixed_sizes import KeptOfFixed, is_fixed
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.policies.waa.divided import Divided
from xsimulator.policies.waa.few_each import FULL, busy_groups
from xsimulator.policies.waa.plans import WaaPlan, WaaPlans
from xsimulator.policies.waa.step_columns import ROWS_RATIO, StepColumns, group_sizes, many
from xsimulator.policies.waa.unevenness import Unevenness, UnevenPool
from xsimulator.stage_times import HandoverCost, StageTimes

_ROWS_SPARE = 24  # of them beyond what is asked for: twice as large
_ROOT_STEPS = 100  # to the decode batch at most; 6 to 10 are usual
_ROOT_ACCURACY = 1e-12  # of the decode batch that is wanted
_FEW, _STEPS_KEPT = 512, 64  # encode steps that are kept: batches of one, and how many
FEW_ITERATIONS = 24.0  # of a query: those in the system are now in one pool, now in the other
# before a decode pool that is busy all the time, over those that decode; and half of whom random
# arrivals would leave waiting, since they come from a pipeline: what suits replays, not derived
_MOST_WAITING = 0.75
DEVIATIONS = 3.0  # of the number in the system, where the encode pool sets the pace


class EncodeTimes(NamedTuple):
    """Encode steps of batches take such seconds [batches]."""

    between: FloatArray  # from one step to the next: the slowest stage, or the handover
    through: FloatArray  # of a step at the upper threshold of the workload adjustment
    handover: FloatArray


def shared_times(problem: Problem, timing: TimingSource, plans: PlanSource, flow: QueryFlow,
                 adjustment: float) -> PoolTimes:
    """The times of the plans asked for last are kept: WAA-C and WAA-M divide the devices among the
    same pools."""
    known = next((own for one, share, own in tuple(_latest)
                  if one is plans and share == adjustment), None)
    if known is None:
        known = PoolTimes(problem, timing, plans, flow, adjustment)
        _latest[:] = [*_latest[1 - _MOST_KEPT:], (plans, adjustment, known)]
    return known


class PoolTimes:
    """The times of one problem's pools are asked for here; those of decode pools are tabulated."""

    def __init__(self, problem: Problem, timing: TimingSource, plans: PlanSource, flow: QueryFlow,
                 adjustment: float) -> None:
        self._flow, self._adjustment = flow, adjustment
        self.longest_share = 1 + adjustment  # of the mean tokens, in the batch of most
        self._inputs = problem.lengths.inputs
        self._context = partial(flow.charged_context, padded=timing.facts.is_padded)
        # of the queries, is not done with its first token, and is handed over
        self._decoding_share = float(problem.lengths.outputs.pmf[flow.iterations_fewer:].sum())
        self.mean_iterations = max(flow.mean_iterations, 1e-9)
        self.mean_input = self._inputs.mean
        # of the share of iterations that are not a query's first
        self._log_of_old = -math.inf if self.mean_iterations <= 1 else math.log1p(
            -1 / self.mean_iterations)
        self._uneven = Unevenness(self._inputs, adjustment)
        self._lengthened: dict[WaaPlan, FloatArray] = {}
        self.split = cache(partial(WaaPlans, plans))  # of a tp_degree and tp_gpus, perhaps none
        self.kept: dict[Hashable, Any] = {}  # what bounds tabulate of a plan
        self._summed: dict[Hashable, tuple[FloatArray, FloatArray]] = {}
        self._tokens = KeptOfFixed()  # of batches, by share
        self._encode = cache(lambda share: StepColumns(partial(self._encode_s, share=share)))
        self._decode = StepColumns(self._decode_s)
        self._steps: dict[Hashable, FloatArray] = {}  # the last that were asked for
        self._handover = cache(lambda plan: HandoverCost(
            problem, timing, plan.encode.stages, plan.decode.stages))
        self.decode_table = cache(partial(DecodeTable, self))  # by plan
        self.single: Callable[[int], StagePlan] = cache(  # a group of a degree holds all layers
            lambda degree: plans.pool([problem.cluster.fastest_group(degree)], "both"))

    def encode_steps(self, plan: WaaPlan, batch: FloatArray, share: float = 1.0) -> FloatArray:
        """An encode step with `share` of the mean tokens takes such seconds [batches, stages]."""
        key = plan.encode, batch.tobytes() if len(batch) <= _FEW else b"", share
        found = self._steps.get(key)
        if found is None:
            found = self._encode(share).of_stages(plan.encode, batch)
            if key[1]:
                if len(self._steps) >= _STEPS_KEPT:
                    self._steps.clear()
                found.flags.writeable = False
                self._steps[key] = found
        return found

    def encode(self, plan: WaaPlan, batch: FloatArray) -> EncodeTimes:
        _, longest = self._slowest_and_through(plan, batch, 1 + self._adjustment)
        return EncodeTimes(self.between_s(plan, batch), longest, self.handover_s(plan, batch))

    def _slowest_and_through(self, plan: WaaPlan, batch: FloatArray,
                             share: float) -> tuple[FloatArray, FloatArray]:
        """[batches] seconds of the slowest stage's encode step, and through all. Of batches that
        nobody can change they are kept: many divisions have the same encode pool."""
        if not is_fixed(batch):
            steps = self.encode_steps(plan, batch, share)
            return steps.max(axis=1), steps.sum(axis=1)
        key = plan.encode, id(batch), share
        if key in self._summed:
            return self._summed[key]
        slowest, through = np.zeros((2, len(batch)))
        for number, seconds in zip(np.bincount(plan.encode.kinds.kind_of).tolist(),
                                   self._encode(share).of_kinds(plan.encode, batch), strict=True):
            slowest = np.maximum(slowest, seconds)
            through = through + number * seconds
        self._summed[key] = slowest, through
        return self._summed[key]

    def between_s(self, plan: WaaPlan, batch: FloatArray) -> FloatArray:
        """An encode step follows the one before it in such seconds [batches]: those of the slowest
        stage, or of the handover, and what uneven batches add."""
        slowest, _ = self._slowest_and_through(plan, batch, 1.0)
        return np.asarray(np.maximum(slowest, self.handover_s(plan, batch))
                          * self._uneven.interpolated(self._lengthened_of(plan), batch))

    def lengthen(self, plans: Sequence[WaaPlan]) -> None:
        """What uneven batches add is worked out for all these plans together: that is quicker than
        one by one, as they are asked for."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._lengthened]
        if new:
            self._lengthened.update(zip(new, self._uneven.lengthened(
                [self._uneven_pool(plan) for plan in new]), strict=True))

    def _lengthened_of(self, plan: WaaPlan) -> FloatArray:
        self.lengthen([plan])
        return self._lengthened[plan]

    def _uneven_pool(self, plan: WaaPlan) -> UnevenPool:
        few = self._uneven.batches
        steps = self.encode_steps(plan, few)
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            rises = 2 * (self.encode_steps(plan, few, 1.5) - steps)
        return UnevenPool(steps, rises, self.handover_s(plan, few))

    def handover_s(self, plan: WaaPlan, batch: FloatArray) -> FloatArray:
        """The queries that are not done with their first token are handed over in such seconds
        [batches]."""
        return self._handover(plan).seconds(batch * self._inputs.mean * self._decoding_share)

    def decode(self, plan: WaaPlan, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """A decode step of that many queries takes such seconds [rows] on the slowest stage, and
        through all."""
        seconds = self._decode.of_stages(plan.decode, rows)
        return seconds.max(axis=1), seconds.sum(axis=1)

    def _decode_s(self, times: StageTimes, rows: FloatArray) -> FloatArray:
        done = rows / max(self._flow.mean_iterations, 1.0)  # leave, and join, each iteration
        seconds = times.decode_s(rows, self._context(rows), moved=done * rows / (rows + done))
        if times.is_encoder_decoder:
            # few join in a step, if any: then the inputs of whole queries are projected. Each row
            # is in its first iteration, or is not
            happens = -np.expm1(rows * self._log_of_old)[..., None]
            tokens = done / happens[..., 0] * self._inputs.mean
            seconds = seconds + happens * times.cross_kv_s(tokens)
        return seconds

    def attention_s(self, pool: StagePlan, degree: int, rows: FloatArray) -> FloatArray:
        """One layer's attention takes such seconds [rows] in a decode step of so many queries, on
        a stage of that degree."""
        return np.asarray(pool.times.layers.decode_attention_s(rows, self._context(rows), degree))

    def encode_query_s(self, batch: FloatArray, degree: int, share: float = 1.0) -> FloatArray:
        """C_E is one query's encoding through all layers of a single group, in a batch with `share`
        of the mean tokens."""
        times = self.single(degree).times
        return np.asarray(self._encode_s(times, batch, share)[..., 0] / batch)

    def decode_query_s(self, rows: FloatArray, degree: int) -> FloatArray:
        """C_D is one query's decoding through all layers of a single group, in steps of `rows`."""
        times = self.single(degree).times
        seconds = times.decode_s(rows, self._context(rows))[..., 0]
        return np.asarray(seconds / rows * self.mean_iterations)

    def _encode_s(self, times: StageTimes, batch: FloatArray, share: float = 1.0) -> FloatArray:
        attention = {d: share * batch * own for d, own in times.mean_attention_s(batch).items()}
        tokens = self._tokens.of(share, batch, lambda: share * batch * self._inputs.mean)
        return times.encode_s(tokens, batch, attention)


class DecodeTable:
    """One decode pool's step times are tabulated over group sizes: the slowest stage's and the
    sum, at each node and to the next."""

    def __init__(self, times: PoolTimes, plan: WaaPlan) -> None:
        self._times, self._plan = times, plan
        self._nodes = np.empty((4, 0))

    def reaching(self, most_rows: float) -> FloatArray:
        """[4, sizes] the table, for groups of so many queries at most."""
        top = int(np.log(max(most_rows, 1.0)) / np.log(ROWS_RATIO)) + 2
        if top >= self._nodes.shape[1]:
            both = np.stack(self._times.decode(self._plan, group_sizes(many(top + _ROWS_SPARE))))
            with np.errstate(invalid="ignore"):  # from one refused size to the next
                self._nodes = np.concatenate([both, np.diff(both, append=np.inf)])
        return self._nodes


class Iterations:
    """T_iter of configurations of many plans."""

    def __init__(self, times: PoolTimes, divided: Divided, most: FloatArray) -> None:
        """`most`: no more queries than these [configs] are asked for."""
        self._groups = divided.configs.groups
        rows = np.maximum(most / self._groups, FULL)  # some groups may be empty below
        tables = [times.decode_table(plan).reaching(float(rows[own].max()))
                  for plan, own in divided.each()]
        begins = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
        self._nodes = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
        self._begin = begins[divided.which]

    def seconds(self, decoding: FloatArray) -> FloatArray:
        """T_iter is that of `decoding` queries in each one's groups; groups without a query take no
        step."""
        steps = busy_groups(decoding, self._groups)
        rows = np.maximum(decoding / steps, 1.0)
        position = np.log(rows) / np.log(ROWS_RATIO)
        index = position.astype(np.intp)
        position -= index
        index += self._begin
        slowest, through, slowest_rises, through_rises = self._nodes
        with np.errstate(invalid="ignore"):
            slowest = slowest.take(index) + position * slowest_rises.take(index)
            through = through.take(index) + position * through_rises.take(index)
        return np.asarray(np.maximum(steps * slowest, through))

    def busy_share(self, decoding: FloatArray) -> FloatArray:
        """The slowest stage works in such a share of the time [configs] where each of `decoding`
        queries has a group of its own; 0 where they are more than groups."""
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            share = decoding * self._nodes[0].take(self._begin) / self.seconds(decoding)
        return np.where((decoding <= self._groups) & np.isfinite(share), share, 0.0)


class PoolRates(NamedTuple):
    """The pools keep such rates [configs]; times are infinite where a size is refused."""

    throughput_qps: FloatArray
    decode_batch: FloatArray
    iteration_s: FloatArray  # T_iter
    encode_s: FloatArray  # a batch's time through the encode pool
    handover_s: FloatArray  # and until they are taken up
    present: FloatArray  # queries in the system


def pool_rates(times: PoolTimes, divided: Divided, mean_outputs: float) -> PoolRates:
    """The rates of configurations follow from the fixed point; `mean_outputs` is E[S]."""
    batch = divided.configs.batch

    def encoding(plan: WaaPlan, rows: slice) -> tuple[FloatArray, ...]:
        steps = times.encode_steps(plan, batch[rows])  # [configs, stages]
        return (steps.max(axis=1), steps.sum(axis=1), steps[:, 0],
                np.full(len(steps), float(steps.shape[1])), times.handover_s(plan, batch[rows]),
                times.between_s(plan, batch[rows]))

    slowest, through, first, stages, handover, paced = divided.gathered(encoding)
    slowest = np.maximum(slowest, handover)
    most = batch * mean_outputs
    iterations = Iterations(times, divided, most)
    of_most = iterations.seconds(most)
    is_timed = np.isfinite(slowest) & np.isfinite(of_most)
    between = np.where(is_timed, paced, 1.0)

    def lacking(decoding: FloatArray, iteration_s: FloatArray) -> FloatArray:
        return batch / between * times.mean_iterations * np.where(
            is_timed, iteration_s, 1.0) - decoding

    of_most = lacking(most, of_most)
    is_throttled = of_most >= 0
    decoding = root(lambda size: lacking(size, iterations.seconds(size)), most,
                    np.minimum(of_most, 0.0))
    iteration = iterations.seconds(decoding)
    rate = np.where(is_throttled, decoding / (times.mean_iterations * np.where(
        is_timed, iteration, 1.0)), batch / between)
    # where a later stage or the link is slowest, as many steps are under way as there may be
    queued = np.where(first >= slowest * (1 - 1e-9), through, (stages + 2) * slowest - handover)
    encode = np.where(is_throttled, through, np.maximum(queued, through))
    slack = batch + DEVIATIONS * np.sqrt(np.maximum(decoding, 1.0))
    if times.mean_iterations < FEW_ITERATIONS:
        before_decode = np.minimum(0.5 * waiting(iterations.busy_share(decoding)),
                                   _MOST_WAITING * decoding)
        slack = np.where(is_throttled, np.minimum(slack, (
            0.5 * batch + waiting(rate * between / batch) + before_decode)), slack)
        handed = handover + np.where(is_throttled & (rate > 0), before_decode / np.where(
            rate > 0, rate, 1.0), 0.0)
    else:
        slack, handed = np.where(is_throttled, 0.5 * batch, slack), handover
    away = rate * (encode + handover + 0.5 * np.where(is_timed, iteration, 0.0))
    return PoolRates(
        throughput_qps=np.where(is_timed, rate, 0.0), decode_batch=decoding,
        iteration_s=np.where(is_timed, iteration, np.inf),
        encode_s=np.where(is_timed, encode, np.inf), handover_s=handed,
        present=np.ceil(np.where(is_timed, decoding + away + slack, most)))


def waiting(busy: FloatArray) -> FloatArray:
    """So many queries wait in the mean for a pool that works in this share of the time, where
    they come at random and it takes the same time with each (Pollaczek and Khinchine)."""
    share = np.minimum(busy, 1 - _ROOT_ACCURACY)
    return np.asarray(share**2 / (2 * (1 - share)))


def root(excess: Callable[[FloatArray], FloatArray], high: FloatArray,
         of_high: FloatArray, accuracy: float = _ROOT_ACCURACY) -> FloatArray:
    """The root is where `excess`, positive at 0, falls through 0 on the way to `high`, where it is
    `of_high`; `high` itself where that is 0. The Illinois method: a secant within a bracket."""
    is_open, low = of_high < 0, np.zeros_like(high)
    if not is_open.any():
        return high
    of_low, between = np.maximum(excess(low), np.finfo(float).tiny), high
    was_above = was_below = np.zeros(high.shape, bool)
    for _ in range(_ROOT_STEPS):
        between = high + (high - low) * of_high / (of_low - of_high)
        of_between = excess(between)
        is_open = is_open & (np.abs(of_between) > accuracy * between)
        if not is_open.any():
            break
        is_above, is_below = is_open & (of_between < 0), is_open & (of_between >= 0)
        # an end that stays twice counts as half, or the secant would only creep towards it
        of_low = np.where(is_below, of_between, np.where(is_above & was_above, 0.5, 1.0) * of_low)
        of_high = np.where(is_above, of_between, np.where(is_below & was_below, 0.5, 1.0) * of_high)
        low, high = np.where(is_below, between, low), np.where(is_above, between, high)
        was_above, was_below = is_above, is_below
    return between


_latest: list[tuple[PlanSource, float, PoolTimes]] = []
_MOST_KEPT = 2
