"""What a replay told that csrc made of a pool: its steps, which are made where somebody looks at
them, and, of one that is alone, the result that they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.queries import QueryTimes
from xrunner.rules.steps import Chunk, Step, StepKind
from xsimulator.addresses import address_of
from xsimulator.policies.continuous.native import Native
from xsimulator.replay.pool import PoolPlan, records_of
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.stage_line import Decided
from xsimulator.replay.step_clock import ManySizes, StepClock

_KINDS = (StepKind.ENCODE, StepKind.DECODE, StepKind.MIXED)


class ToldSteps(Sequence[Step]):
    """Of `told`, as csrc/planning_replays.cpp hands it over: labels [steps, 7] kind, group, phase,
    iteration, and how many of `chunks` ([chunks, 3] query, first token, tokens), `evicted` and
    `ended` (queries) are each step's; `evicted` may be `handed` instead. is_chunked: inputs are not
    always encoded whole."""

    def __init__(self, told: dict[str, IntArray], *, is_chunked: bool) -> None:
        self._told, self._is_chunked = told, is_chunked
        self._moved = "handed" if "handed" in told else "evicted"

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
        chunks, moved, ended = (iter(self._told[name].tolist())
                                for name in ("chunks", self._moved, "ended"))
        steps = []
        for kind, group, phase, iteration, parts, others, joined in self._told["labels"].tolist():
            spans = tuple(Chunk(query=query, first=first, tokens=tokens)
                          for query, first, tokens in (next(chunks) for _ in range(parts)))
            steps.append(Step(
                kind=_KINDS[kind], group=group, phase=phase, iteration=iteration,
                chunks=spans if self._is_chunked else (),
                joined=tuple(next(ended) for _ in range(joined)),
                **{self._moved: tuple(next(moved) for _ in range(others))}))
        return steps


def result_of(plan: PoolPlan, queries: Queries, library: Native, replay: Callable[..., int],
              given: Sequence[IntArray | FloatArray], *, is_chunked: bool) -> ReplayResult:
    """What one of `library`'s replays comes to. given: its arguments but the last, as in
    csrc/planning_replays.cpp."""
    told, sizes, preemptions = _taken(library, replay, given, len(queries.inputs))
    assert isinstance(plan.clock, StepClock), f"{plan.clock = }"
    counts = told["labels"][:, 4]
    step_of_span = np.repeat(np.arange(len(counts)), counts)
    times, turns_s = Decided(
        ToldSteps(told, is_chunked=is_chunked),
        ManySizes(sizes, step_of_span, counts[step_of_span], told["chunks"][:, 1:]),
        told["waits"], told["turn_of"]).times(
            plan.clock, len(plan.stages), float(queries.arrival_s[0]),
            is_one_group=plan.rule.num_groups == 1)
    assert (told["times"] >= 0).all(), "queries have nothing to do"
    start_s, first_s, last_s = turns_s[told["times"]]
    turns, held = told["memory"].T
    return ReplayResult(
        pools=(records_of(plan, times, turns_s[turns].tolist(), held.tolist()),), handovers=(),
        preemptions=preemptions, output_tokens=queries.output_tokens,
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=start_s, first_token_s=first_s,
                         last_token_s=last_s))


def _taken(library: Native, replay: Callable[..., int], given: Sequence[IntArray | FloatArray],
           num_queries: int) -> tuple[dict[str, IntArray], FloatArray, int]:
    """(what is told, by name, sizes of steps, how often a query with a row was evicted)."""
    counts = np.empty(7, np.int64)
    kept = replay(*(address_of(one) for one in (*given, counts)))
    turns, steps, chunks, ended, evicted, changes, preemptions = counts.tolist()
    shapes = {"waits": (turns,), "turn_of": (steps,), "labels": (steps, 7), "chunks": (chunks, 3),
              "ended": (ended,), "evicted": (evicted,), "memory": (changes, 2),
              "times": (3, num_queries)}
    told = {name: np.empty(shape, np.int64) for name, shape in shapes.items()}
    sizes = np.empty((steps, 7))
    library.told(kept, *(address_of(one) for one in (*told.values(), sizes)))
    return told, sizes, preemptions


def never_fits(queries: Queries, query: int) -> XgptError:
    """The refusal of a query that the schedule's budget can never hold."""
    return XgptError(f"query {query} reserves {queries.reserve_tokens[query]} tokens of KV cache: "
                     "more than the schedule gives one micro-batch")
