"""The head: the pool's first rank decides by the batching rule, executes its part of the first
stage, and commits what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from xrunner.engine.awaited import Awaited
from xrunner.engine.pipeline import Executor, Neighbours
from xrunner.engine.query import ActiveQuery
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.compaction import apply_moves
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xrunner.transport.comm import Comm
from xrunner.transport.messages import Joined, StartMessage, StepMessage
from xrunner.transport.route import ALONE, Route


class Sink(Protocol):
    """Where the head reports: results, progress, and whether the user asked to stop."""

    def finished(self, result: FinishedQuery) -> None: ...

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """After every step; `output_tokens` so far, those of unfinished queries included."""
        ...

    def should_stop(self) -> bool: ...


class Head:
    """decide -> execute -> commit, until the rule has no query left."""

    def __init__(self, *, rule: BatchingRule, executor: Executor, comm: Comm, sink: Sink,
                 eos_ids: frozenset[int], decode_text: Callable[[Sequence[int]], str],
                 route: Route = ALONE, start_token: int | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`start_token`: what an encoder-decoder model's decoder is fed first; None for a
        decoder-only model."""
        self._rule, self._executor, self._sink = rule, executor, sink
        self._comm = comm
        self._neighbours, self._start_token = Neighbours(comm, route), start_token
        self._eos_ids, self._decode_text, self._clock = eos_ids, decode_text, clock
        self._queries: dict[int, PreparedQuery] = {}
        self._active: dict[int, ActiveQuery] = {}
        self._slots: dict[int, list[int]] = {}  # group -> query of each slot, as the stages hold it
        self._removed: dict[int, list[int]] = {}  # group -> slots to free with its next step
        self._awaited = Awaited()
        self._output_tokens = 0

    def submit(self, query: PreparedQuery) -> bool:
        """False if the query can never fit the schedule's KV budget."""
        if not self._rule.submit(query.index, query.reserve_tokens,
                                 len(query.input_ids)):
            return False
        self._queries[query.index] = query
        return True

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of each active query."""
        return {index: (len(active.query.input_ids), len(active.output_ids))
                for index, active in self._active.items()}

    def run(self) -> bool:
        """True when every query is done, False when stopped before. Stages are told to end.
        After `start`."""
        while (group := self._rule.next_group()) is not None:
            if self._rule.needs_tokens:
                self._collect(group)
            if self._sink.should_stop():
                break
            step = self._rule.decide()
            if step is not None:
                self._execute(step)
            self._sink.progress(self._clock(), self._output_tokens)
        self._neighbours.stop()
        self._drain()
        self._commit_drained()
        return not self._has_work()

    def _has_work(self) -> bool:
        """Whether a query is not done. A stop may come with the last one's last token."""
        return bool(self._queries or self._active)

    def start(self, spare_bytes: int = 0) -> None:
        """Every stage sets up its caches for what was submitted. `spare_bytes` of memory a rank
        may be taken for them at once."""
        self._begin(self._start_message(self._rule, spare_bytes))

    def _start_message(self, rule: BatchingRule, spare_bytes: int) -> StartMessage:
        """Caches for the pool of `rule`, which takes queries to their end."""
        waiting = self._queries.values()
        longest, encoded = max((q.reserve_tokens for q in waiting), default=1), 0
        if self._start_token is not None:
            longest = max((q.max_new_tokens for q in waiting), default=1)
            encoded = max((len(q.input_ids) for q in waiting), default=1)
        return StartMessage(num_groups=rule.num_groups, capacity=longest,
                            slots=rule.group_max_active, encoded_capacity=encoded,
                            spare_bytes=spare_bytes)

    def _begin(self, message: StartMessage) -> None:
        self._neighbours.share(message)
        self._neighbours.pass_on(message)
        self._executor.start(message)

    def _execute(self, step: Step) -> None:
        message, inputs = self._compose(step)
        self._neighbours.share(message, inputs)
        out = self._executor.execute(message, inputs)
        gives_tokens = self._executor.gives_tokens(message)
        if gives_tokens:
            self._awaited.expect(step.group, self._given(step))
        if self._neighbours.route.tokens_from is not None:
            self._neighbours.pass_on(message, out)
        elif gives_tokens:
            assert out is not None, f"{step = }"
            self._awaited.arrive(step.group, out)

    def _given(self, step: Step) -> list[int]:
        """Queries that the step gives a token, in the order in which they come back."""
        return list(step.joined if step.kind is StepKind.ENCODE else self._slots[step.group])

    def _compose(self, step: Step) -> tuple[StepMessage, Tensor]:
        """The step's header and its input tokens, [T] of an encode or [n] of a decode."""
        removed = self._removed.pop(step.group, [])
        slots = self._compact(step.group, removed)
        now = self._clock()
        joined = tuple(self._join(index, now) for index in step.joined)
        slots += step.joined
        if step.kind is StepKind.ENCODE:
            ids = [t for index in step.joined for t in self._active[index].query.input_ids]
        else:
            ids = [self._last_token(self._fed(index)) for index in slots]
        message = StepMessage(kind=step.kind, group=step.group, phase=step.phase,
                              iteration=step.iteration, removed=tuple(removed), joined=joined,
                              ended=self._ended())
        return message, torch.tensor(ids)

    def _join(self, index: int, now: float) -> Joined:
        """A query that is encoded from now on."""
        query = self._queries.pop(index)
        self._active[index] = ActiveQuery(query, encode_start_s=now)
        return Joined(query=index, input_tokens=len(query.input_ids), sampling=query.sampling)

    def _ended(self) -> tuple[int, ...]:
        """Queries whose entries were handed over in vain."""
        return ()

    def _fed(self, index: int) -> ActiveQuery:
        """Whose row is decoded."""
        return self._active[index]

    def _last_token(self, active: ActiveQuery) -> int:
        if active.output_ids:
            return active.output_ids[-1]
        assert self._start_token is not None, f"{active.query.index = } has no first token"
        return self._start_token

    def _compact(self, group: int, removed: list[int]) -> list[int]:
        self._slots[group] = apply_moves(self._slots.get(group, []), removed)
        return self._slots[group]

    def _collect(self, group: int) -> None:
        """Wait for what the group's last step yields, if any, and commit its tokens."""
        while self._executor.awaits_encoded(group):
            self._take_up()
        while self._awaited.is_missing(group):
            self._take_up()
        for queries, tokens in self._awaited.take(group):
            self._commit(group, queries, tokens)

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self._awaited.arrive(*result)

    def _drain(self) -> None:
        """What is still under way when a run is stopped arrives: who sends it would wait for
        ever."""
        while self._awaited.is_missing() or self._executor.awaits_encoded():
            self._take_up()

    def _commit_drained(self) -> None:
        """The last tokens: some queries end with them."""
        for group in self._awaited.groups():
            for queries, tokens in self._awaited.take(group):
                self._commit(group, queries, tokens)

    def _commit(self, group: int, queries: list[int], tokens: list[int]) -> None:
        assert len(queries) == len(tokens), f"{group = } {len(queries) = } {len(tokens) = }"
        now = self._clock()
        self._output_tokens += len(tokens)
        gone: set[int] = set()
        for index, token in zip(queries, tokens, strict=True):
            if self._take_token(self._active[index], token, now):
                gone.add(index)
        if gone:
            self._removed.setdefault(group, []).extend(
                s for s, q in enumerate(self._slots[group]) if q in gone)

    def _take_token(self, active: ActiveQuery, token: int, now: float) -> bool:
        """Whether it was the query's last."""
        if active.first_token_s is None:
            active.first_token_s = now
        reason = active.append(token, self._eos_ids)
        text = active.stopped_text(self._decode_text) if active.query.stop else None
        if reason is None and text is None:
            return False
        self._finish(active, "stop" if text is not None else reason or "length", text, now)
        return True

    def _finish(self, active: ActiveQuery, reason: str, text: str | None, now: float) -> None:
        query = active.query
        del self._active[query.index]
        self._rule.finish(query.index)
        self._give(active, reason, text, now)

    def _give(self, active: ActiveQuery, reason: str, text: str | None, now: float) -> None:
        """A query's result. `text` None: that of all its tokens."""
        self._sink.finished(FinishedQuery(
            query=active.query, output_ids=tuple(active.output_ids), finish_reason=reason,
            encode_start_s=active.encode_start_s, latency_s=now - active.encode_start_s,
            text=self._decode_text(active.output_ids) if text is None else text))
