"""Replicas: whole copies of a deployment, each with a head of its own, which share one job.

    rank 0 -> head of a replica   PortionMessage: which queries are its own, a few at a time
    head of a replica -> rank 0   ReplicaMessage: how many have begun, which are done; its end
    rank 0 -> head of a replica   StopMessage: its end is known

Rank 0 routes (xrunner.rules.routing) and writes all results, and it is the first replica's head
besides: between its own steps it takes up what has come, and never waits for the others while it
has work. Each replica's head reads its queries from the spool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xgpt.core.controls import EvenBatches
from xrunner.engine.head import Head
from xrunner.io.sink import RunSink
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.changes import Changeable, Changes
from xrunner.rules.routing import Router, Window, rra_window
from xrunner.rules.rra import PhaseControls
from xrunner.transport.comm import Comm
from xrunner.transport.messages import Message, PortionMessage, ReplicaMessage, StopMessage

_TELL_S = 0.25  # between words of a replica that has no news


@dataclass(slots=True, kw_only=True)
class _Account:
    """What rank 0 knows of one replica. `begun` and `done` count queries, of those `given`."""

    given: list[int] = field(default_factory=list)
    begun: int = 0
    done: int = 0
    output_tokens: int = 0
    at_work: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def waiting(self) -> int:
        return len(self.given) - self.begun

    @property
    def active(self) -> int:
        return self.begun - self.done


class ToReplicas:
    """Rank 0's: the supply of its own head and of all others, and the sink of its own."""

    def __init__(self, comm: Comm, sink: RunSink, router: Router,
                 queries: Sequence[PreparedQuery], order: Sequence[int],
                 heads: Sequence[int]) -> None:
        """`queries`: of the job, by index; `order`: the indices of those to be answered, as they
        are taken up; `heads`: the ranks of the other replicas' heads, in their order."""
        self._comm, self._sink, self._router = comm, sink, router
        self._queries, self._order = queries, order
        self._heads = tuple(heads)
        self._replicas = [_Account() for _ in range(1 + len(heads))]
        self._has_told_last = False
        self._begun_here: Callable[[], int] = lambda: 0  # of rank 0's own queries

    def start(self, head: Head) -> None:
        """Every replica gets its first portion."""
        own = self._replicas[0]
        self._begun_here = lambda: len(own.given) - head.roster.num_waiting
        for replica in range(len(self._replicas)):
            self._top_up(head, replica)

    @property
    def sources(self) -> tuple[int, ...]:
        """The heads that have something to say yet."""
        return tuple(rank for rank, replica in zip(self._heads, self._replicas[1:], strict=True)
                     if not replica.has_ended)

    @property
    def is_open(self) -> bool:
        """Whether there is a query that nobody has been given, or another replica is at work."""
        return not self._router.is_empty or bool(self.sources)

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        while (sources := self.sources) and (
                got := self._comm.poll(*sources, wait_s=wait_s)) is not None:
            self.hear(head, got[0])
            wait_s = 0.0
        self._note_begun(0, self._begun_here())
        self._top_up(head, 0)

    def hear(self, head: Head, message: Message) -> None:
        assert isinstance(message, ReplicaMessage), f"{message = }"
        replica = self._replicas[message.replica]
        head.output_tokens += message.output_tokens - replica.output_tokens
        replica.output_tokens, replica.has_ended = message.output_tokens, message.has_ended
        self._note_begun(message.replica, message.begun)
        for result in message.results:
            self._finish(message.replica, replace(
                result, query=self._queries[result.query.index]))
        if message.at_work is not None:
            replica.at_work = message.at_work
        if message.changed is not None and self._sink.launcher is not None:
            self._sink.launcher.taken_by(message.replica, *message.changed, head.clock())
        if message.has_ended:
            self._comm.send(self._heads[message.replica - 1], StopMessage())
        else:
            self._top_up(head, message.replica)

    def close(self, head: Head) -> bool:
        """Ends the other replicas; whether every query is done."""
        for rank in self.sources:
            self._comm.send(rank, PortionMessage(is_last=True, stops=True))
        self._has_told_last = True
        while sources := self.sources:
            message, _ = self._comm.receive(*sources)
            self.hear(head, message)
        return sum(replica.done for replica in self._replicas) == len(self._order)

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of the active queries of the other replicas, as they said last."""
        return {index: lengths for replica in self._replicas[1:]
                for index, lengths in replica.at_work.items()}

    def change(self, controls: Changes, window: Window | None) -> None:
        """The other replicas' rules are to obey these too. `window` None: it stays."""
        self._router.window = window or self._router.window
        launcher = self._sink.launcher
        assert launcher is not None, "who changes"
        for rank in self.sources:
            self._comm.send(rank, PortionMessage(change=controls, revision=launcher.revision))

    def finished(self, result: FinishedQuery) -> None:
        self._note_begun(0, self._begun_here())
        self._finish(0, result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        self._sink.progress(elapsed_s, output_tokens)

    def should_stop(self) -> bool:
        return self._sink.should_stop()

    def _finish(self, replica: int, result: FinishedQuery) -> None:
        self._replicas[replica].done += 1
        self._sink.finished(replace(result, replica=replica))

    def _note_begun(self, replica: int, begun: int) -> None:
        """So many of those given have begun; the launcher counts queries in this order."""
        account = self._replicas[replica]
        if begun > account.begun and self._sink.launcher is not None:
            self._sink.launcher.begin(account.given[account.begun:begun])
        account.begun = begun

    def _top_up(self, head: Head, replica: int) -> None:
        if self._has_told_last:
            return
        account = self._replicas[replica]
        given = [self._order[place] for place in self._router.top_up(
            replica, waiting=account.waiting, active=account.active)]
        account.given += given
        if given:
            self._sink.underway.begin(given)  # which of them have begun, others know
        if replica and given:
            self._comm.send(self._heads[replica - 1], PortionMessage(queries=tuple(given)))
        for query in () if replica else map(self._queries.__getitem__, given):
            assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
        if self._router.is_empty:
            self._has_told_last = True
            for rank in self.sources:
                self._comm.send(rank, PortionMessage(is_last=True))


class OfEveryReplica:
    """What the launcher changes while a job runs: the rules of all replicas, each from the next
    phase of its own on."""

    def __init__(self, rule: Changeable, others: ToReplicas, even: EvenBatches) -> None:
        """`rule`: rank 0's; `even`: its encode batches."""
        self._rule, self._others, self._even = rule, others, even
        self.num_groups = rule.num_groups

    @property
    def next_phase(self) -> int:
        return self._rule.next_phase

    def change(self, controls: Changes, *, phase: int) -> None:
        self._rule.change(controls, phase=phase)
        # smaller limits need no smaller window: what has been given out waits there
        self._others.change(controls, rra_window(
            controls.encode_batch, self.num_groups, self._even) if isinstance(
                controls, PhaseControls) else None)


class FromRankZero:
    """Another replica's: the supply of its head, and its sink."""

    def __init__(self, comm: Comm, replica: int, query_of: Callable[[int], PreparedQuery], *,
                 tells_lengths: bool = False) -> None:
        """`query_of` reads a query from the spool. `tells_lengths`: of the queries at work."""
        self._comm, self._replica, self._query_of = comm, replica, query_of
        self._tells_lengths = tells_lengths
        self._given = 0
        self._is_last = self._is_to_stop = False
        self._results: list[FinishedQuery] = []
        self._told_begun, self._told_s = 0, 0.0
        self._changed: tuple[int, int] | None = None

    sources = (0,)

    @property
    def is_open(self) -> bool:
        return not self._is_last

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        self._tell(head)
        while (got := self._comm.poll(0, wait_s=wait_s)) is not None:
            self.hear(head, got[0])
            wait_s = 0.0

    def hear(self, head: Head, message: Message) -> None:
        assert isinstance(message, PortionMessage), f"{message = }"
        for index in message.queries:
            query = self._query_of(index)
            assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
        self._given += len(message.queries)
        self._is_last, self._is_to_stop = (self._is_last or message.is_last,
                                           self._is_to_stop or message.stops)
        if message.change is not None:
            assert isinstance(head.rule, Changeable), f"{head.rule = }"
            phase = head.rule.next_phase
            head.rule.change(message.change, phase=phase)
            self._changed = message.revision, phase

    def close(self, head: Head) -> bool:
        self._tell(head, has_ended=True)
        # what rank 0 has sent by then is not for the next run of these ranks
        while not isinstance(self._comm.receive(0)[0], StopMessage):
            pass
        return True

    def finished(self, result: FinishedQuery) -> None:
        # its input's tokens lie with rank 0
        self._results.append(replace(result, query=replace(result.query, input_ids=())))

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Rank 0 is told before the next step (`look`)."""

    def should_stop(self) -> bool:
        return self._is_to_stop

    def _tell(self, head: Head, *, has_ended: bool = False) -> None:
        begun, now_s = self._given - head.roster.num_waiting, head.clock()
        is_time = now_s > self._told_s + _TELL_S
        if not (has_ended or is_time or self._results or self._changed is not None
                or begun != self._told_begun):
            return
        self._comm.send(0, ReplicaMessage(
            replica=self._replica, begun=begun, output_tokens=head.output_tokens,
            results=tuple(self._results), changed=self._changed, has_ended=has_ended,
            at_work=head.lengths_so_far() if is_time and self._tells_lengths else None))
        self._told_begun, self._changed = begun, None
        if is_time:
            self._told_s = now_s
        self._results.clear()
