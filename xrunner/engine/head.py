"""The head: a pool's first rank, which decides by the batching rule, executes its part of the first
stage, and commits the tokens that come back. It is the same for every policy. The rule, the slots
(xrunner.rules.slots) and the link to another pool differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from xrunner.comm.messages import Message, StartMessage
from xrunner.devices import Arriving
from xrunner.engine.pending import PendingStep, PendingSteps
from xrunner.engine.pipeline import Executor, ExecutorDied, Neighbours
from xrunner.engine.pool_requests import ActiveQuery, PoolRequests, Vocabulary
from xrunner.ops.likelihoods import unpacked
from xrunner.query import EXPIRED, FinishedQuery, PreparedQuery
from xrunner.rules.changes import Changeable, Changes
from xrunner.rules.routing import LEAST_WAITING
from xrunner.rules.steps import BatchingRule, Step, may_evict, withdraw_waiting

LOOK_S = 0.1  # chosen: seconds between two checks of an idle head whether to stop


class Sink(Protocol):
    """Takes a head's results and progress, and says whether the user asked to stop."""

    def finished(self, result: FinishedQuery) -> None: ...

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Called after every step. `output_tokens`: so far, those of unfinished requests
        included."""

    def should_stop(self) -> bool: ...


class Supply:
    """Source of a head's requests while it runs (xrunner.engine.replicas). This base class supplies
    none: all requests were submitted before."""

    note = ""  # what an idle head waits for, in words, if that may take long

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose messages the supply reads."""
        return ()

    @property
    def is_open(self) -> bool:
        """Whether more requests may come."""
        return False

    @property
    def next_in_s(self) -> float:
        """Seconds until the next request arrives, negative if it has; infinite: none is known."""
        return math.inf

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        """Handles messages that have come, or come within `wait_s` seconds."""

    def hear(self, head: Head, message: Message) -> None:
        """Handles a message from one of the `sources`."""
        raise AssertionError(f"{message = } from nobody")

    def died(self, head: Head, death: ExecutorDied) -> None:
        """Gives the head's requests to others, and lets it begin again. Raises `death` if there
        are no others."""
        raise death

    def close(self, head: Head) -> bool:
        """Ends after the last step; returns whether all requests given to others are done."""
        return True


class FromSpool(Supply):
    """Supply of a job's only head: reads requests from the spool while it runs. Of a job of
    millions only a few thousand wait in memory."""

    def __init__(self, queries: Sequence[PreparedQuery], order: Iterator[int], count: int, *,
                 least: int, begin: Callable[[Sequence[int]], object] | None = None) -> None:
        """`queries`: the job's, by index, read on access. `order`: indices of the `count` to
        answer. `least`: number that should wait while there are more. `begin`: called with the next
        indices."""
        self._queries, self._order, self._left = queries, order, count
        self._least, self._begin = max(least, LEAST_WAITING), begin

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        if self._left == 0 or head.requests.num_waiting >= self._least:
            return
        given = list(islice(self._order, 2 * self._least - head.requests.num_waiting))
        self._left -= len(given)
        if self._begin is not None:
            self._begin(given)
        for query in map(self._queries.__getitem__, given):
            is_taken = head.submit(query)
            assert is_taken, f"{query.id = } {query.reserve_tokens = }"

    def close(self, head: Head) -> bool:
        return self._left == 0


class PoolLink:
    """Link between a pool's head and another pool of the deployment (xrunner.engine.pool_links).
    This base class links to none: the pool works its requests from start to end."""

    def __init__(self, supply: Supply | None = None) -> None:
        self._supply = supply or Supply()

    def start(self, head: Head) -> StartMessage:
        """Sizes of the pool's caches, after the other pool has got its own."""
        return head.requests.start_message(head.rule)

    def next_group(self, head: Head) -> int | None:
        """Waits for the next group; None at the end."""
        wait_s = 0.0
        while True:
            self._supply.look(head, wait_s)
            is_ready = head.executor.is_ready  # once: it may change after a group was asked for
            group = head.next_group()
            is_over = not self._supply.is_open and (is_ready or not head.requests.has_work)
            if group is not None or is_over or head.sink.should_stop():
                note_rest(head, "")
                return group
            if wait_s:
                head.report()
            wait_s = self.rest(head)

    def rest(self, head: Head) -> float:
        """Seconds that an idle head waits for a message or an arrival."""
        note_rest(head, self._supply.note)
        return min(LOOK_S, max(self._supply.next_in_s, 0.0))

    def arrive(self, head: Head) -> None:
        """Submits requests that have arrived by now, where they arrive over time."""
        if self._supply.note:
            self._supply.look(head)

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None:
        """Called when the step has been started."""

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        """Called with the requests of `group` that a step's tokens have completed."""

    def died(self, head: Head, death: ExecutorDied) -> None:
        """See Supply.died."""
        self._supply.died(head, death)

    def close(self, head: Head) -> bool:
        """Ends after the last step; returns whether all requests handed on are done."""
        return self._supply.close(head)


