"""What planning needs to know of a job's requests: a few numbers of each, and no text."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import IntArray
from xgpt.core.workload import RequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """The usable requests of a job, in the order of its file. Arrays are [requests]."""

    input_tokens: IntArray | None  # None where texts were not tokenised
    caps: IntArray  # most output tokens that a request names; 0 where it leaves that to the job
    forced: IntArray  # exact number of its output tokens; 0 where the model decides
    may_stop: NDArray[np.bool_]  # whether it names strings that end its output
    bad_lines: tuple[RequestError, ...] = ()  # what else is in the file
    are_tokenised: bool = True  # False: with no model at hand, `input_tokens` is what they give
    # request -> why it cannot run, whatever the schedule
    unusable: Mapping[int, str] = field(default_factory=dict)
    digest: str = ""  # of all that was read

    def __len__(self) -> int:
        return len(self.caps)

    def output_caps(self, default: int) -> IntArray:
        """Most tokens that each may generate; `default` where it names no limit."""
        return np.where(self.caps > 0, self.caps, default)

    @property
    def are_forced(self) -> bool:
        """Whether all their output lengths are known."""
        return bool((self.forced > 0).all()) and not self.may_stop.any()
