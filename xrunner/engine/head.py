"""The head: the pool's first rank decides by the batching rule, executes its part of the first
stage, and commits what comes back. It is the same for every policy; what differs is in its parts:
the rule, the account of slots (xrunner.rules.slots) and the link to another pool."""

from __future__ import annotations

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
from xrunner.engine.roster import ActiveQuery, Roster, Vocabulary
from xrunner.ops.likelihoods import unpacked
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.routing import LEAST_WAITING
from xrunner.rules.steps import BatchingRule, Step, may_evict, withdraw_waiting

LOOK_S = 0.1  # a head with nothing to do looks at least so often whether it is to stop


class Sink(Protocol):
    """Takes the head's results and progress, and tells whether the user asked to stop."""

    def finished(self, result: FinishedQuery) -> None: ...

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Told after every step: the `output_tokens` so far, of unfinished queries too."""

    def should_stop(self) -> bool: ...


class Supply:
    """Brings a head its queries while it runs (xrunner.engine.replicas). This one brings none: all
    were there before."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose messages it takes up."""
        return ()

    @property
    def is_open(self) -> bool:
        """Whether there may be more to do than the head knows of."""
        return False

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        """Takes up what has come, and what comes within `wait_s`."""

    def hear(self, head: Head, message: Message) -> None:
        """Takes up a message from one of the `sources`."""
        raise AssertionError(f"{message = } from nobody")

    def close(self, head: Head) -> bool:
        """Ends after the last step; whether all that was brought elsewhere is done."""
        return True


class FromSpool(Supply):
    """The supply of the only head of a job: its queries, from the spool while it runs, in the order
    in which they are taken up. Of a job of millions only so many wait in memory."""

    def __init__(self, queries: Sequence[PreparedQuery], order: Iterator[int], count: int, *,
                 least: int, begin: Callable[[Sequence[int]], object] | None = None) -> None:
        """`queries`: of the job, by index, read as they are asked for; `order`: the indices of the
        `count` to be answered. `least`: so many wait while there are more. `begin` is told of the
        next ones, in this order."""
        self._queries, self._order, self._left = queries, order, count
        self._least, self._begin = max(least, LEAST_WAITING), begin

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        if self._left == 0 or head.roster.num_waiting >= self._least:
            return
        given = list(islice(self._order, 2 * self._least - head.roster.num_waiting))
        self._left -= len(given)
        if self._begin is not None:
            self._begin(given)
        for query in map(self._queries.__getitem__, given):
            is_taken = head.submit(query)
            assert is_taken, f"{query.id = } {query.reserve_tokens = }"

    def close(self, head: Head) -> bool:
        return self._left == 0


class PoolLink:
    """What ties a pool's head to another pool of the deployment (xrunner.engine.links). This one
    ties it to none: the pool works its queries from their beginning to their end."""

    def __init__(self, supply: Supply | None = None) -> None:
        self._supply = supply or Supply()

    def start(self, head: Head) -> StartMessage:
        """The sizes of the pool's caches, once the other pool knows its own."""
        return head.roster.start_message(head.rule)

    def next_group(self, head: Head) -> int | None:
        """The group whose turn it is, as soon as there is one; None at the end."""
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
        """The step is under way."""

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        """The tokens of one of the group's steps are taken up; they were the last for `done`."""

    def close(self, head: Head) -> bool:
        """Ends after the last step; whether all that was handed on is done."""
        return self._supply.close(head)


