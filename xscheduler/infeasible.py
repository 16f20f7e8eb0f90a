"""Why no schedule satisfies a problem, and the tightest latency that one could."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_bytes, format_seconds
from xscheduler.admissible import Limit
from xscheduler.spaces.space import Space, Tight, words_of

MOSTLY = 0.5  # of the latency: a part of it that is named as the cause


class _Easy(NamedTuple):
    space: Space
    tight: Tight


def explain(spaces: Sequence[Space], latency_bound_s: float, *, is_proved: bool) -> InfeasibleError:
    """The error to raise: the binding constraint, the tightest latency and who reaches it."""
    easy = [_Easy(space, tight) for space in spaces for tight in space.easiest()]
    with_room = [one for one in easy if not one.tight.limit]
    if not with_room:
        return InfeasibleError(_without_room(easy))
    best = min(with_room, key=lambda one: (one.tight.latency_s, one.tight.point))
    space, tight = best
    problem, estimate = space.problem, space.estimate(tight.plan, tight.point)
    longest = problem.lengths.outputs.quantile(problem.constraint.quantile)
    start = "no schedule satisfies" if is_proved else "the search's limit came before any that met"
    crowded = min((one.tight.latency_s for one in easy if one.tight.limit is Limit.MEMORY),
                  default=math.inf)
    text = (f"{start} the bound of {format_seconds(latency_bound_s)} for a query of "
            f"{longest} output tokens (quantile {problem.constraint.quantile:g}); latency binds. "
            f"The tightest that can be met is {_rounded_up(tight.latency_s)} s, by policy "
            f"{space.name}, {words_of(space, tight.plan, tight.point)} "
            f"({tight.throughput_qps:.3g} queries/s): {_binding(estimate)}")
    if crowded < tight.latency_s:
        text += (f". Memory forbids quicker ones, down to {format_seconds(crowded)}: more memory "
                 "or a smaller model, dtype or maximum output would allow them")
    return InfeasibleError(text)


def _binding(estimate: Estimate) -> str:
    """What most of a tightest latency goes into."""
    figures, depth = estimate.figures, len(estimate.deployment.decoding.stages)
    if (share := figures.encode_s / figures.latency_s) > MOSTLY:
        return f"encoding time binds, {share:.0%} of it"
    iteration = f"{format_seconds(figures.decode_iteration_s)} an iteration"
    return f"decoding binds, {iteration}" if depth == 1 else (
        f"pipeline depth binds: each token passes {depth} stages, {iteration}")


def _rounded_up(seconds: float) -> str:
    """Four digits, never less than `seconds`: the figure must work as a bound itself."""
    digits = 3 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def _without_room(easy: Sequence[_Easy]) -> str:
    problem = easy[0].space.problem
    limits = {one.tight.limit for one in easy}
    if Limit.RANGE in limits:
        # a smaller memory need than the capacity must not be told as the reason
        one = next(one for one in easy if one.tight.limit is Limit.RANGE)
        beyond = one.space.beyond(one.tight)
        return ("no schedule: the profile was measured for smaller sizes than this job's, and "
                f"says nothing beyond 4 times as much{beyond}; measure one for this job")
    estimates = [one.space.estimate(one.tight.plan, one.tight.point) for one in _one_a_plan(easy)]
    if limits == {Limit.QUERIES}:
        present = min(one.space.present(one.tight) for one in easy)
        return (f"no schedule: the job has {problem.num_queries} queries, and the fixed "
                f"values keep {present:.0f} present at a time")
    held = min(max(estimate.figures.memory_bytes) for estimate in estimates)
    return (f"no schedule: memory binds. {problem.model.name} needs at least {format_bytes(held)} "
            "on its fullest device, of which "
            f"{format_bytes(estimates[0].figures.memory_capacity_bytes)} can be used; it takes "
            "more devices, or a smaller model, dtype or maximum output")


def _one_a_plan(easy: Sequence[_Easy]) -> list[_Easy]:
    """The smallest point of each policy and tensor plan."""
    found: dict[tuple[str, int], _Easy] = {}
    for one in easy:
        key = (one.space.name, one.tight.plan)
        if key not in found or one.tight.point < found[key].tight.point:
            found[key] = one
    return list(found.values())
