"""The ranks as a pipeline: what each takes from those before it and gives to those after it.

The head (xrunner.engine.head) decides on the pool's first rank; every other rank serves its stage:
it executes what arrives and passes it on.

A stage is a tensor-parallel group, and every rank of it needs the whole hidden state, which every
rank of the stage before holds. So rank j of a stage takes its steps from rank j mod t of the t
ranks before it: one hop for every rank, where a message between first ranks and a broadcast behind
it would move as many bytes in two hops, one after the other, and put all of them on one sender."""

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
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord


class Executor:
    """One rank's part of a stage: xrunner.engine.stage.StageExecutor; here what holds where nothing
    is encoded apart."""

    keeps_tokens = False  # whether an input token may be FED_BACK (xrunner.engine.group)
    returns_early = False  # whether `execute` may return while the step is still worked at

    def start(self, message: StartMessage) -> None:
        """Sets up what the steps need; before the first one."""

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | Arriving | None:
        """Of the only stage of a pool the tokens may be on their way."""
        raise NotImplementedError

    def gives_tokens(self, message: StepMessage) -> bool:
        """Whether the step ends with a token of each query: an encoder's does not."""
        return True

    def awaits_encoded(self, group: int | None = None) -> bool:
        """Whether inputs of the group (None: of any) were encoded, and the encoder's output has
        not come yet."""
        return False

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """The encoder's output [T, H] of the group's oldest encode step still without."""
        raise AssertionError(f"{group = }: a decoder-only model has no encoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's account of the run, sent to the head at its end."""

    rank: int
    stage: int  # of all pools of all replicas
    log: tuple[StepRecord, ...]
    busy_s: float
    load_s: float
    bytes_read: int
    rows_compacted: int
    peak_memory_bytes: int
    kv_bytes: int = 0  # set aside for KV entries
    kv_peak_bytes: int = 0  # of them, what queries had at most
    pool: str = "all"
    role: Role = "both"  # of the pool
    replica: int = 0
    handover_bytes: int = 0  # WAA: of entries sent, or received
    handover_s: float = 0.0  # WAA, who encodes: from the start of a send until all has left
    operators: str | None = None  # whose served, in a line; None: those of another engine


class Neighbours:
    """What one rank exchanges with those its route names."""

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
        """Tells all that take their steps from this rank to stop."""
        for rank in (*self.route.peers, *self.route.following):
            self._comm.send(rank, StopMessage())

    def give_back(self, executor: Executor, message: StepMessage, out: Tensor | None) -> None:
        """Sends what the last stage gives back: tokens to the head, an encoder's output to the
        other stages."""
        if not executor.gives_tokens(message):
            for rank in self.route.encoded_to:
                self._comm.send(rank, EncodedMessage(group=message.group), out)
        elif self.route.tokens_to is not None:
            self._comm.send(self.route.tokens_to, TokensMessage(group=message.group), out)

    def next_step(self, executor: Executor) -> tuple[StartMessage | StepMessage | None,
                                                     Tensor | None]:
        """The next step, or the start; None when told to stop. Encoder output that arrives before
        it is taken up meanwhile."""
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
        """Returns when all inputs of `group` (None: of every group) are encoded."""
        while executor.awaits_encoded(group):
            message, tensor = self._comm.receive(*self.route.encoded_from)
            assert isinstance(message, EncodedMessage) and tensor is not None, f"{message = }"
            executor.take_encoded(message.group, tensor)

    def await_result(self, executor: Executor) -> tuple[int, Tensor] | None:
        """Gives the head the next group's tokens, or None where encoder output came instead."""
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
    """Sets up every rank but the head as the head's first message says."""
    message, _ = neighbours.next_step(executor)
    assert isinstance(message, StartMessage), f"{message = }"
    neighbours.pass_on(message)
    executor.start(message)


def serve_stage(neighbours: Neighbours, executor: Executor) -> None:
    """Every rank but the head, once started, executes what arrives and passes it on, until told to
    stop."""
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
    neighbours.await_encoded(executor)  # else who sends it would wait for a rank that has gone
    neighbours.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One rank's neighbours. The head is the first rank of the first stage."""

    rank: int
    pool: str  # its name
    stage: int  # its place in the pool
    steps_from: int | None  # None: the head, which decides them
    peers: tuple[int, ...] = ()  # of the head: its group, which takes the same inputs
    following: tuple[int, ...] = ()  # take this rank's outputs; none on the last stage
    tokens_from: int | None = None  # of the head: the last stage's first rank; None: itself
    tokens_to: int | None = None  # of the last stage's first rank: the head; None: itself
    encoded_from: tuple[int, ...] = ()  # whose encoder output it takes; none: its own
    encoded_to: tuple[int, ...] = ()  # of the last stage: who take the encoder's output from it


ALONE = Route(rank=0, pool="all", stage=0, steps_from=None)


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
    """Those of `others` that take from the rank at `index` of `group`."""
    return tuple(rank for other, rank in enumerate(others) if other % len(group) == index)