class Head:
    """Runs decide -> execute -> commit until the rule has no request left."""

    def __init__(self, *, rule: BatchingRule, executor: Executor, neighbours: Neighbours,
                 sink: Sink, vocabulary: Vocabulary, link: PoolLink | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`link`: None if there is no other pool."""
        self.rule, self.neighbours, self.sink, self.clock = rule, neighbours, sink, clock
        self.requests = PoolRequests(rule.slot_use, vocabulary.start_token,
                             feeds_back=executor.keeps_tokens)
        self.pending = PendingSteps(neighbours, executor)
        # count tokens before they are known: the executor keeps them, and nothing is evicted
        self._counts_ahead = executor.keeps_tokens and not may_evict(rule)
        self._due: list[ActiveQuery] = []  # results to give out
        # requests to give out that get no answer: finish reason, and why in words
        self._unanswered: list[tuple[PreparedQuery, str, str]] = []
        self._expires_at = math.inf  # clock time of the first deadline of those that wait
        self._known_s = 0.0  # when tokens were last committed
        self.output_tokens = self.encoded_tokens = 0  # the second of chunks alone
        self.executor, self._vocabulary = executor, vocabulary
        self.link = link or PoolLink()
        self.make_rule: Callable[[], BatchingRule] | None = None  # set if the executor may die
        self.changes: Changes | None = None  # the latest, of the rule's settings
        executor.attach(self.requests)

    def submit(self, query: PreparedQuery, *, is_known: bool = False) -> bool:
        """Queues a request; returns False if it can never fit the schedule's KV budget. One whose
        deadline has passed, or that the executor refuses, does not begin. `is_known`: it was queued
        before."""
        if query.expires_at <= time.time():
            self._unanswered.append((query, EXPIRED, EXPIRED))
            return True
        if not is_known and (why := self.executor.refusal(query)) is not None:
            self._unanswered.append((query, "error", why))
            return True
        self._expires_at = min(self._expires_at, query.expires_at)
        known = {"forecast": query.forecast} if query.forecast else {}
        if not self.rule.submit(query.index, query.reserve_tokens, len(query.input_ids), **known):
            return False
        self.requests.add(query)
        return True

    def take_back(self, count: int) -> list[int]:
        """Removes up to `count` of the last requests that are not begun; returns their indices in
        order."""
        # evicted requests wait as well, before all that are not begun
        indices = withdraw_waiting(self.rule, min(count, self.requests.num_waiting))
        self.requests.remove(indices)
        return indices

    def expire(self) -> None:
        """Gives out, without answers, refused requests and waiting ones whose deadline has
        passed."""
        if self._expires_at <= time.time():
            self._expires_at = math.inf
            for query in self.requests.remove(withdraw_waiting(
                    self.rule, self.requests.num_waiting)):
                self.submit(query, is_known=True)
        for query, reason, why in self._unanswered:
            self.sink.finished(FinishedQuery(
                query=query, output_ids=(), finish_reason=reason, text="", error=why,
                encode_start_s=0.0, first_token_s=0.0, last_token_s=0.0,
                arrival_s=query.arrival_s))
        self._unanswered.clear()

    def start(self) -> None:
        """Lets every stage allocate its caches."""
        message = self.link.start(self)
        self.requests.is_shared = message.budget is not None and message.budget.is_shared
        self.neighbours.share(message)
        self.neighbours.pass_on(message)
        self.executor.start(message)

    def run(self) -> bool:
        """Runs all steps, after `start`; True if every request is done, False if stopped before.
        Sends all stages the end. Raises ExecutorDied."""
        while (group := self.link.next_group(self)) is not None:
            if self.rule.needs_tokens:
                self.pending.await_group(group)
                self._take_up(group)
            if not self.executor.returns_early:
                self._give_out()
            if self.sink.should_stop():
                break
            self.link.arrive(self)  # the tokens may have taken long
            step = self.rule.decide()
            if step is not None:
                self._execute(step)
            self._give_out()  # while the device works
            self.report()
        self.neighbours.stop()
        self.pending.drain()
        self.commit_returned()  # the last tokens of a group complete some requests
        return self.link.close(self) and not self.requests.has_work

    def abandon(self) -> tuple[list[int], list[int]]:
        """Gives up all requests, whose caches are lost, after giving out the results that are
        known. Returns (requests that had begun, those that had not), by index."""
        assert self.make_rule is not None, f"{self.rule = } cannot begin again"
        self._give_out()
        if self.executor.heartbeat is not None:
            self.executor.heartbeat.give_up()
        begun, new = self.requests.abandon()
        begun += [query.query.index for query in self._due]
        self._due.clear()
        self.pending = PendingSteps(self.neighbours, self.executor)
        self.rule = self.make_rule()
        if self.changes is not None and isinstance(self.rule, Changeable):
            self.rule.change(self.changes, phase=self.rule.next_phase)
        return begun, new

    def report(self) -> None:
        if (heartbeat := self.executor.heartbeat) is not None:
            heartbeat.waiting = self.requests.num_waiting
        self.sink.progress(self.clock(), self.output_tokens)

    def next_group(self) -> int | None:
        """The rule's next group; without one, commits all returned tokens and reports progress.
        First gives out requests that have expired."""
        self.expire()
        group = self.rule.next_group() if self.executor.is_ready else None
        if group is None and self.commit_returned():
            self.report()
        return group

    def commit_returned(self) -> bool:
        """Commits the tokens of every group that has all of them; returns whether there were
        any."""
        groups = self.pending.groups()
        for group in groups:
            self._commit(group)
        self._give_out()
        return bool(groups)

    def _take_up(self, group: int) -> None:
        """Commits the tokens of the group's steps, or only counts those of its last step.

        Counting suffices if it is clear without the tokens which requests are done: the device then
        goes on before the host has read them. Tokens that are here are committed, since on a CPU
        the next step may be long."""
        last = self.pending.last(group) if self._counts_ahead else None
        if last is None or last.is_known or not last.ends_by_count(self._vocabulary):
            self._commit(group)
            return
        self._commit(group, but=last)
        self._leave(group, last.promise())

    def _commit(self, group: int, but: PendingStep | None = None) -> None:
        """Commits the tokens of the group's steps, all of which have returned, except step
        `but`."""
        for step in self.pending.take(group, but):
            tokens, told = unpacked(step.known(), len(step.queries))
            assert len(step.queries) == len(tokens), f"{group = } {step = } {len(tokens) = }"
            self._known_s = now = self.clock()
            done, dead = list[ActiveQuery](), 0
            for place, (query, token) in enumerate(zip(step.queries, tokens, strict=True)):
                if query.ending is not None:
                    dead += 1  # its row is decoded on, or one step too long (SlotUse.KEPT)
                    continue
                if told:
                    query.likelihoods += told[place].likelihoods
                    query.embedding = told[place].embedding
                if query.take(token, now, self._vocabulary) and not query.has_left:
                    done.append(query)
            self.output_tokens += len(tokens) - dead  # rank 0 adds those of other replicas
            if (heartbeat := self.executor.heartbeat) is not None:
                heartbeat.output_tokens += len(tokens) - dead
            self.link.committed(self, group, self._leave(group, done))

    def _leave(self, group: int, done: Sequence[ActiveQuery]) -> list[ActiveQuery]:
        """Records that requests of the group have their last tokens; returns those with results
        due."""
        for query in done:
            self.rule.finish(query.query.index)
        due = self.requests.finish(group, [query.query.index for query in done]) if done else []
        self._due += due
        return due

    def _give_out(self) -> None:
        """Gives out due results of requests whose tokens are known."""
        due, self._due = self._due, []
        for query in due:
            if query.ending is None:
                self._due.append(query)
            else:
                self.sink.finished(query.finished(self._known_s,
                                                  self._vocabulary.decode_text))

    def _execute(self, step: Step) -> None:
        if step.evicted:  # evicted requests are encoded again with all their tokens
            self._commit(step.group)
            self._due += self.requests.evict(step.group, step.evicted)
        self.encoded_tokens += sum([chunk.tokens for chunk in step.chunks])
        message, inputs, given = self.requests.compose(step, self.clock())
        self.neighbours.share(message, inputs)
        out = self.executor.execute(message, inputs)
        gives_tokens = self.executor.gives_tokens(message)
        if gives_tokens:
            self.pending.expect(step.group, given)
        if self.neighbours.route.tokens_from is not None:
            assert not isinstance(out, Arriving), f"{step = }"
            self.neighbours.pass_on(message, out)
        elif gives_tokens:
            assert out is not None, f"{step = }"
            self.pending.arrive(step.group, out)
        self.link.executed(self, step, gives_tokens=gives_tokens)


def note_rest(head: Head, note: str) -> None:
    """Tells who looks on what the idle head waits for; "": it works."""
    heartbeat = head.executor.heartbeat
    if heartbeat is not None and head.executor.is_ready:  # else it has a note of its own
        heartbeat.note = note


def run_to_end(head: Head) -> bool:
    """Runs the head; where its executor dies, lets others take its requests, and it begin again.
    Returns whether every request is done. Raises ExecutorDied if nobody else can go on."""
    while True:
        try:
            return head.run()
        except ExecutorDied as death:
            head.link.died(head, death)
