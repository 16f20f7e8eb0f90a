"""What is written of every step that a stage executes."""

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
