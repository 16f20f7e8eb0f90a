"""The host's cost of a step besides executing it: deciding, composing, committing."""

import time

import torch
from torch import Tensor

from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head
from xrunner.engine.pipeline import ALONE, Neighbours
from xrunner.engine.roster import Vocabulary
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import StepKind

_QUERIES, _TOKENS, _GROUPS, _ROUNDS = 32, 12, 2, 5


class _NoSink:
    """Nobody listens: writing a result is paid once a query, not once a step."""

    def finished(self, result: FinishedQuery) -> None:
        """Dropped."""

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Dropped."""

    def should_stop(self) -> bool:
        return False


class _NoWork:
    """A stage that answers at once, so that what remains is the head's own time."""

    keeps_tokens, returns_early = True, False

    def __init__(self) -> None:
        self.steps = 0
        self._active: dict[int, int] = {}

    def start(self, message: StartMessage) -> None:
        self._active = dict.fromkeys(range(message.num_groups), 0)

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor:
        self.steps += 1
        self._active[message.group] += len(message.joined) - len(message.removed)
        is_encode = message.kind is StepKind.ENCODE
        rows = len(message.joined) if is_encode else self._active[message.group]
        return torch.zeros(rows, dtype=torch.long)

    def gives_tokens(self, message: StepMessage) -> bool:
        return True

    def awaits_encoded(self, group: int | None = None) -> bool:
        return False

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """Never called: nothing is encoded apart."""


def head_overhead() -> tuple[float, ...]:
    """Seconds of the head's loop for one step of an ordinary micro-batch; one sample a round."""
    samples = []
    for _ in range(_ROUNDS):
        stage = _NoWork()
        rule = RraRule(encode_batch=_QUERIES, decode_iterations=_TOKENS, num_groups=_GROUPS,
                       max_active=_QUERIES, kv_tokens=_QUERIES * 100)
        head = Head(rule=rule, executor=stage, neighbours=Neighbours(local_comms(1)[0], ALONE),
                    sink=_NoSink(), vocabulary=Vocabulary(eos_ids=frozenset(),
                                                          decode_text=lambda ids: ""))
        for index in range(_QUERIES):
            assert head.submit(PreparedQuery(index=index, id="", input_ids=(1,) * 64,
                                             max_new_tokens=_TOKENS, is_forced=True))
        head.start()
        start = time.perf_counter()
        head.run()
        samples.append((time.perf_counter() - start) / stage.steps)
    return tuple(samples)
