"""A running schedule whose control variables cannot change, under lengths that have: a continuously
batching one takes up queries as others end, whatever their lengths, and has nothing to adjust."""

import math

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_seconds
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, forbidding
from xscheduler.copies import problem_for
from xscheduler.evaluator import config_of
from xscheduler.live.pinned import Way, pinned_policy


def way_as_it_is(deployed: Estimate, problem: Problem, timing: TimingSource,
                 latency_limit_s: float) -> Way:
    """The schedule as it is, with the problem's lengths, and what forbids it, if anything."""
    problem = problem_for(problem, deployed)
    form, config = pinned_policy(deployed, problem, timing), config_of(deployed)
    figures = form.evaluate([config])
    limit = Limit(int(forbidding(figures, Limits(
        queries=problem.num_queries or math.inf, latency_s=latency_limit_s, stretch=REFUSED_BEYOND,
        is_timed=True))[0]))
    latency_s = float(figures.latency_s[0])
    reason = f"{limit.words}: {format_seconds(latency_s)} of {format_seconds(latency_limit_s)}" if (
        limit is Limit.LATENCY) else limit.words or None
    return Way(estimate=form.estimate(config).in_copies(problem.copies), reason=reason)
