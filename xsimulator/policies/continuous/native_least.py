"""What steps of continuous batching take at least, by csrc/planning_least.cpp: lines of one plan
at many rates in one call. Arrays (continuous.bounds) find the same, to the bit."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.addresses import address_of
from xsimulator.convex_steps import ConvexTimes
from xsimulator.native import Native
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.least_steps import (
    COUNTS,
    EVICTIONS,
    SPLIT,
    HeldLines,
    LeastSteps,
)

_FILLINGS = ("sarathi", "vllm", "orca")  # as in csrc/planning_least.cpp


class _Described(NamedTuple):
    """A plan, or lines, as the C structure Plan or Lines; `held`: what it points to."""

    words: IntArray
    held: list[Any]


class NativeLeast:
    """For the steps of one policy's ContinuousBounds."""

    def __init__(self, native: Native, least: LeastSteps, *, watched: float, crowded: float,
                 latency: float) -> None:
        """watched: iterations of the latency bound's query; crowded: share of what memory holds up
        to which nobody is evicted; latency: factor of latencies."""
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._least, self._steps = least, native.library.xgpt_least_steps
        self._steps.restype = None
        self._steps.argtypes = [*[address] * 6, *[number] * 3, address]
        self._facts: IntArray = np.append(_FILLINGS.index(least.name), np.array([
            least.mean_input, least.iterations, watched, SPLIT, EVICTIONS, crowded, latency,
            least.unused]).view(np.int64))
        self._plans: dict[int, _Described] = {}
        self._lines: dict[int, _Described] = {}

    def seconds(self, of: HeldLines, largest: FloatArray, lines: IntArray, rates: FloatArray,
                weights: FloatArray | None) -> FloatArray | None:
        """[lines, rates] between steps, at least, or, with weights, of a latency, of some of the
        lines of a plan, whose steps have `largest` rows at most. None where its table of decode
        steps does not answer."""
        table = of.plan.least_steps.decode_rows
        if id(of.top) not in self._lines:
            table.reach(float(np.maximum(of.top * of.iterations, of.decoding).max(initial=1.0)))
            self._lines[id(of.top)] = self._describe_lines(of, largest)
        if not table.is_finite:
            return None
        plan = self._plans.get(id(of.plan))
        if plan is None or plan.held[0] is not table.nodes:  # it is made anew to grow
            plan = self._plans[id(of.plan)] = self._describe_plan(of.plan)
        own, found = self._lines[id(of.top)].words, np.empty(rates.shape)
        rates, lines = np.ascontiguousarray(rates), np.ascontiguousarray(lines, np.int64)
        weights = None if weights is None else np.ascontiguousarray(weights)
        self._steps(address_of(self._facts), address_of(plan.words), address_of(own),
                    address_of(lines), address_of(rates),
                    None if weights is None else address_of(weights), *rates.shape,
                    int(weights is not None), address_of(found))
        return found

    def _describe_plan(self, plan: StagePlan) -> _Described:
        steps, table = plan.convex_steps, plan.least_steps.decode_rows
        attention = [self._least.attention(degree) for degree in steps.degrees]
        decode = [np.ascontiguousarray(own.decode_s, float) for own in attention]
        held: list[Any] = [
            COUNTS, np.array(steps.number, float), np.array(plan.least_steps.layers[0], float),
            np.array([own.encode_s for own in attention], float),
            np.array([address_of(own) for own in decode], np.int64),
            np.concatenate([_words(own) for own in steps.rows])]
        words = [len(steps.rows), steps.last, len(COUNTS), *(address_of(own) for own in held),
                 *_words(steps.head).tolist(), address_of(table.nodes), address_of(table.rises),
                 table.nodes.shape[1]]
        return _Described(np.array(words, np.int64), [
            table.nodes, table.rises, plan, steps, decode, held])

    def _describe_lines(self, of: HeldLines, largest: FloatArray) -> _Described:
        steps, least = of.plan.convex_steps, self._least
        held = [np.ascontiguousarray(own, float) for own in (
            of.held, of.least, of.most, of.iterations, of.is_crowded, of.decoding,
            np.array([least.each_s(degree, of.held) for degree in steps.degrees]),
            np.array([rows.rate_s(largest) for rows in steps.rows]),
            np.array([rows.rate_s(of.held) for rows in steps.rows]),
            steps.head.rate_s(np.maximum(largest, of.held)))]
        groups = int(np.array(float(of.groups)).view(np.int64))
        return _Described(np.array([len(of.held), groups, *(address_of(own) for own in held)],
                                   np.int64), [*held, of])


def _words(times: ConvexTimes) -> IntArray:
    """The C structure Convex."""
    return np.array([*(address_of(own) for own in times.lines), len(times.lines[0])], np.int64)