class Head:
    """decide -> execute -> commit, until the rule has no query left."""

    def __init__(self, *, rule: BatchingRule, executor: Executor, neighbours: Neighbours,
                 sink: Sink, vocabulary: Vocabulary, link: PoolLink | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`link` None: there is no other pool."""
        self.rule, self.neighbours, self.sink, self.clock = rule, neighbours, sink, clock
        self.roster = Roster(rule.slot_use, vocabulary.start_token,
                             feeds_back=executor.keeps_tokens)
        self.returns = Returns(neighbours, executor)
        # tokens may be counted before they are known: who executes keeps them, nobody is evicted
        self._counts_ahead = executor.keeps_tokens and not may_evict(rule)
        self._due: list[ActiveQuery] = []  # whose results are to be given out
        self._known_s = 0.0  # when tokens were taken up last
        self.output_tokens = 0
        self._executor, self._vocabulary = executor, vocabulary
        self._link = link or PoolLink()

    def submit(self, query: PreparedQuery) -> bool:
        """False if the query can never fit the schedule's KV budget."""
        if not self.rule.submit(query.index, query.reserve_tokens, len(query.input_ids)):
            return False
        self.roster.add(query)
        return True

    def take_back(self, count: int) -> list[int]:
        """Takes the last `count` of the queries whose encoding has not begun out of the pool, or as
        many as its rule can give up; their indices, in the order in which they came."""
        # an evicted query waits as well, before all that have not begun
        indices = withdraw_waiting(self.rule, min(count, self.roster.num_waiting))
        self.roster.remove(indices)
        return indices

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of each active query."""
        return {index: (active.input_tokens, active.num_outputs)
                for index, active in self.roster.active.items()}

    def start(self) -> None:
        """Every stage sets up its caches for what was submitted."""
        message = self._link.start(self)
        self.roster.is_shared = message.budget is not None and message.budget.is_shared
        self.neighbours.share(message)
        self.neighbours.pass_on(message)
        self._executor.start(message)

    def run(self) -> bool:
        """True when every query is done, False when stopped before. Stages are told to end.
        After `start`."""
        while (group := self._link.next_group(self)) is not None:
            if self.rule.needs_tokens:
                self.returns.await_group(group)
                self._take_up(group)
            if not self._executor.returns_early:
                self._give_out()
            if self.sink.should_stop():
                break
            step = self.rule.decide()
            if step is not None:
                self._execute(step)
            self._give_out()  # while the device is at work
            self.report()
        self.neighbours.stop()
        self.returns.drain()
        self.commit_returned()  # some queries end with their groups' last tokens
        return self._link.close(self) and not self.roster.has_work

    def report(self) -> None:
        self.sink.progress(self.clock(), self.output_tokens)

    def next_group(self) -> int | None:
        """The rule's; where it has none, all that was executed is taken up and told of: others may
        wait for that."""
        group = self.rule.next_group()
        if group is None and self.commit_returned():
            self.report()
        return group

    def commit_returned(self) -> bool:
        """Takes up the tokens of every group whose steps all have theirs; whether any has."""
        groups = self.returns.groups()
        for group in groups:
            self._commit(group)
        self._give_out()
        return bool(groups)

    def _take_up(self, group: int) -> None:
        """The tokens of the group's steps, all of which are here or on their way; those of its last
        one need not be known as yet where it is clear without them who is done: they are counted,
        and the device goes on with the next step before the host has looked at them. (What is here
        is taken up: on a CPU the next step may be a long one, and its queries are done now.)"""
        last = self.returns.last(group) if self._counts_ahead else None
        if last is None or last.is_known or not last.ends_by_count(self._vocabulary):
            self._commit(group)
            return
        self._commit(group, but=last)
        self._leave(group, last.promise())

    def _commit(self, group: int, but: Given | None = None) -> None:
        """Takes up the tokens of the group's steps, all of which are here."""
        for step in self.returns.take(group, but):
            tokens, told = unpacked(step.known(), len(step.queries))
            assert len(step.queries) == len(tokens), f"{group = } {step = } {len(tokens) = }"
            self._known_s = now = self.clock()
            done, dead = list[ActiveQuery](), 0
            for place, (query, token) in enumerate(zip(step.queries, tokens, strict=True)):
                if query.ending is not None:
                    dead += 1  # its row is decoded on, or by one step too many (SlotUse.KEPT)
                    continue
                if told:
                    query.likelihoods += told[place].likelihoods
                    query.embedding = told[place].embedding
                if query.take(token, now, self._vocabulary) and not query.has_left:
                    done.append(query)
            self.output_tokens += len(tokens) - dead
            self._link.committed(self, group, self._leave(group, done))

    def _leave(self, group: int, done: Sequence[ActiveQuery]) -> list[ActiveQuery]:
        """These of the group have their last tokens, known or not. Returns those whose results are
        due."""
        for query in done:
            self.rule.finish(query.query.index)
        due = self.roster.finish(group, [query.query.index for query in done]) if done else []
        self._due += due
        return due

    def _give_out(self) -> None:
        """The results that are due, of queries whose tokens are known."""
        due, self._due = self._due, []
        for query in due:
            if query.ending is None:
                self._due.append(query)
            else:
                self.sink.finished(query.finished(self._known_s,
                                                  self._vocabulary.decode_text))

    def _execute(self, step: Step) -> None:
        if step.evicted:  # who is encoded again, is so with all its tokens
            self._commit(step.group)
        message, inputs, given = self.roster.compose(step, self.clock())
        self.neighbours.share(message, inputs)
        out = self._executor.execute(message, inputs)
        gives_tokens = self._executor.gives_tokens(message)
        if gives_tokens:
            self.returns.expect(step.group, given)
        if self.neighbours.route.tokens_from is not None:
            assert not isinstance(out, Arriving), f"{step = }"
            self.neighbours.pass_on(message, out)
        elif gives_tokens:
            assert out is not None, f"{step = }"
            self.returns.arrive(step.group, out)
        self._link.executed(self, step, gives_tokens=gives_tokens)


@dataclass(slots=True)
class Given:
    """A step that gives each of its `queries` a token: `tokens`, once they are here or on their
    way (xrunner.ops.likelihoods.unpacked)."""

    queries: list[ActiveQuery]
    tokens: Tensor | Arriving | None = None
    _is_counted: bool = False

    def ends_by_count(self, vocabulary: Vocabulary) -> bool:
        """Whether it is clear without the tokens for whom they are the last."""
        return all(query.ends_by_count(vocabulary) for query in self.queries)

    def promise(self) -> list[ActiveQuery]:
        """Counts the tokens, once. Returns the queries for which they are the last."""
        if self._is_counted:
            return []
        self._is_counted = True
        return [query for query in self.queries if query.is_at_work and query.promise()]

    @property
    def is_known(self) -> bool:
        """Whether the tokens can be had without waiting."""
        return not isinstance(self.tokens, Arriving) or self.tokens.is_here

    def known(self) -> Tensor:
        """The tokens, waiting for them."""
        assert self.tokens is not None, f"{self.queries = }"
        return self.tokens.wait() if isinstance(self.tokens, Arriving) else self.tokens


class Returns:
    """The steps of each group whose tokens are not taken up, oldest first: the tokens of a group's
    steps come back in the order of the steps."""

    def __init__(self, neighbours: Neighbours, executor: Executor) -> None:
        self._neighbours, self._executor = neighbours, executor
        self._steps: dict[int, deque[Given]] = {}  # by group

    def expect(self, group: int, queries: list[ActiveQuery]) -> None:
        """A step of `group` will give these queries a token each."""
        self._steps.setdefault(group, deque()).append(Given(queries))

    def arrive(self, group: int, tokens: Tensor | Arriving) -> None:
        """Tokens of the group's oldest step still without."""
        next(step for step in self._steps[group] if step.tokens is None).tokens = tokens

    def groups(self) -> list[int]:
        """The groups with something to take up, and nothing missing."""
        return [group for group, steps in self._steps.items()
                if steps and not self._is_missing(group)]

    def last(self, group: int) -> Given | None:
        """The group's latest step, where it is not taken up."""
        steps = self._steps.get(group)
        return steps[-1] if steps else None

    def take(self, group: int, but: Given | None = None) -> Iterator[Given]:
        """Each step of `group`, none of whose tokens is missing, up to the one that is left."""
        assert not self._is_missing(group), f"{group = }"
        steps = self._steps.get(group)
        while steps and steps[0] is not but:
            yield steps.popleft()

    def await_group(self, group: int) -> None:
        """Returns when all that the group's steps yield is here, an encoder's output included."""
        while self._executor.awaits_encoded(group) or self._is_missing(group):
            self._take_up()

    def drain(self) -> None:
        """Returns when nothing is under way any more: who sends it would wait for ever."""
        while any(map(self._is_missing, self._steps)) or self._executor.awaits_encoded():
            self._take_up()

    def _is_missing(self, group: int) -> bool:
        """Whether tokens of a step of `group` have not come yet."""
        return any(step.tokens is None for step in self._steps.get(group, ()))

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self.arrive(*result)
