"""What a batching rule decides: `Step`, the work one group of queries takes through all stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class StepKind(Enum):
    ENCODE = "encode"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch's pass through the pipeline.

    `joined` are the queries encoded (ENCODE only), in the order of their new slots; a DECODE step
    advances every active query of the group by one token. `iteration` counts from 1 within a
    phase and is 0 for ENCODE.
    """

    kind: StepKind
    group: int
    phase: int
    iteration: int
    joined: tuple[int, ...] = ()


class BatchingRule(Protocol):
    """Decides the order of steps. The driver's loop (XRunner's head, the replay) is

        while (group := rule.next_group()) is not None:
            ... collect the tokens of the group's previous step; rule.finish(query) for each done
            step = rule.decide()
            if step is not None: execute it
    """

    @property
    def num_groups(self) -> int:
        """Groups the active queries are split into."""
        ...

    @property
    def group_max_active(self) -> int:
        """Most queries a group ever holds."""
        ...

    def submit(self, query: int, reserve_tokens: int) -> bool:
        """Queue a query needing `reserve_tokens` of KV at most; False if it can never fit."""
        ...

    def next_group(self) -> int | None:
        """Group the next step concerns; None when every query is done."""
        ...

    def decide(self) -> Step | None:
        """The step for that group, or None if it has nothing to do at this place."""
        ...

    def finish(self, query: int) -> None:
        """An active query has its last token: its slot and tokens are free from now on."""
        ...
