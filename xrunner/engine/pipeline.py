"""The ranks as a pipeline: what each receives from those before it and sends to those after it.

The head (xrunner.engine.head) decides on the pool's first rank. Every other rank serves its stage:
it executes the steps that arrive and passes them on.

A stage is a tensor-parallel group, every rank of which needs the whole hidden state, and every rank
of the stage before has it. So rank j of a stage receives from rank j mod t of the t ranks before
it: one hop for every rank. A message between first ranks and a broadcast behind it would take two
hops and put all bytes on one sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from xgpt.core.deployment import Pool
from xgpt.core.policies import Role
from xrunner.comm.messages import (
    EncodedMessage,
    StartMessage,
    StepMessage,
    StopMessage,
    TokensMessage,
)
from xrunner.comm.point_to_point import Comm
from xrunner.devices import Arriving
from xrunner.engine.pool_requests import PoolRequests
from xrunner.files.heartbeat import Heartbeat
from xrunner.offload.report import OffloadReport
from xrunner.query import PreparedQuery
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord


class ExecutorDied(Exception):
    """The process that executes the steps is gone, with all requests at work in it."""


class DiedAlone(Exception):
    """The process died at work on requests under suspicion: the launcher decides."""


class Executor:
    """One rank's part of a stage (xrunner.engine.stage.StageExecutor). Defaults hold for models
    without an encoder."""

    keeps_tokens = False  # whether an input token may be FED_BACK (xrunner.engine.group)
    returns_early = False  # whether `execute` may return before the step is over
    heartbeat: Heartbeat | None = None  # this rank's

    @property
    def is_ready(self) -> bool:
        """True if steps can be executed; not while it starts again. Raises ExecutorDied."""
        return True

    def attach(self, requests: PoolRequests) -> None:
        """Takes the head's account of its requests; called once."""

    def refusal(self, query: PreparedQuery) -> str | None:
        """Why this executor cannot answer the request; None if it can."""
        return None

    def close(self) -> None:
        """Ends what the executor has started."""

    def start(self, message: StartMessage) -> None:
        """Allocates what the steps need; called before the first one."""

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | Arriving | None:
        """Executes a step; returns its output. A pool's only stage may return tokens on their
        way."""
        raise NotImplementedError

    def gives_tokens(self, message: StepMessage) -> bool:
        """Whether the step yields a token of each request; an encoder's step does not."""
        return True

    def awaits_encoded(self, group: int | None = None) -> bool:
        """Whether encoder output of the group (None: of any) has not arrived yet."""
        return False

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """Takes the encoder output [T, H] of the group's oldest encode step without."""
        raise AssertionError(f"{group = }: a decoder-only model has no encoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's figures of the run, sent to the head at its end."""

    rank: int
    stage: int  # counted over all pools and replicas
    log: tuple[StepRecord, ...]
    busy_s: float
    load_s: float
    bytes_read: int
    rows_compacted: int
    peak_memory_bytes: int
    kv_bytes: int = 0  # set aside for KV
    kv_peak_bytes: int = 0  # most of it that requests had
    pool: str = "all"
    role: Role = "both"  # role of the pool
    replica: int = 0
    handover_bytes: int = 0  # WAA: KV bytes sent, or received
    handover_s: float = 0.0  # WAA's encode pool: from the start of a send until all is sent
    operators: str | None = None  # operators used, in a line; None: another engine's
    encoded_tokens: int = 0  # in chunks, as the head of another replica than the first decided
    restarts: int = 0  # of what executes its steps
    offload: OffloadReport | None = None  # of a stage with a placement


class Neighbours:
    """Messages of one rank with the ranks that its route names."""

    def __init__(self, comm: Comm, route: Route) -> None:
        self._comm, self.route = comm, route

    def share(self, message: StartMessage | StepMessage, inputs: Tensor | None = None) -> None:
        """Sends from the head to its own group before it executes: all work at the same time."""
        for rank in self.route.peers:
            self._comm.send(rank, message, inputs)

    def pass_on(self, message: StartMessage | StepMessage, out: Tensor | None = None) -> None:
        """Sends to the next stage."""
        for rank in self.route.following:
            self._comm.send(rank, message, out)

    def stop(self) -> None:
        """Tells all ranks that take steps from this one to stop."""
        for rank in (*self.route.peers, *self.route.following):
            self._comm.send(rank, StopMessage())

    def give_back(self, executor: Executor, message: StepMessage, out: Tensor | None) -> None:
        """Sends the last stage's output: tokens to the head, encoder output to other stages."""
        if not executor.gives_tokens(message):
            for rank in self.route.encoded_to:
                self._comm.send(rank, EncodedMessage(group=message.group), out)
        elif self.route.tokens_to is not None:
            self._comm.send(self.route.tokens_to, TokensMessage(group=message.group), out)

    def next_step(self, executor: Executor) -> tuple[StartMessage | StepMessage | None,
                                                     Tensor | None]:
        """The next step or start message, with its tensor; (None, None) when told to stop. Encoder
        output that arrives earlier is passed to the executor."""
        assert self.route.steps_from is not None, f"{self.route = }"
        sources = {self.route.steps_from, *self.route.encoded_from}
        while True:
            message, tensor = self._comm.receive(*sources)
            if isinstance(message, StopMessage):
                return None, None
            if isinstance(message, EncodedMessage):
                assert tensor is not None, f"{message = }"
                executor.take_encoded(message.group, tensor)
                continue
            assert isinstance(message, (StartMessage, StepMessage)), f"{message = }"
            return message, tensor

    def await_encoded(self, executor: Executor, group: int | None = None) -> None:
        """Waits until all inputs of `group` (None: of every group) are encoded."""
        while executor.awaits_encoded(group):
            message, tensor = self._comm.receive(*self.route.encoded_from)
            assert isinstance(message, EncodedMessage) and tensor is not None, f"{message = }"
            executor.take_encoded(message.group, tensor)

    def await_result(self, executor: Executor) -> tuple[int, Tensor] | None:
        """Receives a group's tokens as (group, tokens); None if encoder output came instead."""
        assert self.route.tokens_from is not None, f"{self.route = }"
        message, tensor = self._comm.receive(self.route.tokens_from)
        assert tensor is not None, f"{message = }"
        if isinstance(message, EncodedMessage):
            executor.take_encoded(message.group, tensor)
            return None
        assert isinstance(message, TokensMessage), f"{message = }"
        return message.group, tensor

    def flush(self) -> None:
        self._comm.flush()


def await_start(neighbours: Neighbours, executor: Executor) -> None:
    """Starts a rank other than the head by the head's first message."""
    message, _ = neighbours.next_step(executor)
    assert isinstance(message, StartMessage), f"{message = }"
    neighbours.pass_on(message)
    executor.start(message)


def serve_stage(neighbours: Neighbours, executor: Executor) -> None:
    """Executes arriving steps and passes them on until told to stop; on every rank but the head."""
    while True:
        message, inputs = neighbours.next_step(executor)
        if message is None:
            break
        assert isinstance(message, StepMessage) and inputs is not None, f"{message = }"
        if message.kind is not StepKind.ENCODE or message.removed:
            neighbours.await_encoded(executor, message.group)
        out = executor.execute(message, inputs)
        assert not isinstance(out, Arriving), f"{message = }: its tokens are for the head"
        neighbours.pass_on(message, out)
        if not neighbours.route.following:
            neighbours.give_back(executor, message, out)
    neighbours.stop()
    neighbours.await_encoded(executor)  # else its sender would wait for a rank that has gone
    neighbours.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One rank's neighbours. The head is the first rank of the first stage."""

    rank: int
    pool: str  # its name
    stage: int  # number within the pool
    steps_from: int | None  # None: the head, which decides the steps
    peers: tuple[int, ...] = ()  # the head's group, which takes the same inputs
    following: tuple[int, ...] = ()  # take this rank's output; none on the last stage
    tokens_from: int | None = None  # the last stage's first rank, for the head; None: itself
    tokens_to: int | None = None  # the head, for the last stage's first rank; None: itself
    encoded_from: tuple[int, ...] = ()  # senders of encoder output; none: its own
    encoded_to: tuple[int, ...] = ()  # takers of the last stage's encoder output


SINGLE_RANK = Route(rank=0, pool="all", stage=0, steps_from=None)


def routes(pools: Sequence[Pool]) -> dict[int, Route]:
    """The route of every rank of all pools."""
    return {rank: route for pool in pools for rank, route in _of_pool(pool).items()}


def _of_pool(pool: Pool) -> dict[int, Route]:
    groups = [stage.ranks for stage in pool.stages]
    works_both = pool.role == "both"  # else an encoder's output is for another pool
    head, last = groups[0][0], len(groups) - 1
    by_rank = {}
    for place, group in enumerate(groups):
        for index, rank in enumerate(group):
            is_head, is_last = rank == head, place == last
            by_rank[rank] = Route(
                rank=rank, pool=pool.name, stage=place, peers=group[1:] if is_head else (),
                steps_from=(None if is_head else head if place == 0
                            else _sender(groups[place - 1], index)),
                following=() if is_last else _takers(group, index, groups[place + 1]),
                tokens_from=groups[last][0] if is_head and last > 0 else None,
                tokens_to=head if is_last and index == 0 and last > 0 else None,
                encoded_from=((_sender(groups[last], index),) if works_both and not is_last
                              else ()),
                encoded_to=tuple(taker for other in groups[:last]
                                 for taker in _takers(group, index, other))
                if works_both and is_last else ())
    return by_rank


def _sender(group: Sequence[int], index: int) -> int:
    """The rank of `group` that sends to the rank at `index` of another."""
    return group[index % len(group)]


def _takers(group: Sequence[int], index: int, others: Sequence[int]) -> tuple[int, ...]:
    """Ranks of `others` that receive from the rank at `index` of `group`."""
    return tuple(rank for other, rank in enumerate(others) if other % len(group) == index)
