"""The first rank's loop over static batches: a query that is done stays in its batch, and its
result is there when the batch is (paper section 2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from xrunner.comm import Comm
from xrunner.head import Sink
from xrunner.messages import Joined, StartMessage, StepMessage
from xrunner.pipeline import Executor, Neighbours
from xrunner.query import ActiveQuery, FinishedQuery, PreparedQuery
from xrunner.route import Route
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import Step, StepKind


class StaticHead:
    """decide -> execute -> commit by a StaticRule, on ranks that are one tensor-parallel group.

    It decides as the simulator's replay does: a group's tokens are taken up when its next decode
    step is due.
    """

    def __init__(self, *, rule: StaticRule, executor: Executor, comm: Comm, route: Route,
                 sink: Sink, eos_ids: frozenset[int], decode_text: Callable[[Sequence[int]], str],
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._rule, self._executor, self._sink = rule, executor, sink
        self._neighbours = Neighbours(comm, route)
        self._eos_ids, self._decode_text, self._clock = eos_ids, decode_text, clock
        self._queries: dict[int, PreparedQuery] = {}
        self._rows: dict[int, list[ActiveQuery]] = {}  # group -> its rows
        self._tokens: dict[int, list[int]] = {}  # group -> of each row, not taken up yet
        self._endings: dict[int, tuple[str, str | None]] = {}  # query -> reason, text if cut
        self._output_tokens = 0

    def submit(self, query: PreparedQuery) -> bool:
        """False if the query can never fit the schedule's KV budget."""
        if not self._rule.submit(query.index, query.reserve_tokens, len(query.input_ids)):
            return False
        self._queries[query.index] = query
        return True

    def start(self) -> None:
        message = StartMessage(num_groups=self._rule.num_groups, slots=self._rule.group_max_active,
                               capacity=max((q.reserve_tokens for q in self._queries.values()),
                                            default=1))
        self._neighbours.share(message)
        self._executor.start(message)

    def run(self) -> bool:
        """True when every query is done, False when stopped: the batch under way is then dropped,
        and encoded again by the run that goes on. After `start`."""
        is_complete = True
        while (group := self._rule.next_group()) is not None:
            if self._rule.needs_tokens:
                self._take_up(group)
            if self._sink.should_stop():
                is_complete = False
                break
            step = self._rule.decide()
            if step is not None:
                self._execute(step)
            self._sink.progress(self._clock(), self._output_tokens)
        self._neighbours.stop()
        return is_complete

    def _execute(self, step: Step) -> None:
        joined: tuple[Joined, ...] = ()
        if step.kind is StepKind.ENCODE:
            new = self._join(step)
            joined = tuple(Joined(query=a.query.index, input_tokens=len(a.query.input_ids),
                                  sampling=a.query.sampling) for a in new)
            ids = [token for active in new for token in active.query.input_ids]
        else:
            ids = self._tokens.pop(step.group)
        message = StepMessage(kind=step.kind, group=step.group, phase=step.phase,
                              iteration=step.iteration, joined=joined)
        inputs = torch.tensor(ids)
        self._neighbours.share(message, inputs)
        out = self._executor.execute(message, inputs)
        assert out is not None, f"{step = }"
        self._tokens.setdefault(step.group, []).extend(out.tolist())

    def _join(self, step: Step) -> list[ActiveQuery]:
        now = self._clock()
        new = [ActiveQuery(self._queries.pop(index), encode_start_s=now) for index in step.joined]
        self._rows.setdefault(step.group, []).extend(new)
        return new

    def _take_up(self, group: int) -> None:
        """The tokens of the group's last steps. They stay its rows' next inputs."""
        rows = self._rows.get(group, [])
        for active, token in zip(rows, self._tokens.get(group, []), strict=True):
            if active.query.index not in self._endings:
                self._take_token(active, token)
        if sum(map(len, self._rows.values())) == len(self._endings):
            self._end_batch()

    def _take_token(self, active: ActiveQuery, token: int) -> None:
        self._output_tokens += 1
        reason = active.append(token, self._eos_ids)
        text = self._stopped_text(active) if active.query.stop else None
        if reason is not None or text is not None:
            self._endings[active.query.index] = ("stop" if text is not None else str(reason), text)
            self._rule.finish(active.query.index)

    def _end_batch(self) -> None:
        now = self._clock()
        batch = [active for rows in self._rows.values() for active in rows]
        for active in sorted(batch, key=lambda a: a.query.index):
            reason, text = self._endings[active.query.index]
            self._sink.finished(FinishedQuery(
                query=active.query, output_ids=tuple(active.output_ids), finish_reason=reason,
                encode_start_s=active.encode_start_s, latency_s=now - active.encode_start_s,
                text=self._decode_text(active.output_ids) if text is None else text))
        self._rows, self._tokens, self._endings = {}, {}, {}

    def _stopped_text(self, active: ActiveQuery) -> str | None:
        """The text up to the first stop string, once one has appeared."""
        text = self._decode_text(active.output_ids)
        ends = [at for stop in active.query.stop if (at := text.find(stop)) >= 0]
        return text[:min(ends)] if ends else None
