"""The head: the pool's first rank decides by the batching rule, executes its part of the first
stage, and commits what comes back. It is the same for every policy; what differs is in its parts:
the rule, the account of slots (xrunner.rules.slots) and the link to another pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from xrunner.engine.pipeline import Executor, Neighbours
from xrunner.engine.roster import ActiveQuery, Roster, Vocabulary
from xrunner.ops.likelihoods import unpacked
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.steps import BatchingRule, Step
from xrunner.transport.messages import Message, StartMessage

LOOK_S = 0.1  # a head with nothing to do looks at least so often whether it is to stop


class Sink(Protocol):
    """Takes the head's results and progress, and tells whether the user asked to stop."""

    def finished(self, result: FinishedQuery) -> None: ...

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Told after every step: the `output_tokens` so far, of unfinished queries too."""

    def should_stop(self) -> bool: ...


class PoolLink(Protocol):
    """What ties a pool's head to another pool of the deployment (xrunner.engine.links)."""

    def start(self, head: Head, spare_bytes: int) -> StartMessage:
        """The sizes of the pool's caches, once the other pool knows its own."""

    def next_group(self, head: Head) -> int | None:
        """The group whose turn it is, as soon as there is one; None at the end."""

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None: ...

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        """The tokens of one of the group's steps are taken up; they were the last for `done`."""

    def close(self, head: Head) -> bool:
        """Ends after the last step; whether all that was handed on is done."""


class Supply(Protocol):
    """Brings a head its queries while it runs (xrunner.engine.replicas)."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose messages it takes up."""

    @property
    def is_open(self) -> bool:
        """Whether there may be more to do than the head knows of."""

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        """Takes up what has come, and what comes within `wait_s`."""

    def hear(self, head: Head, message: Message) -> None:
        """Takes up a message from one of the `sources`."""

    def close(self, head: Head) -> bool:
        """Ends after the last step; whether all that was brought elsewhere is done."""


class AllHere:
    """The supply of a head that has had all its queries before it runs."""

    sources = ()
    is_open = False

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        """Nothing will come."""

    def hear(self, head: Head, message: Message) -> None:
        raise AssertionError(f"{message = } from nobody")

    def close(self, head: Head) -> bool:
        return True


class Alone:
    """The link of a pool that works its queries from their beginning to their end."""

    def __init__(self, supply: Supply | None = None) -> None:
        self._supply: Supply = supply or AllHere()

    def start(self, head: Head, spare_bytes: int) -> StartMessage:
        return head.roster.start_message(head.rule, spare_bytes)

    def next_group(self, head: Head) -> int | None:
        wait_s = 0.0
        while True:
            self._supply.look(head, wait_s)
            group = head.rule.next_group()
            if group is not None or not self._supply.is_open or head.sink.should_stop():
                return group
            if wait_s:
                head.report()
            wait_s = LOOK_S

    def executed(self, head: Head, step: Step, *, gives_tokens: bool) -> None:
        """Nobody else needs to know."""

    def committed(self, head: Head, group: int, done: Sequence[ActiveQuery]) -> None:
        """Nobody else needs to know."""

    def close(self, head: Head) -> bool:
        return self._supply.close(head)


