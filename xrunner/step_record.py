"""Records of executed steps, a line each in the files of a run."""

from collections.abc import Sequence
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One executed step. Times in seconds since the run's common start.

    `tokens`: rows in all, prefill and decode. `decoded`: rows that decode. `context_tokens`: their
    mean context; `longest_context`: their longest. `input_tokens`: length of equal inputs with as
    many attention pairs as the encoded ones."""

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
    """Sizes that determine a step's time: the last four fields of a StepRecord."""

    decoded: int = 0
    context_tokens: float = 0.0
    longest_context: int = 0
    input_tokens: float = 0.0


NO_SIZES = StepSizes()


def decoded_sizes(contexts: Sequence[int]) -> StepSizes:
    """Sizes of a decode step. `contexts`: tokens of each request, the new one included."""
    count = len(contexts)
    return StepSizes(count, sum(contexts) / count, max(contexts)) if count else NO_SIZES


def equal_input_tokens(spans: Sequence[tuple[int, int]]) -> float:
    """Tokens of each of equal inputs with as many tokens and attention pairs as `spans`, together.
    `spans`: (first token, number of tokens) of each encoded part. 0 without any."""
    tokens = sum(count for _, count in spans)
    pairs = sum((first + count) ** 2 - first**2 for first, count in spans)
    return pairs / tokens if tokens else 0.0
