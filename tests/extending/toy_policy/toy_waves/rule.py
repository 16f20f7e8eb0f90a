"""The batching rule: XRunner's head and XSimulator's replay ask it for one step after the other."""

from collections import deque

from xgpt.core.schedule import Estimate
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Step, StepKind


class WavesRule:
    """One group. A query that is done leaves its slot at once; the next wave waits for the last."""

    num_groups = 1
    needs_tokens = True  # whether a wave is done is known only by its tokens
    slot_use = SlotUse.COMPACTED

    def __init__(self, *, wave_queries: int, kv_tokens: int) -> None:
        self.group_max_active, self._kv_tokens = wave_queries, kv_tokens
        self._waiting: deque[tuple[int, int]] = deque()  # (query, tokens that it reserves)
        self._active: dict[int, int] = {}  # query -> tokens that it reserves
        self._wave, self._iteration = -1, 0

    @property
    def reserved_tokens(self) -> int:
        return sum(self._active.values())

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if reserve_tokens > self._kv_tokens:
            return False
        self._waiting.append((query, reserve_tokens))
        return True

    def next_group(self) -> int | None:
        return 0 if self._active or self._waiting else None

    def decide(self) -> Step | None:
        if self._active:
            self._iteration += 1
            return Step(kind=StepKind.DECODE, group=0, phase=self._wave, iteration=self._iteration)
        if not self._waiting:
            return None  # the tokens just taken up were the last
        while self._waiting and len(self._active) < self.group_max_active and (
                self.reserved_tokens + self._waiting[0][1] <= self._kv_tokens):
            query, reserve_tokens = self._waiting.popleft()
            self._active[query] = reserve_tokens
        self._wave, self._iteration = self._wave + 1, 0
        return Step(kind=StepKind.ENCODE, group=0, phase=self._wave, iteration=0,
                    joined=tuple(self._active))

    def finish(self, query: int) -> None:
        del self._active[query]


def waves_rule(estimate: Estimate) -> WavesRule:
    """The rule that executes `estimate`."""
    return WavesRule(wave_queries=estimate.variables["wave_queries"],
                     kv_tokens=estimate.deployment.kv_tokens)
