"""Links between the heads of WAA's two pools.

The encode pool's head (rank 0) reads requests and writes results, the decode pool's commits tokens.
Each decides by its own rule from the messages it has read:

    encode head -> decode head   StartMessage, HandedMessage a batch, InputsMessage, StopMessage
    decode head -> encode head   ReceivedMessage a batch, FinishedMessage, StopMessage at the end

KV goes from rank to rank (xrunner.comm.handover), as soon as a stage has encoded a batch and before
its first tokens are known. KV of a request that ends with its first token is discarded on arrival.
Inputs that the decode pool encodes itself (xrunner.rules.waa) are sent a few at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from xrunner.comm.handover import EntryReceiver
from xrunner.comm.messages import (
    FinishedMessage,
    HandedMessage,
    HandedQuery,
    InputsMessage,
    Message,
    ReceivedMessage,
    StartMessage,
    StopMessage,
    TokensMessage,
)
from xrunner.comm.point_to_point import Comm, wait_politely
from xrunner.engine.head import Head, PoolLink, Supply, note_rest
from xrunner.engine.pool_requests import ActiveQuery
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.room import Waiting
from xrunner.rules.steps import BatchingRule, EncodingRule, Step
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule

_REPORT_S = 0.25  # chosen: seconds between progress reports while no request is done


class ToDecodePool(PoolLink):
    """The encode head's link. A group stays occupied until its batch has been handed over."""

    def __init__(self, comm: Comm, decode_rule: BatchingRule, decode_head: int,
                 supply: Supply | None = None) -> None:
        """`decode_rule`: sizes the decode pool's caches. `decode_head`: rank of its head. `supply`:
        None if all requests are submitted before it runs."""
        super().__init__(supply)
        self._comm, self._decode_head, self._decode_rule = comm, decode_head, decode_rule
        self._away: dict[int, PreparedQuery] = {}  # handed over, not done
        self._handing: dict[int, tuple[int, list[int]]] = {}  # batch -> (group, queries)
        self._batch_of: dict[int, int] = {}  # group -> batch whose first tokens it awaits
        self._decoded_tokens = 0
        self._has_sent_stop = self._has_ended = False  # the decode pool

    def start(self, head: Head) -> StartMessage:
        assert isinstance(head.rule, EncodingRule), f"{head.rule = }"
        self._rule = head.rule
        self._comm.send(self._decode_head, head.requests.start_message(self._decode_rule))
        return replace(head.requests.start_message(self._rule),
                       capacity=head.requests.longest_input)

    def next_group(self, head: Head) -> int | None:
        wait_s = 0.0
        while True:
            self._take_in(head, wait_s)
            self._supply.look(head)
            head.expire()
            self._leave(head)
            if wait_s:
                head.report()
            has_work = head.requests.has_work or self._away or self._supply.is_open
            if not has_work or head.sink.should_stop():
                self._send_stop()
                return None
            group = self._rule.next_group()
            if group is not None and group not in self._batch_of and all(
                    group != taken for taken, _ in self._handing.values()):
                note_rest(head, "")
                return group
            wait_s = self.rest(head)

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None:
        self._batch_of[step.group] = step.phase
        if not gives_tokens:  # an encoder
            self._hand_over(head, step.group, [])

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        for active in done:
            self._rule.release(active.query.index)
        # their KV is under way, as for all that might have gone on
        self._hand_over(head, group, [active.query.index for active in done
                                      if active.query.max_new_tokens > 1])

    def close(self, head: Head) -> bool:
        self._send_stop()
        while not self._has_ended:
            self._hear(head, *self._comm.receive(self._decode_head))
        return self._supply.close(head) and not self._away

    def _send_stop(self) -> None:
        if not self._has_sent_stop:
            self._has_sent_stop = True
            self._comm.send(self._decode_head, StopMessage())

    def _take_in(self, head: Head, wait_s: float) -> None:
        """Handles all messages that have come: first tokens, and reports from the decode pool."""
        if head.commit_returned():
            wait_s = 0.0
        tokens_from = head.neighbours.route.tokens_from
        sources = (self._decode_head, *(() if tokens_from is None else (tokens_from,)))
        while (got := self._comm.poll(*sources, *self._supply.sources,
                                      wait_s=wait_s)) is not None:
            self._hear(head, *got)
            wait_s = 0.0
        head.commit_returned()

    def _hear(self, head: Head, message: Message, tensor: Tensor | None) -> None:
        if isinstance(message, TokensMessage):
            assert tensor is not None, f"{message = }"
            head.pending.arrive(message.group, tensor)
        elif isinstance(message, ReceivedMessage):
            _, queries = self._handing.pop(message.batch)
            for index in queries:
                self._rule.finish(index)
        elif isinstance(message, FinishedMessage):
            head.output_tokens += message.output_tokens - self._decoded_tokens
            self._decoded_tokens = message.output_tokens
            if isinstance(self._rule, WaaEncodeRule):
                self._rule.note_begun(message.begun)
                for phase, joined in message.joined:
                    self._rule.system.note_joined(joined, phase)
            for result in message.results:
                index = result.query.index
                self._rule.release(index)
                head.sink.finished(replace(result, query=self._away.pop(index)))
        elif isinstance(message, StopMessage):
            self._has_ended = True
        else:
            self._supply.hear(head, message)

    def _leave(self, head: Head) -> None:
        """Sends the decode pool the inputs that it is to encode itself."""
        if self._has_sent_stop or not isinstance(self._rule, WaaEncodeRule):
            return
        indices = [one.query for one in self._rule.share_inputs()]
        if indices and head.requests.on_begin is not None:
            head.requests.on_begin(indices)
        given = head.requests.remove(indices)
        if given:
            self._away.update((query.index, query) for query in given)
            self._comm.send(self._decode_head, InputsMessage(queries=tuple(given)))

    def _hand_over(self, head: Head, group: int, ended: Sequence[int]) -> None:
        """Hands the group's requests to the decode pool. `ended`: done, but their KV was sent."""
        batch = self._batch_of.pop(group)
        if self._has_sent_stop:
            return  # nobody would receive them
        leaving = head.requests.hand_off(group)
        if not leaving and not ended:
            return
        handed = tuple(self._handed(active) for active in leaving)
        self._handing[batch] = group, [active.query.index for active in leaving]
        self._comm.send(self._decode_head, HandedMessage(
            batch=batch, queries=handed, ended=tuple(ended)))

    def _handed(self, active: ActiveQuery) -> HandedQuery:
        query = active.query
        self._away[query.index] = query
        return HandedQuery(query=replace(query, input_ids=()), input_tokens=active.input_tokens,
                           output_ids=tuple(active.output_ids), likelihoods=active.likelihoods,
                           encode_start_s=active.encode_start_s, first_token_s=active.first_token_s)


