"""Input of a replica for the native replays (csrc/replay/replay.cpp): what csrc reads of rules,
clocks and requests."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.controls import ADMISSION_RULES
from xgpt.core.lengths import BoolArray, IntArray
from xrunner.rules.forecast import Forecaster, LengthForecaster
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import ENCODINGS, PagedRule
from xrunner.rules.room import Caps, Rooms, Waiting
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import SlotUse
from xrunner.rules.static import StaticRule
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator.addresses import address_of
from xsimulator.native import NativeTables
from xsimulator.replay.pool import HandoverPlan, PoolPlan, ReplicaPlan
from xsimulator.replay.queries import ReplayJob
from xsimulator.replay.step_clock import (
    ROW_BLOCK,
    PoolClock,
    ScaledClock,
    StepClock,
    handover_table,
)

_PAGED, _RESERVED, _STATIC, _HANDED = range(4)  # kinds, as in csrc/replay/replay.cpp
WITH_ROOMS = PagedRule, OrcaRule, RraRule
_NO_PREFIXES: IntArray = np.zeros(4, np.int64)


class RuleInput(NamedTuple):
    """Input for csrc from a rule: `kind`, integer `facts`, `figures`, [requests] tokens that each
    reserves, further arrays, and [requests] which of them can never fit. `order`: [requests] in the
    order in which they stand in line, if that is not by arrival. `is_alone`: whether it knows
    of a single replica only."""

    kind: int
    facts: Sequence[int]
    figures: Sequence[float]
    reserves: IntArray
    others: Sequence[NDArray[Any]]
    never_fit: BoolArray
    order: IntArray | None = None
    is_alone: bool = False


class ReplicaInput(NamedTuple):
    """Input of a replica for csrc: arrays at `addresses`, and the tables that it fetches blocks
    of."""

    data: RuleInput
    addresses: NDArray[Any]
    read: Sequence[NDArray[Any]]
    fetched: Sequence[NativeTables]


def replica_input(job: ReplayJob, plan: ReplicaPlan, has_steps: bool) -> ReplicaInput | None:
    """Input for a replica; None for rules or clocks that csrc does not know."""
    pools, handovers, data = plan.pools, plan.handovers, None
    timed = [_clock_of(pool.clock, len(pool.stages)) for pool in pools]
    if None not in timed and (len(pools), len(handovers)) == (1, 0):
        data = _one_pool_input(job, pools[0])
    elif None not in timed and (len(pools), len(handovers)) == (2, 1):
        data = _two_pool_input(job, pools[0], pools[1], handovers[0])
    if data is None:
        return None
    clocks = [one[0].native for one in timed if one is not None]
    factors = [factor for one in timed if one is not None for factor in one[1]]
    fetched = [clock.fetched for clock in clocks]
    facts = [job.gives_token, pools[-1].rule.slot_use is SlotUse.COMPACTED, has_steps, *data.facts]
    read: list[NDArray[Any]] = [
        np.array(facts, np.int64), np.array(data.figures, float), np.array(factors, float),
        *(np.ascontiguousarray(one, np.int64) for one in (job.lengths.inputs, data.reserves)),
        *data.others]
    addresses = [clocks[0].address, *map(address_of, read)]
    if handovers:
        fetched.append(handovers[0].table or handover_table(handovers[0].seconds))
        function = ctypes.cast(fetched[-1].function, ctypes.c_void_p).value or 0
        addresses += [clocks[1].address, function]
    return ReplicaInput(data, np.array(addresses), read, fetched)


def _clock_of(clock: PoolClock, num_stages: int) -> tuple[StepClock, Sequence[float]] | None:
    """(clock that csrc can read, [stages] factors on its seconds); None for other clocks."""
    own, factors = (clock.clock, clock.factors) if isinstance(clock, ScaledClock) else (
        clock, (1.0,) * num_stages)
    return (own, factors) if type(own) is StepClock else None


def _one_pool_input(job: ReplayJob, plan: PoolPlan) -> RuleInput | None:
    """Input for a single pool; None for other rules, and for those that look at all requests while
    some are still to arrive."""
    rule, lengths, arrival_s = plan.rule, job.lengths, job.arrival_s
    if plan.role != "both" or not len(arrival_s):
        return None
    are_together = bool((arrival_s == arrival_s[0]).all())
    if type(rule) is StaticRule and not rule.waiting and not rule.evicts and (
            rule.former is None or are_together):
        outputs, order, ends = _formed(rule, job)
        return RuleInput(
            _STATIC, [rule.num_groups, rule.group_kv_tokens,
                      rule.encode_micro_batches // rule.num_groups], [], outputs, [ends],
            lengths.reserves > rule.group_kv_tokens, order, order is not None)
    if not isinstance(rule, WITH_ROOMS) or rule.waiting or not (
            are_together or not rule.rooms.prefixes.is_shared):
        return None
    if type(rule) is PagedRule:
        return _of_rooms(job, rule.rooms, rule.slots, _PAGED, [
            rule.token_budget, ENCODINGS.index(rule.encoding), rule.light_steps])
    if type(rule) is OrcaRule:
        return _of_rooms(job, rule.rooms, rule.slots, _RESERVED, [0, 0, 0], [0.0, 0.0, 0.0])
    if type(rule) is RraRule and not rule.changes:
        controls, sizer = rule.controls, rule.sizer
        return _of_rooms(
            job, rule.rooms, [controls.group_max_active] * rule.num_groups, _RESERVED,
            [controls.decode_iterations, controls.encode_batch, controls.encode_chunk],
            [sizer.mean_input, sizer.adjustment, controls.target_active])
    return None


def _of_rooms(job: ReplayJob, rooms: Rooms, slots: Sequence[int], kind: int, facts: Sequence[int],
              figures: Sequence[float] = ()) -> RuleInput | None:
    """Input for a pool whose groups have rooms; None for forecasts that csrc does not know. slots:
    most requests of each group. facts, figures: of its rule."""
    room, lengths, groups = rooms.of_group[0], job.lengths, len(rooms.of_group)
    forecasts, forest = _forecasts(job, room.forecaster), lengths.prefixes
    if forecasts is None or (rooms.prefixes.is_shared and forest is None):
        return None
    terms = [groups, room.tokens, ADMISSION_RULES.index(room.rule), room.after_free,
             room.evicts, room.unit, room.spare, forecasts[-1].shape[1]]
    reserves, most, arrays = lengths.reserves, np.array(room.tokens), [_NO_PREFIXES]
    needed: IntArray = np.maximum(reserves, lengths.inputs)
    if rooms.prefixes.is_shared and forest is not None:
        tokens, shared = rooms.budget.tokens, forest.shared
        fits = needed - shared <= (tokens - shared) // groups // room.unit * room.unit
        shared = shared * fits
        reserves, needed, most = reserves - shared, needed - shared, (tokens - shared) // groups
        arrays = [np.array([len(forest.ends), forest.block_tokens, forest.is_whole, tokens]),
                  *(np.ascontiguousarray(one, np.int64) for one in (
                      lengths.inputs - shared, forest.parents, forest.ends, forest.own_tokens,
                      np.where(fits, forest.nodes, -1)))]
    return RuleInput(kind, [*terms, *facts], figures, reserves,
                        [np.array(slots, np.int64), *forecasts, *arrays],
                        needed > most // room.unit * room.unit, is_alone=rooms.prefixes.is_shared)


def _forecasts(job: ReplayJob, forecaster: Forecaster) -> Sequence[IntArray] | None:
    """([requests] output tokens forecast, [requests] range of inputs, [ranges, tokens written] new
    forecasts); None for other forecasters than xgpt's, and those that learn."""
    lengths = job.lengths
    first, ranges = lengths.reserves - lengths.inputs, np.zeros(len(lengths.inputs), np.int64)
    beyond = np.zeros((1, 0), np.int64)
    if type(forecaster) is LengthForecaster and not forecaster.learns:
        if job.forecasts is None:
            first = np.array([*map(forecaster.first, lengths.inputs.tolist(), first.tolist())])
        ranges, beyond = forecaster.bins_of(lengths.inputs), forecaster.beyond_table
    elif type(forecaster) is not Caps:
        return None
    if job.forecasts is not None:
        first = np.where(job.forecasts > 0, job.forecasts, first)
    return first, ranges, np.ascontiguousarray(beyond)


