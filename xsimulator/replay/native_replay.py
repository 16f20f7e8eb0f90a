"""Replays by csrc/replay/replay.cpp, of one pool or of WAA's two pools. Decisions and times equal
those of the rules (xrunner.rules) and of the event kernel to the bit. Steps are made into Python
objects only when they are read."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import QueryLengths, QueryTimes
from xrunner.rules.arrival_routing import (
    ArrivalRouter,
    Dealt,
    Deferred,
    LeastQueries,
    LeastTokens,
    RoundRobin,
)
from xrunner.rules.paged import PagedRule
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule, Chunk, Start, Step, StepKind
from xrunner.rules.waa import WaaDecodeRule
from xsimulator.addresses import address_of
from xsimulator.native import TELL, Native, native
from xsimulator.replay.native_input import WITH_ROOMS, replica_input
from xsimulator.replay.pipeline import StepTimes
from xsimulator.replay.pool import PoolPlan, ReplicaPlan, records_of
from xsimulator.replay.queries import ReplayJob
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult

_RULES: Mapping[type, int] = {type(None): 0, RoundRobin: 0, Dealt: 0, LeastQueries: 1,
                              LeastTokens: 2, Deferred: 3}
_KINDS = (StepKind.ENCODE, StepKind.DECODE, StepKind.MIXED)
_POOL = [np.int64] * 6 + [np.float64] * 4  # types of the arrays of one pool


def _routing(router: ArrivalRouter | None, order: IntArray,
             replicas: int) -> tuple[int, IntArray, IntArray, IntArray] | None:
    """(rule as in csrc/replay/replica.h, [requests] replica of each, [replicas, 2] windows,
    [requests] tokens) of a routing rule, None: a single replica; None for others. order: [requests]
    of arrival."""
    owners = np.zeros(len(order), np.int64)
    windows = tokens = np.zeros(0, np.int64)
    rule = _RULES.get(type(router))
    if isinstance(router, RoundRobin):
        owners[order] = np.resize(np.arange(replicas), len(order))
    elif isinstance(router, Dealt):
        owners = np.array(router.owners, np.int64)
    elif isinstance(router, LeastTokens):
        tokens = np.array(router.tokens, np.int64)
    elif isinstance(router, Deferred):
        windows = np.array([(one.waiting, one.present) for one in router.windows], np.int64)
    return None if rule is None else (rule, owners, windows, tokens)


def replay_natively(job: ReplayJob, plans: Sequence[ReplicaPlan],
                    router: ArrivalRouter | None = None, *, has_steps: bool = True,
                    ) -> NativeReplay | None:
    """The replay of xsimulator.replay.event_replay.run_routed by the native library; None without
    the library, for other rules or clocks, or if a step has no known time. plans: an object may
    stand for several equal replicas. router: None for one replica. has_steps: whether steps are
    kept. Raises XgptError for a request that can never fit."""
    library, order = native(), np.argsort(job.arrival_s, kind="stable")
    routing = _routing(router, order, len(plans))
    if library is None or routing is None:
        return None
    by_plan = {id(plan): replica_input(job, plan, has_steps) for plan in plans}
    inputs = [own for own in by_plan.values() if own is not None]
    first = inputs[0].data if inputs else None
    if first is None or len(inputs) < len(by_plan) or len(plans) > 1 and any(
            own.data.is_alone or own.data.kind != first.kind
            or (own.data.never_fit != first.never_fit).any() for own in inputs):
        return None
    if first.never_fit.any():
        raise never_fits(job, int(order[first.never_fit[order]][0]))
    rule, owners, windows, tokens = routing
    count, arrival_s, times = len(order), np.array(job.arrival_s), np.empty((3, len(order)))
    left, preemptions = np.ascontiguousarray(job.left), np.zeros(len(plans), np.int64)
    order = order if first.order is None else first.order
    coming = np.array([*map(address_of, (left, order, arrival_s, owners, windows)),
                       address_of(tokens) if len(tokens) else 0])
    given = np.array([address_of(own.addresses) for plan in plans
                      for own in [by_plan[id(plan)]] if own is not None])
    numbers = np.array([count, len(plans), rule])
    with library.replaying:
        found = library.replayed(first.kind, *map(address_of, (
            numbers, given, coming, times, preemptions)))
    if found is None:
        for own in inputs:
            for one in own.fetched:
                one.raise_failure()
        return None
    assert has_steps or not np.isnan(times).any(), "requests have nothing to do"
    start_s, first_s, last_s = times
    return NativeReplay(library, found, QueryTimes(
        arrival_s=arrival_s, start_s=start_s, first_token_s=first_s, last_token_s=last_s),
        job.lengths, plans, (owners, preemptions), has_steps=has_steps)


class NativeReplay:
    """A finished native replay. times: arrival, start, first and last token of each request."""

    def __init__(self, library: Native, found: int, times: QueryTimes, lengths: QueryLengths,
                 plans: Sequence[ReplicaPlan], routed: tuple[IntArray, IntArray], *,
                 has_steps: bool) -> None:
        """routed: ([requests] replica of each, [replicas] evictions)."""
        self._library, self._found, self._has_steps = library, found, has_steps
        self.times, self._lengths, self._plans = times, lengths, plans
        self._owners, self._preemptions = routed
        finalize(self, library.forget, found)

    def busy_s(self, begin_s: float, end_s: float) -> FloatArray:
        """[stages of all pools] seconds at work within the window."""
        busy = np.empty(sum(len(pool.stages) for plan in self._plans for pool in plan.pools))
        self._library.busy(self._found, begin_s, end_s, address_of(busy))
        return busy

    def rows(self) -> list[IntArray]:
        """[replicas] indices of their requests, in the order in which they were begun."""
        if len(self._plans) == 1:
            return [np.arange(len(self._owners))]
        order = np.argsort(self.times.start_s, kind="stable")
        return [order[self._owners[order] == replica] for replica in range(len(self._plans))]

    def results(self) -> list[ReplayResult]:
        """The result of each replica for its own requests; without pools and handovers if steps
        were not kept."""
        outputs, rows = self._lengths.outputs, self.rows()
        assert outputs is not None
        records = self._read() if self._has_steps else [((), ())] * len(rows)
        if len(rows) == 1:
            return [ReplayResult(
                pools=records[0][0], handovers=records[0][1], times=self.times,
                output_tokens=outputs, preemptions=int(self._preemptions[0]))]
        numbers = np.arange(len(outputs))  # steps give the job's own
        return [ReplayResult(
            pools=tuple(replace(pool, requests=numbers) for pool in pools), handovers=links,
            output_tokens=outputs[own], preemptions=int(evicted), times=self.times.take(own))
            for own, (pools, links), evicted in zip(rows, records, self._preemptions, strict=True)]

    def _read(self) -> list[tuple[tuple[PoolRecords, ...], tuple[HandoverRecords, ...]]]:
        copied: list[bytes] = []
        self._library.tell(self._found, TELL(
            lambda place, size: copied.append(ctypes.string_at(place, size) if size else b"")))
        pools = [pool for plan in self._plans for pool in plan.pools]
        kinds = [*_POOL * len(pools), *[np.float64] * len(self._plans)]
        arrays: Iterator[NDArray[Any]] = iter([np.frombuffer(one, kind) for one, kind in zip(
            copied, kinds, strict=True)])
        records = iter([_records(pool, *islice(arrays, len(_POOL))) for pool in pools])
        return [(tuple(islice(records, len(plan.pools))), tuple(
            HandoverRecords(source=link.source, target=link.target,
                            step=step.astype(np.int64), start_s=start_s, end_s=end_s)
            for link in plan.handovers))
            for plan in self._plans for step, start_s, end_s in [next(arrays).reshape(-1, 3).T]]


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
            or (isinstance(rule, WITH_ROOMS) and rule.rooms.prefixes.is_shared))

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
