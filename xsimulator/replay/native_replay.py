"""Replays by csrc/replay/replay.cpp, of one pool or of WAA's two pools. Decisions and times equal
those of the rules (xrunner.rules) and of the event kernel to the bit. Steps are made into Python
objects only when they are read."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from xgpt.core.controls import ADMISSION_RULES
from xgpt.core.errors import XgptError
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import QueryTimes
from xrunner.rules.forecast import Forecaster, LengthForecaster
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import ENCODINGS, PagedRule
from xrunner.rules.room import Caps, Rooms, Waiting
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import SlotUse
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import BatchingRule, Chunk, Start, Step, StepKind
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator.addresses import address_of
from xsimulator.native import TELL, Native, native
from xsimulator.replay.pipeline import StepTimes
from xsimulator.replay.pool import HandoverPlan, PoolPlan, records_of
from xsimulator.replay.queries import ReplayJob
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult
from xsimulator.replay.step_clock import (
    ROW_BLOCK,
    PoolClock,
    ScaledClock,
    StepClock,
    handover_table,
)

_PAGED, _RESERVED, _STATIC, _HANDED = range(4)  # kinds, as in csrc/replay/replay.cpp
_WITH_ROOMS = PagedRule, OrcaRule, RraRule
_KINDS = (StepKind.ENCODE, StepKind.DECODE, StepKind.MIXED)
_NO_PREFIXES: IntArray = np.zeros(4, np.int64)
_POOL = [np.int64] * 6 + [np.float64] * 4  # types of the arrays of one pool


class _NativeInput(NamedTuple):
    """Input for csrc from a rule: `kind`, integer `facts`, `figures`, [requests] tokens that each
    reserves, further arrays, [requests] which of them can never fit, and [requests] in the order in
    which they stand in line, if that is not by arrival."""

    kind: int
    facts: Sequence[int]
    figures: Sequence[float]
    reserves: IntArray
    others: Sequence[NDArray[Any]]
    never_fit: BoolArray
    order: IntArray | None = None


def replay_natively(job: ReplayJob, pools: Sequence[PoolPlan],
                    handovers: Sequence[HandoverPlan] = (), *, has_steps: bool = True,
                    ) -> NativeReplay | None:
    """The replay of xsimulator.replay.event_replay.run by the native library; None without the
    library, for other rules or clocks, or if a step has no known time. has_steps: whether steps are
    kept. Raises XgptError for a request that can never fit."""
    library = native()
    timed = [_clock_of(plan.clock, len(plan.stages)) for plan in pools]
    if library is None or None in timed:
        return None
    data = None
    if (len(pools), len(handovers)) == (1, 0):
        data = _one_pool_input(job, pools[0])
    elif (len(pools), len(handovers)) == (2, 1):
        data = _two_pool_input(job, pools[0], pools[1], handovers[0])
    if data is None:
        return None
    order = np.argsort(job.arrival_s, kind="stable")
    if data.never_fit.any():
        raise never_fits(job, int(order[data.never_fit[order]][0]))
    clocks = [one[0].native for one in timed if one is not None]
    factors = [factor for one in timed if one is not None for factor in one[1]]
    facts = [len(job.arrival_s), job.gives_token,
             pools[-1].rule.slot_use is SlotUse.COMPACTED, has_steps, *data.facts]
    fetched = [clock.fetched for clock in clocks]
    read: list[NDArray[Any]] = [
        np.array(facts, np.int64), np.array(data.figures, float),
        np.array(factors, float), *(np.ascontiguousarray(one, np.int64) for one in (
            job.lengths.inputs, data.reserves, job.left,
            order if data.order is None else data.order)),
        np.ascontiguousarray(job.arrival_s), *data.others]
    addresses = [clocks[0].address, *map(address_of, read)]
    if handovers:
        link = handovers[0]
        fetched.append(link.table or handover_table(link.seconds))
        function = ctypes.cast(fetched[-1].function, ctypes.c_void_p).value or 0
        addresses += [clocks[1].address, function]
    times = np.empty(3 * len(job.arrival_s) + 1)
    with library.replaying:
        found = library.replayed(data.kind, address_of(np.array(addresses)), address_of(times))
    if found is None:
        for one in fetched:
            one.raise_failure()
        return None
    assert has_steps or not np.isnan(times).any(), "requests have nothing to do"
    return NativeReplay(library, found, job, pools, handovers if has_steps else None, times)


class NativeReplay:
    """A finished native replay. times: arrival, start, first and last token of each request."""

    def __init__(self, library: Native, found: int, job: ReplayJob, pools: Sequence[PoolPlan],
                 handovers: Sequence[HandoverPlan] | None, times: FloatArray) -> None:
        """handovers: None if steps were not kept."""
        self._library, self._found, self._pools, self._links = library, found, pools, handovers
        self._asked, self._preemptions = job, int(times[-1])
        start_s, first_s, last_s = times[:-1].reshape(3, -1)
        self.times = QueryTimes(arrival_s=job.arrival_s, start_s=start_s, first_token_s=first_s,
                                last_token_s=last_s)
        finalize(self, library.forget, found)

    def busy_s(self, begin_s: float, end_s: float) -> FloatArray:
        """[stages of all pools] seconds at work within the window."""
        busy = np.empty(sum(len(plan.stages) for plan in self._pools))
        self._library.busy(self._found, begin_s, end_s, address_of(busy))
        return busy

    def result(self) -> ReplayResult:
        """The result; without pools and handovers if steps were not kept."""
        pools, links = ((), ()) if self._links is None else self._read(self._links)
        outputs = self._asked.lengths.outputs
        assert outputs is not None
        return ReplayResult(pools=pools, handovers=links, times=self.times, output_tokens=outputs,
                            preemptions=self._preemptions)

    def _read(self, handovers: Sequence[HandoverPlan],
              ) -> tuple[tuple[PoolRecords, ...], tuple[HandoverRecords, ...]]:
        copied: list[bytes] = []
        self._library.tell(self._found, TELL(
            lambda place, size: copied.append(ctypes.string_at(place, size) if size else b"")))
        kinds = [*_POOL * len(self._pools), np.float64]
        arrays: list[NDArray[Any]] = [np.frombuffer(one, kind)
                                      for one, kind in zip(copied, kinds, strict=True)]
        sent, size = arrays[-1].reshape(-1, 3), len(_POOL)
        return tuple(_records(plan, *arrays[size * place:size * (place + 1)])
                     for place, plan in enumerate(self._pools)), tuple(
            HandoverRecords(source=link.source, target=link.target,
                            step=sent[:, 0].astype(np.int64), start_s=sent[:, 1],
                            end_s=sent[:, 2]) for link in handovers)


def _clock_of(clock: PoolClock, num_stages: int) -> tuple[StepClock, Sequence[float]] | None:
    """(clock that csrc can read, [stages] factors on its seconds); None for other clocks."""
    own, factors = (clock.clock, clock.factors) if isinstance(clock, ScaledClock) else (
        clock, (1.0,) * num_stages)
    return (own, factors) if type(own) is StepClock else None


def _one_pool_input(job: ReplayJob, plan: PoolPlan) -> _NativeInput | None:
    """Input for a single pool; None for other rules, and for those that look at all requests while
    some are still to arrive."""
    rule, lengths, arrival_s = plan.rule, job.lengths, job.arrival_s
    if plan.role != "both" or not len(arrival_s):
        return None
    are_together = bool((arrival_s == arrival_s[0]).all())
    if type(rule) is StaticRule and not rule.waiting and not rule.evicts and (
            rule.former is None or are_together):
        outputs, order, ends = _formed(rule, job)
        return _NativeInput(
            _STATIC, [rule.num_groups, rule.group_kv_tokens,
                      rule.encode_micro_batches // rule.num_groups], [], outputs, [ends],
            lengths.reserves > rule.group_kv_tokens, order)
    if not isinstance(rule, _WITH_ROOMS) or rule.waiting or not (
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
              figures: Sequence[float] = ()) -> _NativeInput | None:
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
    return _NativeInput(kind, [*terms, *facts], figures, reserves,
                        [np.array(slots, np.int64), *forecasts, *arrays],
                        needed > most // room.unit * room.unit)


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
                    link: HandoverPlan) -> _NativeInput | None:
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
    return _NativeInput(
        _HANDED, [encode.num_groups, decode.num_groups, limits.encode_batch, limits.max_in_system,
                  encode.kv_tokens, encode.encode_kv_tokens, limits.planned_active,
                  limits.stock_tokens,
                  decode.group_max_active, 0 if chunks is None else chunks.limit,
                  0 if decode.planned == math.inf else int(decode.planned), ROW_BLOCK,
                  ADMISSION_RULES.index(room.rule), room.after_free],
        [sizer.mean_input, sizer.adjustment, limits.target_active], lengths.reserves, [],
        never_fit)


def _records(plan: PoolPlan, *arrays: NDArray[Any]) -> PoolRecords:
    labels, chunks, ended, moved, held, shared, memory_s, sizes, *times = arrays
    steps = _NativeSteps(labels.reshape(-1, 7), chunks.reshape(-1, 3), ended, moved,
                         shared.reshape(-1, 4), plan.rule)
    durations_s, end_s = (one.reshape(-1, len(plan.stages)) for one in times)
    return records_of(plan, StepTimes(steps, sizes.reshape(-1, 4), durations_s, end_s),
                      memory_s.tolist(), held.tolist())


class _NativeSteps(Sequence[Step]):
    """Steps of a pool from the arrays of csrc/replay/pool_replay.h."""

    def __init__(self, labels: IntArray, chunks: IntArray, ended: IntArray, moved: IntArray,
                 shared: IntArray, rule: BatchingRule) -> None:
        self._arrays, self._shared = (labels, chunks, ended, moved), shared
        self._moved = "handed" if type(rule) is WaaDecodeRule else "evicted"
        self._is_chunked = (
            type(rule) is WaaDecodeRule or (type(rule) is PagedRule and rule.encoding == "chunks")
            or (type(rule) is RraRule and rule.controls.encode_chunk > 0)
            or (isinstance(rule, _WITH_ROOMS) and rule.rooms.prefixes.is_shared))

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._steps == list(other)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        return self._steps[index]

    @cached_property
    def _steps(self) -> list[Step]:
        labels, *others = self._arrays
        chunks, ended, moved = (iter(one.tolist()) for one in others)
        steps, (starts, released) = list[Step](), self._of_prefixes()
        for kind, group, phase, iteration, parts, moving, joined in labels.tolist():
            spans = tuple(Chunk(query=query, first=first, tokens=tokens)
                          for query, first, tokens in (next(chunks) for _ in range(parts)))
            steps.append(Step(
                kind=_KINDS[kind], group=group, phase=phase, iteration=iteration,
                chunks=spans if self._is_chunked else (),
                joined=tuple(next(ended) for _ in range(joined)),
                starts=tuple(starts.get(len(steps), ())),
                released=tuple(released.get(len(steps), ())),
                **{self._moved: tuple(next(moved) for _ in range(moving))}))
        return steps

    def _of_prefixes(self) -> tuple[dict[int, list[Start]], dict[int, list[int]]]:
        """(Step.starts, Step.released) by the number of the step."""
        starts, released = defaultdict[int, list[Start]](list), defaultdict[int, list[int]](list)
        for step, query, node, tokens in self._shared.tolist():
            if query < 0:
                released[step].append(node)
            elif starts[step] and starts[step][-1].query == query:  # it writes this one
                start = starts[step].pop()
                starts[step].append(start._replace(writes=(*start.writes, (node, tokens))))
            else:
                starts[step].append(Start(query, tokens, node))
        return starts, released


def never_fits(job: ReplayJob, query: int) -> XgptError:
    """The error about a request that the schedule's KV budget can never hold."""
    return XgptError(f"request {query} reserves {job.lengths.reserves[query]} tokens of KV cache: "
                     "more than the schedule gives one micro-batch")
