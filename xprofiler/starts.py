"""What ranks take besides a run's own time: until they are at work, and to end. It is no part of a
schedule's throughput, which is that of queries, but of what a job's command takes; layouts of the
cores differ in it. The latest runs of the same layout tell, else what was seen of others: so it is
after a first run, too, whose ranks may have waited for operators to be compiled and for a cold
disk. A layout that was held to be so slow for ever would not be tried again."""

import statistics
from collections.abc import Sequence

from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource

STARTS_KEPT = 5
# SmolLM2-135M on two cores of an EPYC: of one rank and of two that were started while their job
# was planned.
ALONE_S, SEVERAL_S = 0.4, 0.6


def start_s(timing: TimingSource, ranks: int) -> float:
    """Seconds that so many ranks are expected to take: the median of what was seen, of an even
    number the lesser of the two in the middle."""
    seen = timing.profile.starts_s if isinstance(timing, ProfileTiming) else ()
    if len(seen) > 1:
        return statistics.median_low(seen)
    return SEVERAL_S if ranks > 1 else ALONE_S


def with_start(seen: Sequence[float], seconds: float) -> tuple[float, ...]:
    """The latest, with one more."""
    return (*seen, round(seconds, 3))[-STARTS_KEPT:]
