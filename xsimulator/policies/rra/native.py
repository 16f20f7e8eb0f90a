"""RRA's points and bounds by csrc/planning_rra.cpp: all plans of a call at once, without the dozens
of arrays that each of its steps is as many calls for. Figures agree with those by arrays within
1e-12 of them (exponentials are the C library's), which the bounds' tolerances, a thousandth at
least, leave far behind; where a table of step times does not answer, arrays do."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.addresses import address_of
from xsimulator.native import Native
from xsimulator.plans import StagePlan, run_begins
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.rra.native_steps import Call, Envelopes, Loaded, by_degree, layer_s
from xsimulator.policies.rra.native_tables import (
    MOST_DEGREES,
    PlanRows,
    RoomStructures,
    RraParts,
    StepStructures,
)
from xsimulator.policies.rra.phases import NEGLIGIBLE

_TOLERANCES = 6


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


class NativeRra:
    """For one Rra."""

    def __init__(self, rra: RraParts, native: Native) -> None:
        self._rra, library = rra, native.library
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._loads, self._figures = library.xgpt_rra_loads, library.xgpt_rra_figures
        self._held, self._room = library.xgpt_rra_held, library.xgpt_rra_room
        self._loads.argtypes = [*[address] * 3, number, number, address, number, *[address] * 3]
        self._figures.argtypes = [*[address] * 8, *[number] * 4, address, address]
        self._held.argtypes = [*[address] * 5, number, address]
        self._room.argtypes = [*[address] * 4, number, number, address]
        for function in (self._loads, self._figures, self._held, self._room):
            function.restype = None
        self._steps, self._rooms = StepStructures(), RoomStructures(rra)
        self._plan_of: dict[int, StagePlan] = {}
        tokens = rra.encode_tokens
        self._facts: FloatArray = np.array([
            tokens.mean, tokens.std, rra.adjustment, LEAST_ADJUSTED, rra.flow.mean_iterations,
            rra.seen_iterations, rra.flow.largest_context, NEGLIGIBLE])
        self._no_tolerances: FloatArray = np.zeros(_TOLERANCES)

    def points(self, call: Call) -> tuple[FloatArray, FloatArray, BoolArray]:
        """([6, configs] period_s, latency_s, encoded_s, the first iteration's end, encode_s, 1
        where the source answered for all; [3, configs] the most tokens and queries of a group that
        encodes, and queries of one that decodes; whether the figures are sure)."""
        loaded = self._loaded(call, None, self._no_tolerances, is_bound=False)
        found, is_sure = self._found(Of.POINT, call, loaded, None, None)
        sizes = np.array([loaded.tokens[0], loaded.encoded, loaded.most])
        return found, _in_order(sizes, call.order), is_sure

    def bounds(self, of: Of, least: Envelopes, tolerances: FloatArray, corners: RraConfigs, *,
               smallest: IntArray | None = None, largest: IntArray | None = None,
               other: IntArray | None = None) -> tuple[FloatArray, BoolArray]:
        """([boxes] as RraBounds has it, whether these are sure). `tolerances`: what a step of a
        group with a query for certain may be off, then those of rra.bounds; `other`: the other end
        of the boxes' N_D, of ranges."""
        call = self.called(corners)
        loaded = self._loaded(call, corners, tolerances, is_bound=True, largest=largest,
                              other=other)
        if self._rra.blocks.is_padded and smallest is not None and other is None:
            # the smallest batches' contexts count
            small = self._loaded(call._replace(batch=smallest[call.order].astype(float)), corners,
                                 tolerances, is_bound=True)
            loaded = loaded._replace(context=small.context)
        found, is_sure = self._found(of, call, loaded, least, other)
        return found[0], is_sure

    def held(self, call: Call) -> tuple[FloatArray, IntArray]:
        """([3, configs] tokens of KV, bytes on the fullest rank, queries present; columns)."""
        count = len(call.order)
        found = np.empty((3, count))
        room, _kept = self._rooms.facts()
        pointers = self._rooms.of(call.plans)
        self._held(address_of(room), address_of(pointers), address_of(call.column),
                   address_of(call.groups), address_of(call.batch), count, address_of(found))
        return _in_order(found, call.order), _in_order(call.column[None], call.order)[0]

    def room(self, call: Call, largest: int, most_present: float) -> IntArray:
        """[lines] the largest batch up to `largest` that there is room for, with that many queries
        present at most; see Rra.room."""
        most = np.empty((1, len(call.order)), np.int64)
        room, _kept = self._rooms.facts(most_present)
        pointers = self._rooms.of(call.plans)
        self._room(address_of(room), address_of(pointers), address_of(call.column),
                   address_of(call.groups), len(call.order), largest, address_of(most))
        return np.asarray(_in_order(most, call.order)[0])

    def called(self, configs: RraConfigs, like: IntArray | None = None) -> Call:
        """The configurations by plan; the blocks of the batches `like` are taken in place of their
        own."""
        rra = self._rra
        columns = rra.blocks.columns(configs.decode_iterations,
                                     configs.encode_batch if like is None else like)
        blocks = rra.blocks.packed.counts[columns]
        keys = configs.tp_degree * (rra.problem.cluster.num_devices + 1) + configs.tp_gpus
        order = np.lexsort((-blocks, keys))
        keys, blocks = keys[order], blocks[order]
        begins = run_begins(keys).tolist()
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
        return Call(order, plans, columns[order], until - blocks, int(until[-1]),
                     np.where(fixed > 0, fixed, stages), configs.encode_batch[order].astype(float))

    def _loaded(self, call: Call, configs: RraConfigs | None, tolerances: FloatArray, *,
                is_bound: bool, largest: IntArray | None = None,
                other: IntArray | None = None) -> Loaded:
        rra, count, total = self._rra, len(call.order), call.total
        by_block, by_config = np.empty((8, total)), np.empty((5, count))
        largest_of = None if largest is None else (
            largest[call.order] / np.minimum(call.groups, call.batch))
        blocks, configured = (_rows(by_block), _rows(by_config))
        words = np.array([
            address_of(call.column), address_of(call.begin), address_of(call.groups),
            address_of(call.batch), 0 if largest_of is None else address_of(largest_of),
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
        table, facts = rra.blocks.packed.described(), np.concatenate([self._facts, tolerances])
        self._loads(address_of(table), address_of(facts), address_of(words), count, int(is_bound),
                    _address(share), 0 if share is None else len(share), _address(own),
                    _address(others), _address(until))
        return Loaded(words, table, facts, by_block[0:2], by_block[2:4], by_block[6],
                      by_config[1:3], by_config[0], by_config[3], largest_of)

    def _found(self, of: Of, call: Call, loaded: Loaded, least: Envelopes | None,
               other: IntArray | None) -> tuple[FloatArray, BoolArray]:
        count = len(call.order)
        pointers, kept = np.empty(count, np.int64), list[Any]()
        for (plan, rows), sizes in zip(call.plans, _largest(
                call.plans, loaded.most, loaded.tokens.max(axis=0), loaded.encoded), strict=True):
            steps = plan.steps if least is None else plan.least_steps
            described = self._steps.of(steps, plan, sizes)
            kept.append(described)
            pointers[rows] = address_of(described.words)
        attention, compaction, rates = np.zeros((3, MOST_DEGREES), np.int64)
        is_latency = of >= Of.LATENCY
        for degree, (layers, at) in by_degree(call).items():
            slot = self._steps.slots[degree]
            if other is not None and least is not None:
                own = self._rates(least, loaded, call, degree)
                kept.append(own)
                rates[slot] = address_of(own)
                continue
            work, moved = layer_s(least, layers, degree, loaded, at, is_latency=is_latency)
            kept += [work, moved]
            attention[slot] = address_of(work)
            compaction[slot] = 0 if moved is None else address_of(moved)
        found = np.empty((6 if of is Of.POINT else 1, count))
        is_sure = np.empty((1, count), np.int64)
        loaded.words[7], loaded.words[8] = _rows(loaded.context)
        self._figures(
            address_of(loaded.table), address_of(loaded.facts), address_of(loaded.words),
            address_of(pointers), address_of(attention), address_of(compaction),
            address_of(rates), address_of(self._steps.shares), count, call.total, int(of),
            int(other is not None), address_of(found), address_of(is_sure))
        return _in_order(found, call.order), _in_order(is_sure, call.order)[0] > 0

    def _rates(self, least: Envelopes, loaded: Loaded, call: Call, degree: int) -> FloatArray:
        """[configs] the least seconds for a token of context that a step of such sizes has."""
        most = loaded.most
        if loaded.largest is not None:
            most = most * np.maximum(loaded.largest / (call.batch / call.groups), 1.0)
        return np.ascontiguousarray(least.attention_of(degree).least_rate(
            most, np.array(self._rra.flow.largest_context)))


def _largest(plans: PlanRows, *sizes: FloatArray) -> list[tuple[float, ...]]:
    """Of each plan the largest of each of these [configs]."""
    begins = [rows.start for _, rows in plans]
    return list(zip(*(np.maximum.reduceat(own, begins).tolist() for own in sizes), strict=True))


def _rows(array: FloatArray) -> list[int]:
    """The addresses of its rows."""
    first, step = address_of(array), array.strides[0]
    return [first + row * step for row in range(len(array))]


def _address(array: FloatArray | IntArray | None) -> int | None:
    return None if array is None else address_of(array)


def _in_order(values: Any, order: IntArray) -> Any:
    found = np.empty_like(values)
    found[:, order] = values
    return found