def _formed(rule: StaticRule, job: ReplayJob) -> tuple[IntArray, IntArray | None, IntArray]:
    """[requests] (output tokens that batches count with; requests in the order of batches, None: by
    arrival; end of the batch that begins at each place)."""
    lengths = job.lengths
    places, outputs = np.arange(len(lengths.inputs)), lengths.most_outputs
    if rule.former is None:
        return outputs, None, places + rule.encode_batch
    if job.forecasts is not None:
        outputs = job.forecasts
    waiting = [Waiting(query, reserve, tokens, 0, forecast) for query, (reserve, tokens, forecast)
               in enumerate(zip(lengths.reserves.tolist(), lengths.inputs.tolist(),
                                outputs.tolist(), strict=True))]
    rule.former.note(int(lengths.inputs.max()), int(lengths.most_outputs.max()))
    line = rule.former.line(waiting)
    ends, begin = places + 1, 0
    while begin < len(line):
        ends[begin] = begin = rule.former.take(line, begin)
    return outputs, np.array([one.query for one in line]), ends


def _two_pool_input(job: ReplayJob, source: PoolPlan, target: PoolPlan,
                    link: HandoverPlan) -> RuleInput | None:
    """Input for WAA's two pools; None for other rules."""
    encode, decode, lengths = source.rule, target.rule, job.lengths
    if (type(encode) is not WaaEncodeRule or type(decode) is not WaaDecodeRule
            or (source.name, target.name) != (link.source, link.target)
            or (source.role, target.role) != ("encode", "decode") or not len(job.arrival_s)
            or link.release != encode.release or encode.waiting
            or (encode.limits.stock_tokens and decode.inputs is None)):
        return None
    never_fit = (lengths.reserves > encode.kv_tokens) | (lengths.inputs > encode.encode_kv_tokens)
    limits, sizer, chunks = encode.limits, encode.sizer, decode.inputs
    room = decode.rooms.of_group[0]
    return RuleInput(
        _HANDED, [encode.num_groups, decode.num_groups, limits.encode_batch, limits.max_in_system,
                  encode.kv_tokens, encode.encode_kv_tokens, limits.planned_active,
                  limits.stock_tokens,
                  decode.group_max_active, 0 if chunks is None else chunks.limit,
                  0 if decode.planned == math.inf else int(decode.planned), ROW_BLOCK,
                  ADMISSION_RULES.index(room.rule), room.after_free],
        [sizer.mean_input, sizer.adjustment, limits.target_active], lengths.reserves, [],
        never_fit)
