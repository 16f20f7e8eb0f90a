"""Replicas: several deployments of the model, each with a head of its own, that share one job.

    rank 0 -> head of a replica   PortionMessage: Requests for it, a few at a time. How many of
                                  unbegun ones to give back.
    head of a replica -> rank 0   ReplicaMessage: How many have begun; results; requests given
                                  back; its end.
    rank 0 -> head of a replica   StopMessage: Its end is known.

Rank 0 routes requests (xrunner.rules.routing), writes all results, and is the first replica's head.
It reads messages between its own steps and waits for others only when idle. Each replica's head
reads its requests from the spool. A request belongs to its head until the head gives it back. So
each is answered once, however messages cross."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xgpt.core.errors import XgptError
from xrunner.comm.messages import Message, PortionMessage, ReplicaMessage, StopMessage
from xrunner.comm.point_to_point import Comm
from xrunner.engine.head import Head, Supply
from xrunner.engine.pipeline import DiedAlone, ExecutorDied
from xrunner.engine.pool_requests import lengths_so_far
from xrunner.files.deaths import Deaths, EngineDeath
from xrunner.files.sink import RunSink
from xrunner.query import EXPIRED, FinishedQuery, PreparedQuery
from xrunner.rank.world import Replica
from xrunner.rules.changes import Changeable, Changes
from xrunner.rules.routing import Load, Router


@dataclass(slots=True, kw_only=True)
class ReplicaAccount:
    """Rank 0's account of one replica. `given`: numbers of its requests in run order, in which they
    begin unless batches are formed. begun, done: how many of them have. `at_work`: (input, output)
    tokens of each active request, by index."""

    given: list[int] = field(default_factory=list)
    begun: int = 0
    done: int = 0
    output_tokens: int = 0
    at_work: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    has_ended: bool = False
    is_gone: bool = False  # it will not start again

    @property
    def load(self) -> Load:
        return Load(len(self.given) - self.begun, self.begun - self.done)

    def forget_expired(self, results: Sequence[FinishedQuery], order: Sequence[int]) -> int:
        """Removes requests that will not begin; returns their number. `order`: index of each
        number."""
        gone = {one.query.index for one in results if one.finish_reason == EXPIRED}
        if gone:
            self.remove(gone, order)
        return len(gone)

    def remove(self, indices: Collection[int], order: Sequence[int]) -> list[int]:
        """Removes requests that have not begun; returns their numbers. Arguments as above."""
        places = [place for place in self.given if order[place] in indices]
        self.given = [place for place in self.given if order[place] not in indices]
        assert len(places) == len(indices), f"{places = } {indices = }"
        return places


_REPORT_S = 0.25  # chosen: seconds between messages of a replica without news


class ToReplicas(Supply):
    """Rank 0's supply of all heads, and the sink of its own.

    Where what executes a replica's steps dies, its requests go to others while it starts again."""

    def __init__(self, comm: Comm, sink: RunSink, router: Router,
                 queries: Sequence[PreparedQuery], order: Sequence[int],
                 replicas: Sequence[Replica], deaths: Deaths | None = None) -> None:
        """`queries`: the job's, by index. `order`: indices to answer, in run order. `replicas`:
        all, in their order. `deaths`: record of those of engines, where they can die."""
        self._comm, self.sink, self.router, self._queries = comm, sink, router, queries
        self._deaths = deaths
        self._order = order
        self.progress, self.should_stop = sink.progress, sink.should_stop
        self._accounts = [ReplicaAccount() for _ in replicas]
        self._heads = tuple(replica.head for replica in replicas[1:])
        self._has_sent_last, self._num_expired = False, 0
        self.changes: dict[tuple[int, int], Changes] = {}  # sent, by (replica, revision)
        self.own: Head | None = None  # rank 0's

    def start(self, head: Head) -> None:
        """Sends every replica its first requests."""
        self.own = head
        for replica in range(len(self._accounts)):
            self._top_up(head, replica)
        self._supply(head, 0)

    @property
    def sources(self) -> tuple[int, ...]:
        """Heads of the other replicas that have not ended."""
        return tuple(rank for rank, replica in zip(self._heads, self._accounts[1:], strict=True)
                     if not replica.has_ended)

    @property
    def is_open(self) -> bool:
        """Whether a request is not given out, or another replica is still at work."""
        return not self.router.is_empty or bool(self.sources)

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        while (sources := self.sources) and (
                got := self._comm.poll(*sources, wait_s=wait_s)) is not None:
            self.hear(head, got[0])
            wait_s = 0.0
        self._note_begun(0)
        if head.executor.is_ready:
            self.router.away.discard(0)
        self._supply(head, 0)

    def hear(self, head: Head, message: Message) -> None:
        assert isinstance(message, ReplicaMessage), f"{message = }"
        replica = self._accounts[message.replica]
        head.output_tokens += message.output_tokens - replica.output_tokens
        replica.output_tokens, replica.has_ended = message.output_tokens, message.has_ended
        self._num_expired += replica.forget_expired(message.results, self._order)
        if not message.died:
            self._note_begun(message.replica, message.begun)
        for result in message.results:
            self.finished(replace(result, query=self._queries[result.query.index],
                                  replica=message.replica))
        if message.at_work is not None:
            replica.at_work = message.at_work
        if message.changed is not None and self.sink.launcher is not None:
            revision, phase = message.changed
            self.sink.launcher.note_change(message.replica, revision, phase, head.clock(),
                                            self.changes.pop((message.replica, revision)))
        if message.given_back is not None:
            self._come_back(head, message.replica, message.given_back)
        if message.has_ended:
            self._comm.send(self._heads[message.replica - 1], StopMessage())
            return
        if message.died:
            self._lose(head, message.replica, message.lost, message.died)
        elif message.is_ready and not replica.is_gone:
            self.router.away.discard(message.replica)
        self._supply(head, message.replica)

    def close(self, head: Head) -> bool:
        """Ends the other replicas; returns whether every request is done."""
        for rank in self.sources:
            self._comm.send(rank, PortionMessage(is_last=True, stops=True))
        self._has_sent_last = True
        while sources := self.sources:
            message, _ = self._comm.receive(*sources)
            self.hear(head, message)
        done = sum(account.done for account in self._accounts)
        return done + self._num_expired == len(self._order)

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of active requests of all replicas, by index. Those of other
        replicas are as last reported."""
        own = {} if self.own is None else lengths_so_far(self.own.requests)
        return own | {index: lengths for replica in self._accounts[1:]
                      for index, lengths in replica.at_work.items()}

    def finished(self, result: FinishedQuery) -> None:
        replica = result.replica or 0
        if not replica:
            self._num_expired += self._accounts[0].forget_expired([result], self._order)
            if result.finish_reason != EXPIRED:
                self._note_begun(0)
        self._accounts[replica].done += result.finish_reason != EXPIRED
        self.sink.finished(replace(result, replica=replica))

    def died(self, head: Head, death: ExecutorDied) -> None:
        lost = head.abandon()
        self._lose(head, 0, lost, str(death))
        if not self._accounts[0].is_gone:
            head.start()

    def _lose(self, head: Head, replica: int, lost: Sequence[Sequence[int]], why: str) -> None:
        """Gives the requests of a replica to others. `lost`: (begun, not begun). Those that were
        begun at two deaths are left to the launcher. Raises XgptError if no replica is left,
        DiedAlone."""
        account, (begun, new), deaths = self._accounts[replica], lost, self._deaths
        assert deaths is not None, f"{why = }"
        if not deaths.suspects.isdisjoint(begun):  # that run by themselves
            raise DiedAlone(why)
        places = account.remove({*begun, *new}, self._order)
        account.begun, account.at_work = account.done, {}
        deaths.add(begun, EngineDeath(replica, len(places), why))
        account.is_gone = deaths.restarts_left < 0
        if account.is_gone and replica:
            self._comm.send(self._heads[replica - 1], PortionMessage(is_last=True))
        if self._has_sent_last or self.sink.should_stop():
            return  # the run ends before all are done
        here = [number for number, one in enumerate(self._accounts) if not one.is_gone]
        if not here:
            raise XgptError(f"no replica is left, and all restarts are used up (run.restarts). "
                            f"Last: {why}; the same command goes on")
        suspects = deaths.suspects
        kept = [place for place in places if self._order[place] not in suspects]
        ready = [number for number in here if number not in self.router.away | {replica}]
        self.router.give_back(replica, kept, ready or here)
        for other in ready:
            self._top_up(head, other)

    def _supply(self, head: Head, replica: int) -> None:
        """Supplies a replica that has reported, from others if nothing is left to give out. Once
        all have begun all, tells them that no more will come."""
        if self._has_sent_last:
            return
        self._top_up(head, replica)
        for giver, takers in self.router.recalls([account.load for account in self._accounts]):
            if giver:
                self._comm.send(self._heads[giver - 1], PortionMessage(wanted=len(takers)))
            else:
                self._note_begun(0)
                self._come_back(head, 0, head.take_back(len(takers)))
        # what dies gives back what is active, too
        counted = [account.load.waiting + account.load.active * (self._deaths is not None)
                   for account in self._accounts]
        if self.router.is_done and not any(counted):
            self._has_sent_last = True
            for rank in self.sources:
                self._comm.send(rank, PortionMessage(is_last=True))

    def _come_back(self, head: Head, replica: int, indices: Sequence[int]) -> None:
        """Takes requests that a replica has given back, and gives them to others."""
        self.router.take_back(replica, self._accounts[replica].remove({*indices}, self._order))
        if self._has_sent_last:
            return  # the run ends before all are done
        for other in range(len(self._accounts)):
            if self.router.num_left(other):
                self._top_up(head, other)

    def _note_begun(self, replica: int, reported: int = 0) -> None:
        """Records how many requests of a replica have begun, and tells launcher and router. `told`:
        number reported by another replica. Rank 0's own number is looked up."""
        account = self._accounts[replica]
        begun = reported if replica or self.own is None else (
            len(account.given) - self.own.requests.num_waiting)
        if begun == account.begun:
            return
        if self.sink.launcher is not None:
            self.sink.launcher.begin([
                self._order[place] for place in account.given[account.begun:begun]])
        self.router.note_begun(replica, begun - account.begun)
        account.begun = begun

    def _top_up(self, head: Head, replica: int) -> None:
        account = self._accounts[replica]
        if replica in self.router.away:  # it is not ready
            return
        places = self.router.top_up(replica, account.load)
        account.given += places
        given = [self._order[place] for place in places]
        arrived_s = self.router.arrived_s
        arrival_s = tuple(arrived_s[place] for place in places if arrived_s)
        if given:
            self.sink.underway.begin(given)  # the replica knows which of them have begun
        if replica and given:
            self._comm.send(self._heads[replica - 1], PortionMessage(
                queries=tuple(given), arrival_s=arrival_s))
        if not replica:
            submit(head, map(self._queries.__getitem__, given), arrival_s)
        head.expire()


