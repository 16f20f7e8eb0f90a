"""The replay of a pool that is alone and has paged KV (vLLM's rule, Sarathi's): what PoolHead
decides with xrunner.rules.paged, by csrc/planning.cpp. Steps are made where somebody looks at
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.queries import QueryTimes
from xrunner.rules.paged import BLOCK_TOKENS, PagedRule
from xrunner.rules.steps import Chunk, Step, StepKind
from xsimulator.policies.continuous.native import native
from xsimulator.replay.pool import PoolPlan, records_of
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.stage_line import Decided
from xsimulator.replay.step_clock import ManySizes, StepClock

_KINDS = (StepKind.ENCODE, StepKind.DECODE, StepKind.MIXED)


class PagedSteps(Sequence[Step]):
    """The steps that a replay told of, as csrc/planning.cpp names them."""

    def __init__(self, told: dict[str, IntArray], *, is_chunked: bool) -> None:
        self._told, self._is_chunked = told, is_chunked

    def __len__(self) -> int:
        return len(self._told["labels"])

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
        chunks, evicted, ended = (iter(self._told[name].tolist())
                                  for name in ("chunks", "evicted", "ended"))
        steps = []
        for kind, group, number, parts, gone, joined in self._told["labels"].tolist():
            spans = tuple(Chunk(query=query, first=first, tokens=tokens)
                          for query, first, tokens in (next(chunks) for _ in range(parts)))
            steps.append(Step(
                kind=_KINDS[kind], group=group, phase=number, iteration=int(kind != 0),
                chunks=spans if self._is_chunked else (),
                joined=tuple(next(ended) for _ in range(joined)),
                evicted=tuple(next(evicted) for _ in range(gone))))
        return steps


def replay_paged(plan: PoolPlan, queries: Queries) -> ReplayResult | None:
    """What xsimulator.replay.flow.replay_alone comes to; None where Python is to find it. Raises
    XgptError for a query that can never fit."""
    rule, library = plan.rule, native()
    if (library is None or type(rule) is not PagedRule or rule.waiting
            or not queries.gives_token):
        return None
    assert isinstance(plan.clock, StepClock), f"{plan.clock = }"
    facts, inputs = rule.facts, np.array(queries.inputs, np.int64)
    reserved = np.maximum(np.array(queries.reserve_tokens, np.int64), inputs)
    if len(rows := np.flatnonzero(-(-reserved // BLOCK_TOKENS) > facts.num_blocks)):
        raise never_fits(queries, int(rows[0]))
    told, sizes, preemptions = library.paged(
        np.array([len(inputs), rule.num_groups, facts.num_blocks, facts.left_free,
                  facts.token_budget, facts.is_chunked]), np.array(facts.slots), inputs,
        np.array(queries.left, np.int64))
    counts = told["labels"][:, 3]
    step_of_span = np.repeat(np.arange(len(counts)), counts)
    times, turns_s = Decided(
        PagedSteps(told, is_chunked=facts.is_chunked),
        ManySizes(sizes, step_of_span, counts[step_of_span], told["chunks"][:, 1:]),
        told["waits"], told["turn_of"]).times(
            plan.clock, len(plan.stages), float(queries.arrival_s[0]),
            is_one_group=rule.num_groups == 1)
    assert (told["times"] >= 0).all(), "queries have nothing to do"
    start_s, first_s, last_s = turns_s[told["times"]]
    turns, held = told["memory"].T
    return ReplayResult(
        pools=(records_of(plan, times, turns_s[turns].tolist(), held.tolist()),), handovers=(),
        preemptions=preemptions, output_tokens=queries.output_tokens,
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=start_s, first_token_s=first_s,
                         last_token_s=last_s))


def never_fits(queries: Queries, query: int) -> XgptError:
    """The refusal of a query that the schedule's budget can never hold."""
    return XgptError(f"query {query} reserves {queries.reserve_tokens[query]} tokens of KV cache: "
                     "more than the schedule gives one micro-batch")