class Head:
    """decide -> execute -> commit, until the rule has no query left."""

    def __init__(self, *, rule: BatchingRule, executor: Executor, neighbours: Neighbours,
                 sink: Sink, vocabulary: Vocabulary, link: PoolLink | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`link` None: there is no other pool."""
        self.rule, self.neighbours, self.sink, self.clock = rule, neighbours, sink, clock
        self.roster = Roster(rule.slot_use, vocabulary.start_token)
        self.returns = Returns(neighbours, executor)
        self.output_tokens = 0
        self._executor, self._vocabulary = executor, vocabulary
        self._link: PoolLink = link or Alone()

    def submit(self, query: PreparedQuery) -> bool:
        """False if the query can never fit the schedule's KV budget."""
        if not self.rule.submit(query.index, query.reserve_tokens, len(query.input_ids)):
            return False
        self.roster.add(query)
        return True

    def lengths_so_far(self) -> dict[int, tuple[int, int]]:
        """(input, output) tokens of each active query."""
        return {index: (active.input_tokens, len(active.output_ids))
                for index, active in self.roster.active.items()}

    def start(self, spare_bytes: int = 0) -> None:
        """Every stage sets up its caches for what was submitted. `spare_bytes` of memory a rank
        may be taken for them at once."""
        message = self._link.start(self, spare_bytes)
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
                self.commit(group)
            if self.sink.should_stop():
                break
            step = self.rule.decide()
            if step is not None:
                self._execute(step)
            self.report()
        self.neighbours.stop()
        self.returns.drain()
        self.commit_returned()  # some queries end with their groups' last tokens
        return self._link.close(self) and not self.roster.has_work

    def report(self) -> None:
        self.sink.progress(self.clock(), self.output_tokens)

    def commit_returned(self) -> bool:
        """Takes up the tokens of every group whose steps all have theirs; whether any has."""
        groups = self.returns.groups()
        for group in groups:
            self.commit(group)
        return bool(groups)

    def commit(self, group: int) -> None:
        """Takes up the tokens of the group's steps, all of which are here."""
        active, vocabulary = self.roster.active, self._vocabulary
        for queries, given in self.returns.take(group):
            tokens, told = unpacked(given, len(queries))
            assert len(queries) == len(tokens), f"{group = } {len(queries) = } {len(tokens) = }"
            now, done, dead = self.clock(), [], 0
            for place, (index, token) in enumerate(zip(queries, tokens, strict=True)):
                query = active.get(index)
                if query is None or query.ending is not None:
                    dead += 1  # its row is decoded on, or by one step too many (SlotUse.KEPT)
                    continue
                if told:
                    query.likelihoods += told[place].likelihoods
                    query.embedding = told[place].embedding
                if query.take(token, now, vocabulary):
                    self.rule.finish(index)
                    done.append(index)
            self.output_tokens += len(queries) - dead
            due = self.roster.finish(group, done) if done else []
            for query in due:
                self.sink.finished(query.finished(now, vocabulary.decode_text))
            self._link.committed(self, group, due)

    def _execute(self, step: Step) -> None:
        message, inputs, given = self.roster.compose(step, self.clock())
        self.neighbours.share(message, inputs)
        out = self._executor.execute(message, inputs)
        gives_tokens = self._executor.gives_tokens(message)
        if gives_tokens:
            self.returns.expect(step.group, given)
        if self.neighbours.route.tokens_from is not None:
            self.neighbours.pass_on(message, out)
        elif gives_tokens:
            assert out is not None, f"{step = }"
            self.returns.arrive(step.group, out)
        self._link.executed(self, step, gives_tokens=gives_tokens)


class Returns:
    """The steps of each group whose tokens are not taken up, oldest first: the tokens of a group's
    steps come back in the order of the steps."""

    def __init__(self, neighbours: Neighbours, executor: Executor) -> None:
        self._neighbours, self._executor = neighbours, executor
        self._expected: dict[int, deque[list[int]]] = {}  # group -> queries of each step
        self._arrived: dict[int, deque[Tensor]] = {}

    def expect(self, group: int, queries: list[int]) -> None:
        """A step of `group` will give these queries a token each."""
        self._expected.setdefault(group, deque()).append(queries)

    def arrive(self, group: int, tokens: Tensor) -> None:
        """Tokens of the group's oldest step still without (xrunner.ops.likelihoods.unpacked)."""
        self._arrived.setdefault(group, deque()).append(tokens)

    def groups(self) -> list[int]:
        """The groups with something to take up, and nothing missing."""
        return [group for group, steps in self._expected.items()
                if steps and not self._is_missing(group)]

    def take(self, group: int) -> Iterator[tuple[list[int], Tensor]]:
        """(queries, their tokens as the last stage gave them) of each step of `group`, none of
        which is missing."""
        assert not self._is_missing(group), f"{group = }"
        while steps := self._expected.get(group):
            yield steps.popleft(), self._arrived[group].popleft()

    def await_group(self, group: int) -> None:
        """Returns when all that the group's steps yield is here, an encoder's output included."""
        while self._executor.awaits_encoded(group) or self._is_missing(group):
            self._take_up()

    def drain(self) -> None:
        """Returns when nothing is under way any more: who sends it would wait for ever."""
        while any(map(self._is_missing, self._expected)) or self._executor.awaits_encoded():
            self._take_up()

    def _is_missing(self, group: int) -> bool:
        """Whether tokens of a step of `group` have not come yet."""
        return len(self._arrived.get(group, ())) < len(self._expected.get(group, ()))

    def _take_up(self) -> None:
        result = self._neighbours.await_result(self._executor)
        if result is not None:
            self.arrive(*result)