def submit(head: Head, queries: Iterable[PreparedQuery], arrival_s: Sequence[float]) -> None:
    """Submits requests that a head is given. `arrival_s`: as in PortionMessage."""
    for place, query in enumerate(queries):
        is_taken = head.submit(query.arrived(arrival_s[place], head.clock()) if arrival_s
                               else query)
        assert is_taken, f"{query.id = } {query.reserve_tokens = }"


class FromRankZero(Supply):
    """Supply and sink of another replica's head."""

    def __init__(self, comm: Comm, replica: int, query_of: Callable[[int], PreparedQuery], *,
                 reports_lengths: bool = False, note: str = "") -> None:
        """`query_of`: reads a request from the spool. `reports_lengths`: report active lengths.
        `note`: as of Supply, if requests arrive over time."""
        self.note = note
        self._comm, self._replica, self._query_of = comm, replica, query_of
        self._reports_lengths = reports_lengths
        self._given = 0
        self._is_last = self._is_to_stop = False
        self._results: list[FinishedQuery] = []
        self._reported_begun, self._reported_s = 0, 0.0
        self._changed: tuple[int, int] | None = None
        self._given_back: tuple[int, ...] | None = None
        self._is_ready = True

    @property
    def sources(self) -> tuple[int, ...]:
        return (0,)

    @property
    def is_open(self) -> bool:
        return not self._is_last

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        self._report(head)
        while (got := self._comm.poll(0, wait_s=wait_s)) is not None:
            self.hear(head, got[0])
            wait_s = 0.0

    def hear(self, head: Head, message: Message) -> None:
        assert isinstance(message, PortionMessage), f"{message = }"
        submit(head, map(self._query_of, message.queries), message.arrival_s)
        self._given += len(message.queries)
        head.expire()
        self._is_last, self._is_to_stop = (self._is_last or message.is_last,
                                           self._is_to_stop or message.stops)
        if message.change is not None:
            assert isinstance(head.rule, Changeable), f"{head.rule = }"
            phase = head.rule.next_phase
            head.changes = message.change
            head.rule.change(message.change, phase=phase)
            self._changed = message.revision, phase
        if message.wanted:
            self._given_back = tuple(head.take_back(message.wanted))
            self._given -= len(self._given_back)
            self._report(head)

    def died(self, head: Head, death: ExecutorDied) -> None:
        begun, new = head.abandon()
        self._given -= len(begun) + len(new)
        self._comm.send(0, ReplicaMessage(
            replica=self._replica, begun=self._given, output_tokens=head.output_tokens,
            results=tuple(self._results), died=str(death), is_ready=False,
            lost=(tuple(begun), tuple(new))))
        self._results.clear()
        self._reported_begun, self._is_ready = self._given, False
        head.start()

    def close(self, head: Head) -> bool:
        self._report(head, has_ended=True)
        # messages of rank 0 on their way are not for the next run of these ranks
        while not isinstance(self._comm.receive(0)[0], StopMessage):
            pass
        return True

    def finished(self, result: FinishedQuery) -> None:
        self._given -= result.finish_reason == EXPIRED
        # rank 0 has its input tokens
        self._results.append(replace(result, query=replace(result.query, input_ids=())))

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Does nothing: `look` reports to rank 0 before the next step."""

    def should_stop(self) -> bool:
        return self._is_to_stop

    def _report(self, head: Head, *, has_ended: bool = False) -> None:
        begun, now_s = self._given - head.requests.num_waiting, head.clock()
        is_resting = bool(self.note) and not head.requests.has_work  # until the next arrival
        is_time = now_s > self._reported_s + _REPORT_S and not is_resting
        if not (has_ended or is_time or self._results or self._changed is not None
                or self._given_back is not None or begun != self._reported_begun
                or head.executor.is_ready != self._is_ready):
            return
        self._is_ready = head.executor.is_ready
        self._comm.send(0, ReplicaMessage(
            replica=self._replica, begun=begun, output_tokens=head.output_tokens,
            results=tuple(self._results), changed=self._changed,
            given_back=self._given_back, has_ended=has_ended, is_ready=self._is_ready,
            at_work=lengths_so_far(head.requests) if is_time and self._reports_lengths else None))
        self._reported_begun, self._changed, self._given_back = begun, None, None
        if is_time:
            self._reported_s = now_s
        self._results.clear()