class FromEncodePool(PoolLink):
    """The decode head's link and its sink. Requests of a batch join once every rank has their KV.
    Results go to the encode head, a message a step."""

    def __init__(self, comm: Comm, receiver: EntryReceiver, encode_head: int) -> None:
        super().__init__()
        self._comm, self._receiver, self._encode_head = comm, receiver, encode_head
        self._handed: deque[HandedMessage] = deque()
        self._is_to_stop = False
        self._results: list[FinishedQuery] = []
        self._begun: list[int] = []  # inputs begun here, not reported yet
        self._joined: list[tuple[int, tuple[int, ...]]] = []  # as of FinishedMessage, not reported
        self._reported_s = 0.0

    def start(self, head: Head) -> StartMessage:
        message, _ = self._comm.receive(self._encode_head)
        assert isinstance(message, StartMessage), f"{message = }"
        head.requests.on_begin = self._begun.extend
        return message

    def next_group(self, head: Head) -> int | None:
        self._take_in(head)
        while not self._is_to_stop:
            if (group := head.next_group()) is not None:
                return group
            wait_politely(lambda: self._take_in(head))
        return None

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None:
        joined = (*step.handed, *step.joined)
        if joined and isinstance(head.rule, WaaDecodeRule) and head.rule.tells_joined:
            self._joined.append((step.phase, joined))

    def close(self, head: Head) -> bool:
        self._report(head.output_tokens)
        self._comm.send(self._encode_head, StopMessage())
        return True

    def _take_in(self, head: Head) -> bool:
        """Handles messages from the encode pool and requests whose KV is here; whether any came."""
        has_news = False
        while (got := self._comm.poll(self._encode_head)) is not None:
            message, _ = got
            if isinstance(message, HandedMessage):
                self._handed.append(message)
                continue
            if isinstance(message, InputsMessage):
                self._take(head, message.queries)
                has_news = True
                continue
            assert isinstance(message, StopMessage), f"{message = }"
            self._is_to_stop = has_news = True
        # in the order of their encoding, whichever arrives first
        while self._handed and self._receiver.has_arrived(self._handed[0].batch):
            self._arrive(head, self._handed.popleft())
            has_news = True
        return has_news

    def _take(self, head: Head, queries: Sequence[PreparedQuery]) -> None:
        assert isinstance(head.rule, WaaDecodeRule), f"{head.rule = }"
        for query in queries:
            head.requests.add(query)
            head.rule.submit_input(Waiting(query.index, query.reserve_tokens, len(query.input_ids)))

    def _arrive(self, head: Head, message: HandedMessage) -> None:
        head.requests.ended_elsewhere += message.ended
        for handed in message.queries:
            head.requests.add(ActiveQuery(
                handed.query, handed.encode_start_s, handed.input_tokens, handed.first_token_s,
                list(handed.output_ids), handed.likelihoods))
            index = handed.query.index
            is_taken = head.rule.submit(index, handed.reserve_tokens, handed.input_tokens)
            assert is_taken, f"{index = } has no room in the decode pool"
        self._comm.send(self._encode_head, ReceivedMessage(batch=message.batch))

    def finished(self, result: FinishedQuery) -> None:
        self._results.append(replace(result, query=replace(result.query, input_ids=())))

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        is_new = self._results or self._begun or self._joined
        if is_new or elapsed_s > self._reported_s + _REPORT_S:
            self._reported_s = elapsed_s
            self._report(output_tokens)

    def should_stop(self) -> bool:
        return False

    def _report(self, output_tokens: int) -> None:
        self._comm.send(self._encode_head, FinishedMessage(
            results=tuple(self._results), output_tokens=output_tokens, begun=tuple(self._begun),
            joined=tuple(self._joined)))
        for told in (self._results, self._begun, self._joined):
            told.clear()
