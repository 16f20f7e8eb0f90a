"""RRA's points and bounds by csrc/planning_rra.cpp: all plans of a call at once, without the dozens
of arrays that each of its steps is as many calls for. Figures agree with those by arrays within
1e-12 of them (exponentials are the C library's), which the bounds' tolerances, a thousandth at
least, leave far behind; where a table of step times does not answer, arrays do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator import memory
from xsimulator.envelope import PairEnvelope
from xsimulator.layer_times import TOGETHER, LayerTimes
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.native import Native
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.rra.phases import NEGLIGIBLE
from xsimulator.step_table import SizeTable, StepTable

if TYPE_CHECKING:
    from xsimulator.policies.rra.chunk_bounds import RateRanges
    from xsimulator.policies.rra.closed_form import Rra
    from xsimulator.policies.rra.least_steps import LeastSteps

_MOST_DEGREES, _TOLERANCES = 16, 6


class Of(IntEnum):
    """What is asked for, as in csrc/planning_rra.cpp."""

    POINT = 0
    RATE = 1
    LINE_RATE = 2
    LATENCY = 3
    LINE_LATENCY = 4
    TTFT = 5
    TPOT = 6


OF_METRIC: dict[Metric, Of] = {"latency": Of.LATENCY, "ttft": Of.TTFT, "tpot": Of.TPOT}


PlanRows = list[tuple[StagePlan, slice]]  # plans, and the rows of each


class _Described(NamedTuple):
    """A table of steps as the C structure Plan; `held`: what it points to."""

    words: IntArray
    held: list[Any]
    nodes: tuple[FloatArray, ...]  # of its tables, which are made anew to grow


class _Call(NamedTuple):
    """Configurations by plan, in falling order of their blocks within each."""

    order: IntArray
    plans: PlanRows
    column: IntArray
    begin: IntArray
    total: int
    groups: FloatArray
    batch: FloatArray
    held: list[Any]


class _Loaded(NamedTuple):
    """What decodes and is encoded: [2, blocks of all], [blocks of all], [configs]."""

    words: IntArray
    table: IntArray
    facts: FloatArray
    queries: FloatArray
    context: FloatArray
    rows: FloatArray
    tokens: FloatArray  # [2, configs]
    encoded: FloatArray
    most: FloatArray  # queries


class NativeRra:
    """For one Rra."""

    def __init__(self, rra: Rra, native: Native) -> None:
        self._rra, library = rra, native.library
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._loads, self._figures = library.xgpt_rra_loads, library.xgpt_rra_figures
        self._held, self._room = library.xgpt_rra_held, library.xgpt_rra_room
        self._loads.argtypes = [*[address] * 3, number, number, address, number, *[address] * 3]
        self._figures.argtypes = [*[address] * 8, *[number] * 4, address, address]
        self._held.argtypes = [*[address] * 5, number, address]
        self._room.argtypes = [*[address] * 4, number, number, address]
        self._chunks = library.xgpt_rra_chunks
        self._chunks.argtypes = [*[address] * 5, number, number, *[ctypes.c_double] * 2,
                                 address, address]
        for function in (self._chunks, self._loads, self._figures, self._held, self._room):
            function.restype = None
        self._slots: dict[int, int] = {}  # of degrees
        self._described: dict[int, _Described] = {}
        self._memory: dict[int, tuple[IntArray, list[Any]]] = {}
        self._shares = np.zeros((_MOST_DEGREES, 3, len(TOGETHER)))
        self._plan_of: dict[int, StagePlan] = {}
        tokens = rra.encode_tokens
        self._facts: FloatArray = np.array([
            tokens.mean, tokens.std, rra.adjustment, LEAST_ADJUSTED, rra.flow.mean_iterations,
            rra.seen_iterations, rra.flow.largest_context, NEGLIGIBLE])
        self._no_tolerances: FloatArray = np.zeros(_TOLERANCES)

    def points(self, configs: RraConfigs) -> tuple[FloatArray, FloatArray, BoolArray]:
        """([6, configs] period_s, latency_s, encoded_s, the first iteration's end, encode_s, 1
        where the source answered for all; [3, configs] the most tokens and queries of a group that
        encodes, and queries of one that decodes; whether the figures are sure)."""
        call = self._called(configs)
        loaded = self._loaded(call, configs, self._no_tolerances, is_bound=False)
        found, is_sure = self._found(Of.POINT, call, loaded, None, None)
        sizes = np.stack([loaded.tokens[0], loaded.encoded, loaded.most])
        return found, _in_order(sizes, call.order), is_sure

    def bounds(self, of: Of, least: LeastSteps, tolerances: FloatArray, corners: RraConfigs, *,
               smallest: IntArray | None = None, largest: IntArray | None = None,
               other: IntArray | None = None) -> tuple[FloatArray, BoolArray]:
        """([boxes] as RraBounds has it, whether these are sure). `tolerances`: what a step of a
        group with a query for certain may be off, then those of rra.bounds; `other`: the other end
        of the boxes' N_D, of ranges."""
        call = self._called(corners)
        loaded = self._loaded(call, corners, tolerances, is_bound=True, largest=largest,
                              other=other)
        if self._rra.blocks.is_padded and smallest is not None and other is None:
            # the smallest batches' contexts count
            small = self._loaded(call._replace(batch=smallest[call.order].astype(float)), corners,
                                 tolerances, is_bound=True)
            loaded = loaded._replace(context=small.context)
        found, is_sure = self._found(of, call, loaded, least, other)
        return found[0], is_sure

    def held(self, configs: RraConfigs) -> tuple[FloatArray, IntArray]:
        """([3, configs] tokens of KV, bytes on the fullest rank, queries present; columns)."""
        call = self._called(configs)
        count = len(configs)
        found = np.empty((3, count))
        room, _kept = self._room_facts()
        pointers = self._memories(call)
        self._held(room.ctypes.data, pointers.ctypes.data, call.column.ctypes.data,
                   call.groups.ctypes.data, call.batch.ctypes.data, count, found.ctypes.data)
        return _in_order(found, call.order), _in_order(call.column[None], call.order)[0]

    def room(self, configs: RraConfigs, like: IntArray, largest: int,
             most_present: float) -> IntArray:
        """[lines] the largest batch up to `largest` that there is room for, with that many queries
        present at most; see Rra.room."""
        call = self._called(configs, like)
        most = np.empty((1, len(configs)), np.int64)
        room, _kept = self._room_facts(most_present)
        pointers = self._memories(call)
        self._room(room.ctypes.data, pointers.ctypes.data, call.column.ctypes.data,
                   call.groups.ctypes.data, len(configs), largest, most.ctypes.data)
        return np.asarray(_in_order(most, call.order)[0])

    def chunks(self, attention_of: Callable[[int], PairEnvelope], plans: PlanRows,
               ranges: RateRanges, crowd: FloatArray, *, is_latency: bool, context: float,
               tolerance: float) -> tuple[FloatArray, BoolArray]:
        """([boxes] rra.chunk_bounds' limits, whether these are sure). `crowd`: queries encoded in
        an iteration of which as many decode as right after a chunk."""
        count, ones = len(crowd), np.ones(len(crowd), np.int64)
        call = _Call(np.arange(count), plans, self._rra.blocks.columns(ones, ones << 10),
                     np.arange(count), count, ranges.groups, crowd, [])
        loaded = self._loaded(call, None, self._no_tolerances, is_bound=True)
        largest = np.maximum(loaded.queries[0], 1.0)
        pointers, kept = np.empty(count, np.int64), list[Any]()
        rates, longest = np.zeros(_MOST_DEGREES, np.int64), np.full(
            count, self._rra.flow.largest_context)
        for plan, rows in plans:
            rows_most = largest[rows] + ranges.chunk[rows]
            described = self._description(plan.least_steps, plan, (
                largest[rows], rows_most, np.maximum(rows_most, 1.0)))
            kept.append(described)
            pointers[rows] = described.words.ctypes.data
        for degree in {degree for plan, _ in plans for degree in plan.times.degrees}:
            own = np.ascontiguousarray(attention_of(degree).least_rate(largest, longest))
            kept.append(own)
            rates[self._slots[degree]] = own.ctypes.data
        parts = [np.ascontiguousarray(own, float) for own in (
            ranges.low, ranges.high, ranges.chunk, ranges.groups, largest)]
        words = np.array([own.ctypes.data for own in parts])
        found, is_sure = np.empty(count), np.empty(count, np.int64)
        self._chunks(loaded.facts.ctypes.data, words.ctypes.data, pointers.ctypes.data,
                     rates.ctypes.data, self._shares.ctypes.data, count, int(is_latency), context,
                     tolerance, found.ctypes.data, is_sure.ctypes.data)
        return found, is_sure > 0

    def _called(self, configs: RraConfigs, like: IntArray | None = None) -> _Call:
        rra = self._rra
        columns = rra.blocks.columns(configs.decode_iterations,
                                     configs.encode_batch if like is None else like)
        blocks = rra.blocks.packed.counts[columns]
        keys = configs.tp_degree * (rra.problem.cluster.num_devices + 1) + configs.tp_gpus
        order = np.lexsort((-blocks, keys))
        keys, blocks = keys[order], blocks[order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
        plans, stages = [], np.empty(len(order))
        for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
            key = int(keys[begin])
            plan = self._plan_of.get(key)
            if plan is None:
                row = order[begin]
                plan = self._plan_of[key] = rra.plans.both(
                    int(configs.tp_degree[row]), int(configs.tp_gpus[row]))
            plans.append((plan, slice(begin, end)))
            stages[begin:end] = len(plan.stages)
        fixed = configs.decode_micro_batches[order]
        until = np.cumsum(blocks)
        return _Call(order, plans, columns[order], until - blocks, int(until[-1]),
                     np.where(fixed > 0, fixed, stages), configs.encode_batch[order].astype(float),
                     [])

    def _loaded(self, call: _Call, configs: RraConfigs | None, tolerances: FloatArray, *,
                is_bound: bool, largest: IntArray | None = None,
                other: IntArray | None = None) -> _Loaded:
        rra, count, total = self._rra, len(call.order), call.total
        by_block, by_config = np.empty((8, total)), np.empty((5, count))
        largest_of = None if largest is None else (
            largest[call.order] / np.minimum(call.groups, call.batch))
        blocks, configured = (_rows(by_block), _rows(by_config))
        words = np.array([
            call.column.ctypes.data, call.begin.ctypes.data, call.groups.ctypes.data,
            call.batch.ctypes.data, 0 if largest_of is None else largest_of.ctypes.data,
            *blocks, *configured], np.int64)
        is_latency = largest is not None
        share = own = others = until = None
        if other is not None and configs is not None:
            share = rra.flow.survival_spread
            own = configs.decode_iterations[call.order]
            others = other[call.order].astype(np.int64)
            if is_latency:
                until = np.ascontiguousarray(
                    rra.flow.context_read_until(max(rra.seen_iterations, 1)))
            else:
                by_config[4] = float(rra.flow.context.sum())
        table, facts = self._rra.blocks.packed.described(), np.append(self._facts, tolerances)
        self._loads(table.ctypes.data, facts.ctypes.data, words.ctypes.data, count, int(is_bound),
                    _address(share), 0 if share is None else len(share), _address(own),
                    _address(others), _address(until))
        call.held.extend((by_block, by_config, largest_of))
        return _Loaded(words, table, facts, by_block[0:2], by_block[2:4], by_block[6],
                       by_config[1:3], by_config[0], by_config[3])

    def _found(self, of: Of, call: _Call, loaded: _Loaded, least: LeastSteps | None,
               other: IntArray | None) -> tuple[FloatArray, BoolArray]:
        count = len(call.order)
        pointers, kept = np.empty(count, np.int64), list[Any]()
        for plan, rows in call.plans:
            steps = plan.steps if least is None else plan.least_steps
            described = self._description(steps, plan, (
                loaded.most[rows], loaded.tokens[:, rows], loaded.encoded[rows]))
            kept.append(described)
            pointers[rows] = described.words.ctypes.data
        attention, compaction, rates = np.zeros((3, _MOST_DEGREES), np.int64)
        is_latency, by_degree = of >= Of.LATENCY, self._by_degree(call)
        for degree, (layers, at) in by_degree.items():
            slot = self._slots[degree]
            if other is not None and least is not None:
                own = self._rates(least, loaded, call, degree, is_latency=is_latency)
                kept.append(own)
                rates[slot] = own.ctypes.data
                continue
            work, moved = self._layer_s(least, layers, degree, loaded, call.total, at,
                                        is_latency=is_latency)
            kept += [work, moved]
            attention[slot] = work.ctypes.data
            compaction[slot] = 0 if moved is None else moved.ctypes.data
        found = np.empty((6 if of is Of.POINT else 1, count))
        is_sure = np.empty((1, count), np.int64)
        loaded.words[7], loaded.words[8] = _rows(loaded.context)
        self._figures(
            loaded.table.ctypes.data, loaded.facts.ctypes.data, loaded.words.ctypes.data,
            pointers.ctypes.data, attention.ctypes.data, compaction.ctypes.data,
            rates.ctypes.data, self._shares.ctypes.data, count, call.total, int(of),
            int(other is not None), found.ctypes.data, is_sure.ctypes.data)
        return _in_order(found, call.order), _in_order(is_sure, call.order)[0] > 0

    def _by_degree(self, call: _Call) -> dict[int, tuple[LayerTimes, slice | IntArray]]:
        """Whose layers, and which blocks of all are of plans with groups of a degree."""
        found: dict[int, tuple[LayerTimes, list[slice]]] = {}
        ends = [*call.begin[[rows.start for _, rows in call.plans[1:]]].tolist(), call.total]
        begin = 0
        for (plan, _), end in zip(call.plans, ends, strict=True):
            for degree in plan.times.degrees:
                found.setdefault(degree, (plan.times.layers, []))[1].append(slice(begin, end))
            begin = end
        return {degree: (layers, _joined(parts)) for degree, (layers, parts) in found.items()}

    def _layer_s(self, least: LeastSteps | None, layers: LayerTimes, degree: int,
                 loaded: _Loaded, total: int, at: slice | IntArray, *,
                 is_latency: bool) -> tuple[FloatArray, FloatArray | None]:
        """[2, blocks of all] a layer's attention, and [blocks of all] its compaction."""
        queries, context = loaded.queries[:, at], loaded.context[:, at]
        seconds = layers.decode_attention_s(queries, context, degree)
        if least is not None:
            seconds = seconds * least.attention_of(degree).factor(
                queries, context, of_more=is_latency)
        work, moved = np.empty((2, total)), None
        work[:, at] = seconds
        if layers.is_compaction_timed(degree):
            rows = loaded.rows[at]
            seconds = layers.compaction_s(rows, context[1], degree)
            if least is not None:
                seconds = seconds * least.compaction_of(degree).factor(
                    rows, context[1], of_more=is_latency)
            moved = np.empty(total)
            moved[at] = seconds
        return work, moved

    def _rates(self, least: LeastSteps, loaded: _Loaded, call: _Call, degree: int, *,
               is_latency: bool) -> FloatArray:
        """[configs] the least seconds for a token of context that a step of such sizes has."""
        most = loaded.most
        if is_latency:
            own = call.batch / call.groups
            most = most * np.maximum(call.held[-1] / own, 1.0)
        envelope: PairEnvelope = least.attention_of(degree)
        return np.ascontiguousarray(envelope.least_rate(
            most, np.full(most.shape, self._rra.flow.largest_context)))

    def _description(self, steps: StepTable, plan: StagePlan,
                     sizes: tuple[FloatArray, FloatArray, FloatArray]) -> _Described:
        """The structure of a table of steps that reaches these sizes."""
        tables = (steps.decode_rows, steps.encode_rows, steps.ends)
        for table, own in zip(tables, sizes, strict=True):
            table.reach(float(own.max()))
        known = self._described.get(id(steps))
        nodes = tuple(table.nodes for table in tables)
        if known is None or any(a is not b for a, b in zip(known.nodes, nodes, strict=True)):
            known = self._described[id(steps)] = self._describe(steps, plan, tables)
        return known

    def _describe(self, steps: StepTable, plan: StagePlan,
                  tables: Sequence[SizeTable]) -> _Described:
        for degree in steps.degrees:
            if degree not in self._slots:
                slot = self._slots[degree] = len(self._slots)
                own = plan.times.layers.mean_attention_s(np.asarray(TOGETHER, float), degree)
                self._shares[slot] = (own, np.minimum.accumulate(own),
                                      np.minimum.accumulate(own[::-1])[::-1])
        kind_of = np.array(steps.kind_of, np.int64)
        held: list[Any] = [kind_of, np.bincount(kind_of).astype(np.int64),
                np.array([self._slots[degree] for degree in steps.degrees], np.int64),
                *(np.ascontiguousarray(own, float) for own in steps.layers)]
        nodes = tuple(table.nodes for table in tables)
        words = [len(held[1]), len(kind_of), int(steps.is_encoder_decoder),
                 *(own.ctypes.data for own in held)]
        for table in tables:
            held += [table.nodes, table.rises, steps]
            words += [table.nodes.ctypes.data, table.rises.ctypes.data, table.nodes.shape[1]]
        return _Described(np.array(words, np.int64), held, nodes)

    def _memories(self, call: _Call) -> IntArray:
        """[configs] the addresses of what each one's plan holds."""
        pointers, problem = np.empty(len(call.order), np.int64), self._rra.problem
        for plan, rows in call.plans:
            if id(plan) not in self._memory:
                token = memory.kv_bytes(problem, plan.stages, 1.0)
                fixed, row, head = (memory.step_bytes(problem, plan.stages, rows=one, heads=other)
                                    for one, other in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
                held = [np.ascontiguousarray(own, float)
                        for own in (plan.weight_bytes, token, row - fixed, fixed)]
                last = np.array([head[-1] - fixed[-1]])
                self._memory[id(plan)] = np.array(
                    [len(plan.stages), *(own.ctypes.data for own in held),
                     int(last.view(np.int64)[0])], np.int64), [*held, plan]
            pointers[rows] = self._memory[id(plan)][0].ctypes.data
        return pointers

    def _room_facts(self, most_present: float = np.inf) -> tuple[IntArray, list[FloatArray]]:
        """The C structure Room, and what it points to."""
        rra, packed = self._rra, self._rra.blocks.packed
        inputs, most = rra.problem.lengths.inputs, rra.problem.num_queries or np.inf
        sizes = np.array([
            rra.flow.max_reserve_tokens, memory.KV_QUANTILE_Z, most, most_present,
            inputs.mean, inputs.std, inputs.max, memory.ACTIVATION_QUANTILE_Z, rra.capacity_bytes])
        held = list(packed.singles)
        return np.append(sizes.view(np.int64), [own.ctypes.data for own in held]), held


def _rows(array: FloatArray) -> list[int]:
    """The addresses of its rows."""
    return [array.ctypes.data + row * array.strides[0] for row in range(len(array))]


def _address(array: FloatArray | IntArray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _joined(parts: Sequence[slice]) -> slice | IntArray:
    if all(a.stop == b.start for a, b in zip(parts[:-1], parts[1:], strict=True)):
        return slice(parts[0].start, parts[-1].stop)
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])


def _in_order(values: Any, order: IntArray) -> Any:
    found = np.empty_like(values)
    found[:, order] = values
    return found
