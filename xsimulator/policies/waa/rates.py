"""Where WAA's two pools meet: throughput and decode batch (waa.closed_form has the equations)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan
from xsimulator.policies.waa.pool_times import PoolTimes

_ROOT_STEPS = 100  # to the decode batch at most; 6 to 10 are usual
_ROOT_ACCURACY = 1e-12  # of the decode batch that is wanted
_DEVIATIONS = 3.0  # of the number in the system, where the encode pool sets the pace


class PoolRates(NamedTuple):
    """The pools keep such rates [configs]; times are infinite where a size is refused."""

    throughput_qps: FloatArray
    decode_batch: FloatArray
    iteration_s: FloatArray  # T_iter
    encode_s: FloatArray  # a batch's time through the encode pool
    handover_s: FloatArray
    present: FloatArray  # queries in the system


def pool_rates(times: PoolTimes, plan: WaaPlan, configs: WaaConfigs,
               mean_outputs: float) -> PoolRates:
    """The rates of configurations of one plan follow from the fixed point; `mean_outputs` is
    E[S]."""
    batch, groups = configs.batch, configs.groups
    steps = times.encode_steps(plan, batch)  # [configs, stages]
    handover = times.handover_s(plan, batch)
    slowest = np.maximum(steps.max(axis=1), handover)
    table = times.decode_table(plan)
    most = batch * mean_outputs
    is_timed = np.isfinite(slowest) & np.isfinite(table.iteration_s(most, groups))
    between = np.where(is_timed, slowest, 1.0)

    def wanted(decoding: FloatArray) -> FloatArray:
        return batch / between * times.mean_iterations * np.where(
            is_timed, table.iteration_s(decoding, groups), 1.0)

    of_most = wanted(most) - most
    is_throttled = of_most >= 0
    decoding = root(lambda size: wanted(size) - size, most, np.minimum(of_most, 0.0))
    iteration = table.iteration_s(decoding, groups)
    rate = np.where(is_throttled, decoding / (times.mean_iterations * np.where(
        is_timed, iteration, 1.0)), batch / between)
    # where a later stage or the link is slowest, as many steps are under way as there may be
    through = steps.sum(axis=1)
    queued = np.where(steps[:, 0] >= slowest * (1 - 1e-9), through,
                      (steps.shape[1] + 2) * slowest - handover)
    encode = np.where(is_throttled, through, np.maximum(queued, through))
    slack = np.where(is_throttled, 0.5 * batch,
                     batch + _DEVIATIONS * np.sqrt(np.maximum(decoding, 1.0)))
    away = rate * (encode + handover + 0.5 * np.where(is_timed, iteration, 0.0))
    return PoolRates(
        throughput_qps=np.where(is_timed, rate, 0.0), decode_batch=decoding,
        iteration_s=np.where(is_timed, iteration, np.inf),
        encode_s=np.where(is_timed, encode, np.inf), handover_s=handover,
        present=np.ceil(np.where(is_timed, decoding + away + slack, most)))


def root(excess: Callable[[FloatArray], FloatArray], high: FloatArray,
         of_high: FloatArray) -> FloatArray:
    """The root is where `excess`, positive at 0, falls through 0 on the way to `high`, where it is
    `of_high`; `high` itself where that is 0. The Illinois method: a secant within a bracket."""
    is_open, low = of_high < 0, np.zeros_like(high)
    of_low, between = np.maximum(excess(low), np.finfo(float).tiny), high
    was_above = was_below = np.zeros(high.shape, bool)
    for _ in range(_ROOT_STEPS):
        between = high + (high - low) * of_high / (of_low - of_high)
        of_between = excess(between)
        is_open = is_open & (np.abs(of_between) > _ROOT_ACCURACY * between)
        if not is_open.any():
            break
        is_above, is_below = is_open & (of_between < 0), is_open & (of_between >= 0)
        # an end that stays twice counts as half, or the secant would only creep towards it
        of_low = np.where(is_below, of_between, np.where(is_above & was_above, 0.5, 1.0) * of_low)
        of_high = np.where(is_above, of_between, np.where(is_below & was_below, 0.5, 1.0) * of_high)
        low, high = np.where(is_below, between, low), np.where(is_above, between, high)
        was_above, was_below = is_above, is_below
    return between
