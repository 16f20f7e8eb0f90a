"""The head: a pool's first rank, which decides by the batching rule, executes its part of the first
stage, and commits the tokens that come back. It is the same for every policy. The rule, the slots
(xrunner.rules.slots) and the link to another pool differ."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from xrunner.comm.messages import Message, StartMessage
from xrunner.devices import Arriving
from xrunner.engine.pipeline import Executor, Neighbours
from xrunner.engine.pool_requests import ActiveQuery, PoolRequests, Vocabulary
from xrunner.ops.likelihoods import unpacked
from xrunner.query import EXPIRED, FinishedQuery, PreparedQuery
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

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose messages the supply reads."""
        return ()

    @property
    def is_open(self) -> bool:
        """Whether more requests may come."""
        return False

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        """Handles messages that have come, or come within `wait_s` seconds."""

    def hear(self, head: Head, message: Message) -> None:
        """Handles a message from one of the `sources`."""
        raise AssertionError(f"{message = } from nobody")

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
            group = head.next_group()
            if group is not None or not self._supply.is_open or head.sink.should_stop():
                return group
            if wait_s:
                head.report()
            wait_s = LOOK_S

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None:
        """Called when the step has been started."""

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        """Called with the requests of `group` that a step's tokens have completed."""

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
        self._expired: list[PreparedQuery] = []  # not begun by their deadlines; to give out
        self._expires_at = math.inf  # clock time of the first deadline of those that wait
        self._known_s = 0.0  # when tokens were last committed
        self.output_tokens = self.encoded_tokens = 0  # the second of chunks alone
        self._executor, self._vocabulary = executor, vocabulary
        self._link = link or PoolLink()

    def submit(self, query: PreparedQuery) -> bool:
        """Queues a request; returns False if it can never fit the schedule's KV budget. One whose
        deadline has passed does not begin."""
        if query.expires_at <= time.time():
            self._expired.append(query)
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
        """Gives out, without answers, the waiting requests whose deadline has passed."""
        if self._expires_at <= time.time():
            self._expires_at = math.inf
            for query in self.requests.remove(withdraw_waiting(
                    self.rule, self.requests.num_waiting)):
                self.submit(query)
        for query in self._expired:
            self.sink.finished(FinishedQuery(
                query=query, output_ids=(), finish_reason=EXPIRED, text="", error=EXPIRED,
                encode_start_s=0.0, first_token_s=0.0, last_token_s=0.0))
        self._expired.clear()

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of each active request, by index."""
        return {index: (active.input_tokens, active.num_outputs)
                for index, active in self.requests.active.items()}

    def start(self) -> None:
        """Lets every stage allocate its caches."""
        message = self._link.start(self)
        self.requests.is_shared = message.budget is not None and message.budget.is_shared
        self.neighbours.share(message)
        self.neighbours.pass_on(message)
        self._executor.start(message)

    def run(self) -> bool:
        """Runs all steps, after `start`; True if every request is done, False if stopped before.
        Sends all stages the end."""
        while (group := self._link.next_group(self)) is not None:
            if self.rule.needs_tokens:
                self.pending.await_group(group)
                self._take_up(group)
            if not self._executor.returns_early:
                self._give_out()
            if self.sink.should_stop():
                break
            step = self.rule.decide()
            if step is not None:
                self._execute(step)
            self._give_out()  # while the device works
            self.report()
        self.neighbours.stop()
        self.pending.drain()
        self.commit_returned()  # the last tokens of a group complete some requests
        return self._link.close(self) and not self.requests.has_work

    def report(self) -> None:
        if (heartbeat := self._executor.heartbeat) is not None:
            heartbeat.waiting = self.requests.num_waiting
        self.sink.progress(self.clock(), self.output_tokens)

    def next_group(self) -> int | None:
        """The rule's next group; without one, commits all returned tokens and reports progress.
        First gives out requests that have expired."""
        self.expire()
        group = self.rule.next_group()
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
            if (heartbeat := self._executor.heartbeat) is not None:
                heartbeat.output_tokens += len(tokens) - dead
            self._link.committed(self, group, self._leave(group, done))

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
        out = self._executor.execute(message, inputs)
        gives_tokens = self._executor.gives_tokens(message)
        if gives_tokens:
            self.pending.expect(step.group, given)
        if self.neighbours.route.tokens_from is not None:
            assert not isinstance(out, Arriving), f"{step = }"
            self.neighbours.pass_on(message, out)
        elif gives_tokens:
            assert out is not None, f"{step = }"
            self.pending.arrive(step.group, out)
        self._link.executed(self, step, gives_tokens=gives_tokens)


@dataclass(slots=True)
class PendingStep:
    """A step that yields a token for each of its `queries`. `tokens`: None until they have
    returned, or are on their way (xrunner.ops.likelihoods.unpacked)."""

    queries: list[ActiveQuery]
    tokens: Tensor | Arriving | None = None
    _is_counted: bool = False

    def ends_by_count(self, vocabulary: Vocabulary) -> bool:
        """Whether counting tells which requests these tokens complete."""
        return all(query.ends_by_count(vocabulary) for query in self.queries)

    def promise(self) -> list[ActiveQuery]:
        """Counts the tokens, once; returns the requests that they complete."""
        if self._is_counted:
            return []
        self._is_counted = True
        return [query for query in self.queries if query.is_at_work and query.promise()]

    @property
    def is_known(self) -> bool:
        """Whether the tokens can be read without waiting."""
        return not isinstance(self.tokens, Arriving) or self.tokens.is_here

    def known(self) -> Tensor:
        """Waits for the tokens and returns them."""
        assert self.tokens is not None, f"{self.queries = }"
        return self.tokens.wait() if isinstance(self.tokens, Arriving) else self.tokens


class PendingSteps:
    """Each group's steps whose tokens are not committed, oldest first: the order they return in."""

    def __init__(self, neighbours: Neighbours, executor: Executor) -> None:
        self._neighbours, self._executor = neighbours, executor
        self._steps: dict[int, deque[PendingStep]] = {}  # by group

    def expect(self, group: int, queries: list[ActiveQuery]) -> None:
        """Adds a step of `group` that will yield a token for each of `queries`."""
        self._steps.setdefault(group, deque()).append(PendingStep(queries))

    def arrive(self, group: int, tokens: Tensor | Arriving) -> None:
        """Stores the tokens of the group's oldest step without."""
        next(step for step in self._steps[group] if step.tokens is None).tokens = tokens

    def groups(self) -> list[int]:
        """Groups with tokens to commit, and none missing."""
        return [group for group, steps in self._steps.items()
                if steps and not self._is_missing(group)]

    def last(self, group: int) -> PendingStep | None:
        """The group's latest step, if it is not committed."""
        steps = self._steps.get(group)
        return steps[-1] if steps else None

    def take(self, group: int, but: PendingStep | None = None) -> Iterator[PendingStep]:
        """Yields the group's steps up to step `but`; no token of the group may be missing."""
        assert not self._is_missing(group), f"{group = }"
        steps = self._steps.get(group)
        while steps and steps[0] is not but:
            yield steps.popleft()

    def await_group(self, group: int) -> None:
        """Waits for all tokens of the group's steps, and for its encoder output."""
        while self._executor.awaits_encoded(group) or self._is_missing(group):
            self._take_up()

    def drain(self) -> None:
        """Waits for everything under way: its sender would else wait for ever."""
        while any(map(self._is_missing, self._steps)) or self._executor.awaits_encoded():
            self._take_up()

    def _is_missing(self, group: int) -> bool:
        """Whether tokens of a step of `group` have not returned."""
        return any(step.tokens is None for step in self._steps.get(group, ()))

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self.arrive(*result)
