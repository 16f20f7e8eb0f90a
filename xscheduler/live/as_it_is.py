"""A continuously batching schedule that runs, under lengths or step times that have changed. It
takes up queries as others end, whatever their lengths, and has nothing to adjust to those; where
steps take longer than planned, it may let fewer queries work at a time, or a step have fewer
tokens: within the caches there are."""

import math
from dataclasses import replace

from xgpt.core.controls import ContinuousControls
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_seconds
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, forbidding
from xscheduler.copies import problem_for
from xscheduler.evaluator import config_of
from xscheduler.live.pinned import Way, pinned_policy

# Of the queries at a time and of the tokens of a step that the run began with: the limits that are
# looked at.
ACTIVE_SHARES = tuple(round(0.87**power, 4) for power in range(22))
BUDGET_SHARES = (1.0, 0.5, 0.25)
LEAST_BUDGET = 16


def way_within_limits(began: Estimate, problem: Problem, timing: TimingSource,
                      latency_limit_s: float) -> Way:
    """The best limits that are no larger than those of `began`, which sized the caches."""
    problem, controls = problem_for(problem, began), began.controls
    assert isinstance(controls, ContinuousControls), f"{began.policy = }"
    form, config = pinned_policy(began, problem, timing), config_of(began)
    groups = began.deployment.num_groups
    active = sorted({max(round(share * controls.max_active), groups) for share in ACTIVE_SHARES})
    budgets = [None] if controls.token_budget is None else sorted({
        max(round(share * controls.token_budget), min(LEAST_BUDGET, controls.token_budget))
        for share in BUDGET_SHARES})
    configs = [replace(config, max_active=count, **(
        {} if budget is None else {"token_budget": budget}))
        for count in active for budget in budgets]
    figures = form.evaluate(configs)
    limits = forbidding(figures, Limits.of(
        problem.constraint, queries=problem.num_queries or math.inf, latency_s=latency_limit_s,
        stretch=REFUSED_BEYOND, is_timed=True))
    free = [place for place, limit in enumerate(limits.tolist()) if not limit]
    if not free:
        return Way(estimate=None, reason="no smaller limits keep the bound")
    best = max(free, key=lambda place: (float(figures.throughput_qps[place]), -place))
    return Way(estimate=form.estimate(configs[best]).in_copies(began.deployment.replicas),
               reason=None)


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
