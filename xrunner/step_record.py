"""What is written of every step that a stage executes."""

from collections.abc import Sequence
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One executed step, times in seconds since the run's common start.

    What its time depends on besides `tokens`, the rows in all: how many of them were `decoded`, the
    tokens of context that these had in the mean and at most, and how long an input of all equal
    ones would be that attended to as many pairs of tokens as what was encoded."""

    kind: str
    group: int
    phase: int
    iteration: int
    queries: int
    tokens: int
    start_s: float
    end_s: float
    decoded: int = 0
    context_tokens: float = 0.0
    longest_context: int = 0
    input_tokens: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class StepSizes(NamedTuple):
    """The last four fields of a StepRecord."""

    decoded: int = 0
    context_tokens: float = 0.0
    longest_context: int = 0
    input_tokens: float = 0.0


NO_SIZES = StepSizes()


def decoded_sizes(contexts: Sequence[int]) -> StepSizes:
    """Of rows that are decoded. `contexts`: tokens of each, the new one included."""
    count = len(contexts)
    return StepSizes(count, sum(contexts) / count, max(contexts)) if count else NO_SIZES


def even_input(spans: Sequence[tuple[int, int]]) -> float:
    """Tokens of each of equal inputs that attend to as many pairs as these (first token, tokens)
    and are as many tokens together; 0 without any."""
    tokens = sum(count for _, count in spans)
    pairs = sum((first + count) ** 2 - first**2 for first, count in spans)
    return pairs / tokens if tokens else 0.0
