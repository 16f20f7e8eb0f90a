"""WAA's two heads: the encode pool's (rank 0) reads requests and writes results, the decode pool's
commits tokens. They are asynchronous: each decides by its own rule from what it has heard.

    encode head -> decode head   StartMessage, HandedMessage a batch, StopMessage
    decode head -> encode head   ArrivedMessage a batch, FinishedMessage, StopMessage at the end

The entries themselves go from rank to rank (xrunner.transport.courier), started when a stage has
encoded a batch, before its first tokens are known: those of a query that ends with its first token
are forgotten where they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xrunner.engine.head import Head, Sink
from xrunner.engine.query import ActiveQuery
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.steps import Step
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xrunner.transport.comm import Comm, wait_politely
from xrunner.transport.courier import EntryReceiver
from xrunner.transport.messages import (
    ArrivedMessage,
    FinishedMessage,
    HandedMessage,
    HandedQuery,
    Joined,
    Message,
    StartMessage,
    StopMessage,
    TokensMessage,
)

_LOOK_S = 0.1  # a head with nothing to do looks at least so often whether it is to stop
_REPORT_S = 0.25  # between reports of progress while no query is done


class EncodeHead(Head):
    """Of the encode pool. A group of its rule is taken until its batch has been handed over."""

    def __init__(self, *, rule: WaaEncodeRule, decode_rule: WaaDecodeRule, decode_head: int,
                 sink: Sink, **others: Any) -> None:
        """`decode_rule`: what the decode pool's caches are sized by. `others`: as Head's."""
        super().__init__(rule=rule, sink=sink, **others)
        self._encode_rule, self._decode_rule = rule, decode_rule
        self._decode_head = decode_head
        self._away: dict[int, PreparedQuery] = {}  # handed over, not done
        self._handing: dict[int, tuple[int, list[int]]] = {}  # batch -> (group, queries)
        self._batch_of: dict[int, int] = {}  # group -> batch whose first tokens it awaits
        self._decoded_tokens = 0
        self._has_ended = False  # the decode pool

    def start(self, spare_bytes: int = 0) -> None:
        """Caches of both pools."""
        whole = self._start_message(self._decode_rule, spare_bytes)
        self._comm.send(self._decode_head, whole)
        longest = max((len(q.input_ids) for q in self._queries.values()), default=1)
        own = replace(self._start_message(self._rule, spare_bytes), capacity=longest)
        self._begin(own)

    def run(self) -> bool:
        while self._has_work() and not self._sink.should_stop():
            is_ready = self._can_encode()
            if is_ready:
                step = self._rule.decide()
                assert step is not None
                self._execute(step)
            self._take_in(0.0 if is_ready else _LOOK_S)
            self._sink.progress(self._clock(), self._output_tokens + self._decoded_tokens)
        self._neighbours.stop()
        self._comm.send(self._decode_head, StopMessage())
        self._drain()
        while not self._has_ended:
            self._hear(*self._comm.receive(self._decode_head))
        return not self._has_work()

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self._away)

    def _can_encode(self) -> bool:
        group = self._rule.next_group()
        return group is not None and group not in self._batch_of and all(
            group != taken for taken, _ in self._handing.values())

    def _execute(self, step: Step) -> None:
        self._batch_of[step.group] = step.phase
        super()._execute(step)
        if self._start_token is not None:  # an encoder gives no token
            self._hand_over(step.group, list(step.joined), [])

    def _join(self, index: int, now: float) -> Joined:
        joined = super()._join(index, now)
        query = self._active[index].query
        return replace(joined, leaves=self._start_token is not None or query.max_new_tokens > 1)

    def _take_in(self, wait_s: float) -> None:
        """Whatever has come: first tokens, word from the decode pool."""
        if self._commit_returned():
            wait_s = 0.0
        tokens_from = self._neighbours.route.tokens_from
        sources = [self._decode_head] + ([] if tokens_from is None else [tokens_from])
        while (got := self._comm.poll(*sources, wait_s=wait_s)) is not None:
            self._hear(*got)
            wait_s = 0.0
        self._commit_returned()

    def _hear(self, message: Message, tensor: Any) -> None:
        if isinstance(message, TokensMessage):
            self._awaited.arrive(message.group, tensor)
        elif isinstance(message, ArrivedMessage):
            _, queries = self._handing.pop(message.batch)
            for index in queries:
                self._rule.finish(index)
        elif isinstance(message, FinishedMessage):
            self._decoded_tokens = message.output_tokens
            for result in message.results:
                index = result.query.index
                self._encode_rule.release(index)
                self._sink.finished(replace(result, query=self._away.pop(index)))
        else:
            assert isinstance(message, StopMessage), f"{message = }"
            self._has_ended = True

    def _commit_returned(self) -> bool:
        """Whether there was anything to commit."""
        groups = self._awaited.groups()
        for group in groups:
            for queries, tokens in self._awaited.take(group):
                self._commit(group, queries, tokens)
        return bool(groups)

    def _commit(self, group: int, queries: list[int], tokens: list[int]) -> None:
        now = self._clock()
        self._output_tokens += len(tokens)
        leaving: list[int] = []
        ended: list[int] = []
        for index, token in zip(queries, tokens, strict=True):
            active = self._active[index]
            if not self._take_token(active, token, now):
                leaving.append(index)
                continue
            self._encode_rule.release(index)
            if active.query.max_new_tokens > 1:
                ended.append(index)  # its entries are under way
        self._hand_over(group, leaving, ended)

    def _hand_over(self, group: int, leaving: list[int], ended: list[int]) -> None:
        self._removed[group] = list(range(len(self._slots[group])))
        batch = self._batch_of.pop(group)
        if not leaving and not ended:
            return
        handed = [self._handed(self._active.pop(index)) for index in leaving]
        self._handing[batch] = group, leaving
        self._comm.send(self._decode_head, HandedMessage(
            batch=batch, queries=tuple(handed), ended=tuple(ended)))

    def _handed(self, active: ActiveQuery) -> HandedQuery:
        query = active.query
        self._away[query.index] = query
        return HandedQuery(query=replace(query, input_ids=()), input_tokens=len(query.input_ids),
                           output_ids=tuple(active.output_ids),
                           encode_start_s=active.encode_start_s,
                           first_token_s=active.first_token_s)


class DecodeHead(Head):
    """Of the decode pool. Queries come with a batch whose entries every rank of it has."""

    def __init__(self, *, rule: WaaDecodeRule, receiver: EntryReceiver, comm: Comm,
                 encode_head: int, clock: Callable[[], float], **others: Any) -> None:
        """`others`: as Head's, without a sink: results go to the encode pool's head."""
        self._reports = _Reports(comm, encode_head)
        super().__init__(rule=rule, comm=comm, sink=self._reports, clock=clock, **others)
        self._receiver, self._encode_head = receiver, encode_head
        self._handed: deque[HandedMessage] = deque()
        self._joining: dict[int, HandedQuery] = {}
        self._in_vain: list[int] = []
        self._is_told_to_stop = False

    def start(self, spare_bytes: int = 0) -> None:
        """As the encode pool's head says."""
        message, _ = self._comm.receive(self._encode_head)
        assert isinstance(message, StartMessage), f"{message = }"
        self._begin(message)

    def run(self) -> bool:
        while True:
            self._take_in()
            if self._is_told_to_stop:
                break
            group = self._rule.next_group()
            if group is None:
                wait_politely(self._take_in)
                continue
            self._collect(group)
            step = self._rule.decide()
            if step is not None:
                self._execute(step)
            self._sink.progress(self._clock(), self._output_tokens)
        self._neighbours.stop()
        self._drain()
        self._commit_drained()
        self._reports.end(self._output_tokens)
        return True

    def _take_in(self) -> bool:
        """Word from the encode pool, and queries whose entries are here: whether any came."""
        has_news = False
        while (got := self._comm.poll(self._encode_head)) is not None:
            message, _ = got
            if isinstance(message, HandedMessage):
                self._handed.append(message)
                continue
            assert isinstance(message, StopMessage), f"{message = }"
            self._is_told_to_stop = has_news = True
        # in the order of their encoding, whichever is here first
        while self._handed and self._receiver.is_held(self._handed[0].batch):
            self._arrive(self._handed.popleft())
            has_news = True
        return has_news

    def _arrive(self, message: HandedMessage) -> None:
        self._in_vain += message.ended
        for handed in message.queries:
            index = handed.query.index
            self._joining[index] = handed
            is_taken = self._rule.submit(index, handed.reserve_tokens, handed.input_tokens)
            assert is_taken, f"{index = } has no room in the decode pool"
        self._comm.send(self._encode_head, ArrivedMessage(batch=message.batch))

    def _join(self, index: int, now: float) -> Joined:
        handed = self._joining.pop(index)
        active = ActiveQuery(handed.query, encode_start_s=handed.encode_start_s)
        active.output_ids += handed.output_ids
        active.first_token_s = handed.first_token_s
        self._active[index] = active
        return Joined(query=index, input_tokens=handed.input_tokens, sampling=handed.query.sampling)

    def _ended(self) -> tuple[int, ...]:
        ended, self._in_vain = tuple(self._in_vain), []
        return ended


class _Reports:
    """The decode head's Sink: what is done goes to the encode pool's head, a message a step."""

    def __init__(self, comm: Comm, encode_head: int) -> None:
        self._comm, self._encode_head = comm, encode_head
        self._results: list[FinishedQuery] = []
        self._told_s = 0.0

    def finished(self, result: FinishedQuery) -> None:
        self._results.append(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        if self._results or elapsed_s > self._told_s + _REPORT_S:
            self._told_s = elapsed_s
            self._tell(output_tokens)

    def should_stop(self) -> bool:
        return False

    def end(self, output_tokens: int) -> None:
        self._tell(output_tokens)
        self._comm.send(self._encode_head, StopMessage())

    def _tell(self, output_tokens: int) -> None:
        self._comm.send(self._encode_head, FinishedMessage(
            results=tuple(self._results), output_tokens=output_tokens))
        self._results.clear()
