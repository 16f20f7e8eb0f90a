"""The heads of the baselines: static batches (FT, DSI) and continuous batching (ORCA, vLLM,
Sarathi). They drive the same stages with the same kernels as the head of RRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xrunner.engine.head import Head
from xrunner.engine.query import ActiveQuery
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import BatchingRule, Chunk, Step, StepKind
from xrunner.transport.messages import Joined, Part, StartMessage, StepMessage


class _Kept(NamedTuple):
    """A query that is done before its batch is: what its result will say."""

    active: ActiveQuery
    reason: str
    text: str | None


class StaticHead(Head):
    """Nobody leaves before the batch ends: the rows of queries that are done are decoded on, what
    comes of it is dropped, and the results are given when the last query of the batch is done."""

    def __init__(self, **others: Any) -> None:
        """As Head's."""
        super().__init__(**others)
        self._kept: dict[int, _Kept] = {}

    def _start_message(self, rule: BatchingRule, spare_bytes: int) -> StartMessage:
        """A row grows with the longest output of its batch, and by one superfluous step."""
        message, waiting = super()._start_message(rule, spare_bytes), self._queries.values()
        capacity = max((query.max_new_tokens for query in waiting), default=1) + 1
        if self._start_token is None:
            capacity += max((len(query.input_ids) for query in waiting), default=1)
        return replace(message, capacity=capacity)

    def _fed(self, index: int) -> ActiveQuery:
        """Of a dead row its last token, again and again."""
        return self._kept[index].active if index in self._kept else self._active[index]

    def _commit(self, group: int, queries: list[int], tokens: list[int]) -> None:
        assert len(queries) == len(tokens), f"{group = } {len(queries) = } {len(tokens) = }"
        now = self._clock()
        for index, token in zip(queries, tokens, strict=True):
            if index in self._active:  # else a dead row, or a superfluous step of the last batch
                self._output_tokens += 1
                self._take_token(self._active[index], token, now)
        if self._kept and not self._active:
            self._end_batch(now)

    def _finish(self, active: ActiveQuery, reason: str, text: str | None, now: float) -> None:
        index = active.query.index
        del self._active[index]
        self._kept[index] = _Kept(active, reason, text)
        self._rule.finish(index)

    def _end_batch(self, now: float) -> None:
        for _, kept in sorted(self._kept.items()):  # in the input's order
            self._give(*kept, now)
        self._kept.clear()
        self._removed = {group: list(range(len(slots))) for group, slots in self._slots.items()}


class ContinuousHead(Head):
    """Queries join a group that decodes on, in the rows of those who left: rows are moved only
    where more have left than join. An evicted query is encoded again with what it generated."""

    def __init__(self, **others: Any) -> None:
        """As Head's."""
        super().__init__(**others)
        self._again: dict[int, ActiveQuery] = {}  # evicted, and waiting to be encoded
        self._partial: dict[int, int] = {}  # query encoded in part -> its group

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self._again)

    def _compose(self, step: Step) -> tuple[StepMessage, Tensor]:
        """The step's header; tokens of those who decode [n], then of what is encoded [T]."""
        group, now = step.group, self._clock()
        for index in step.evicted:
            self._partial.pop(index, None)
            self._again[index] = self._active.pop(index)
            self._leave(group, index)
        chunks = step.chunks or tuple(
            Chunk(query=index, first=0, tokens=self._tokens_of(index)) for index in step.joined)
        entering = self._entering(chunks)
        holes = sorted(self._removed.pop(group, []))
        replaced, removed = holes[:len(entering)], holes[len(entering):]
        slots = self._compact(group, removed)
        resting = tuple(slot for slot, index in enumerate(slots)
                        if self._partial.get(index) == group and slot not in replaced)
        fed = [] if step.kind is StepKind.ENCODE else [
            index for slot, index in enumerate(slots) if slot not in (*replaced, *resting)]
        joined = tuple(self._join(index, now) for index in entering)
        for slot, index in zip(replaced, entering, strict=False):
            slots[slot] = index
        slots += entering[len(replaced):]
        ids = [self._last_token(self._active[index]) for index in fed]
        parts = self._parts(step, chunks, slots, ids)
        return StepMessage(
            kind=step.kind, group=group, phase=step.phase, iteration=step.iteration,
            removed=tuple(removed), replaced=tuple(replaced), joined=joined, parts=parts,
            resting=resting), torch.tensor(ids)

    def _given(self, step: Step) -> list[int]:
        if step.kind is StepKind.ENCODE:
            return list(step.joined)
        gone = {*step.joined, *self._partial}
        return [i for i in self._slots[step.group] if i not in gone] + list(step.joined)

    def _leave(self, group: int, index: int) -> None:
        self._removed.setdefault(group, []).append(self._slots[group].index(index))

    def _tokens_of(self, index: int) -> int:
        """That it is to be encoded with."""
        if index in self._again:
            return _length(self._again[index])
        return len(self._queries[index].input_ids)

    def _entering(self, chunks: Sequence[Chunk]) -> list[int]:
        """Queries that begin. One that had begun was evicted meanwhile, and loses its row."""
        entering = []
        for chunk in chunks:
            if chunk.first > 0:
                continue
            if chunk.query in self._partial:
                self._leave(self._partial.pop(chunk.query), chunk.query)
                self._again[chunk.query] = self._active.pop(chunk.query)
            entering.append(chunk.query)
        return entering

    def _parts(self, step: Step, chunks: Sequence[Chunk], slots: Sequence[int],
               ids: list[int]) -> tuple[Part, ...]:
        """What is encoded; its tokens are added to `ids`."""
        parts = []
        for chunk in chunks:
            active, end = self._active[chunk.query], chunk.first + chunk.tokens
            ids += [*active.query.input_ids, *active.output_ids][chunk.first:end]
            is_last = chunk.query in step.joined
            parts.append(Part(slots.index(chunk.query), chunk.first, chunk.tokens, is_last))
            if is_last:
                self._partial.pop(chunk.query, None)
            else:
                self._partial[chunk.query] = step.group
        return tuple(parts)

    def _join(self, index: int, now: float) -> Joined:
        if index not in self._again:
            return super()._join(index, now)
        active = self._active[index] = self._again.pop(index)
        return Joined(query=index, input_tokens=_length(active),
                      sampling=active.query.sampling)


def _length(active: ActiveQuery) -> int:
    """Tokens so far."""
    return len(active.query.input_ids) + len(active.output_ids)


def head_for(rule: BatchingRule, **others: Any) -> Head:
    """The head that drives a rule of one pool. `others`: as Head's."""
    kind = {SlotUse.KEPT: StaticHead, SlotUse.COMPACTED: Head,
            SlotUse.REUSED: ContinuousHead}[rule.slot_use]
    return kind(rule=rule, **others)
