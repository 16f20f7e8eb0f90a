"""Mean time to first token of encodings that arrive at random and take equal times: the M/D/1 queue
(Pollaczek-Khinchine)."""

import math


def mean_ttft_s(rate: float, through_s: float, slowest_s: float | None = None, *,
                replicas: int = 1) -> float:
    """The mean seconds from arrival to first token; infinite if requests come faster than they are
    encoded.

    `rate`: requests/s, of a Poisson process for each of `replicas`. `through_s`: seconds of an
    encoding through all stages. `slowest_s`: those on the slowest stage, for which alone others
    wait (None: there is one stage)."""
    slowest_s, rate = through_s if slowest_s is None else slowest_s, rate / replicas
    idle = 1 - rate * slowest_s
    return through_s + rate * slowest_s**2 / (2 * idle) if idle > 0 else math.inf
