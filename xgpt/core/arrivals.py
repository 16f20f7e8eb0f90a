"""When a job's requests arrive: by a random process at a rate, at times of their own, or from
clients who each send the next request when an answer has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from xgpt.core.lengths import FloatArray

Process = Literal["poisson", "even", "gamma"]
PROCESSES: tuple[Process, ...] = get_args(Process)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """How requests arrive. `rate`: requests/s; None: it is looked for, or `times_s` tells it.
    `process`: of the gaps between them. `cv`: standard deviation of the gaps over their mean, of
    gamma alone. `concurrency`: clients of a closed loop; None: requests do not wait for answers.
    `times_s`: own arrivals, [requests] rising from 0, as a trace or the requests tell them."""

    rate: float | None = None
    process: Process = "poisson"
    cv: float = 1.0
    concurrency: int | None = None
    times_s: FloatArray | None = None

    def at_rate(self, rate: float, count: int, seed: int) -> FloatArray:
        """[count] seconds at which requests arrive at `rate` requests/s, the first at 0. Gaps are
        own ones repeated, else drawn. Those of two rates differ by a factor alone."""
        shape = 1.0 if self.process == "poisson" else self.cv**-2
        if self.times_s is not None:
            own = np.diff(self.times_s, prepend=-self.mean_gap_s)
            gaps = np.resize(own / self.mean_gap_s, count)
        elif self.process == "even":
            gaps = np.ones(count)
        else:
            gaps = np.random.default_rng((seed, 50)).gamma(shape, 1 / shape, count)
        arrival_s = np.cumsum(gaps) / rate
        return np.asarray(arrival_s - arrival_s[:1])

    @property
    def mean_gap_s(self) -> float:
        """Mean gap of `times_s`; 1 if all are at once."""
        assert self.times_s is not None, "no times of their own"
        span_s = float(self.times_s[-1] - self.times_s[0]) if len(self.times_s) > 1 else 0.0
        return span_s / (len(self.times_s) - 1) if span_s > 0 else 1.0

    @property
    def own_rate(self) -> float | None:
        """Requests/s that are planned for; None if the rate is looked for or follows answers."""
        return self.rate if self.times_s is None else 1 / self.mean_gap_s
