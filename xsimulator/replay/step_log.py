"""What one pool did, while it is replayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.schedule import Role
from xrunner.rules.steps import Step
from xsimulator.replay.records import PoolRecords
from xsimulator.replay.step_clock import StepSizes


class StepLog:
    """The steps of a pool in the order in which its head took them up, and its memory over time."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._sizes: list[tuple[int, int, int, float]] = []
        self._durations: list[list[float]] = []
        self._ends: list[list[float]] = []
        self._memory: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step, sizes: StepSizes, durations: list[float],
            ends: list[float]) -> None:
        """`durations`, `ends`: [stages] seconds of the step, and when each is through with it."""
        self._steps.append(step)
        self._sizes.append((sizes.decoded, sizes.encoded, sizes.tokens, sizes.context))
        self._durations.append(durations)
        self._ends.append(ends)

    def note_memory(self, now: float, held: int) -> None:
        """`held` tokens of the KV budget are taken from `now` on."""
        if not self._memory or self._memory[-1][1] != held:
            self._memory.append((now, held))

    def records(self, *, name: str, role: Role, stages: Sequence[int],
                kv_tokens: int) -> PoolRecords:
        """The pool's records; `stages` and `kv_tokens` as there."""
        sizes = np.array(self._sizes, float).reshape(-1, 4)
        shape = (len(self._steps), len(stages))
        end_s = np.array(self._ends, float).reshape(shape)
        memory = np.array(self._memory, float).reshape(-1, 2)
        decoded, encoded, tokens = (sizes[:, i].astype(np.int64) for i in range(3))
        return PoolRecords(
            name=name, role=role, stages=tuple(stages), steps=tuple(self._steps), decoded=decoded,
            encoded=encoded, tokens=tokens, context=sizes[:, 3], end_s=end_s,
            start_s=end_s - np.array(self._durations, float).reshape(shape),
            memory_s=memory[:, 0], memory_tokens=memory[:, 1].astype(np.int64),
            kv_tokens=kv_tokens)
