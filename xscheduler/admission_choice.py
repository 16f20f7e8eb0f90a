"""The choice of an admission rule (xrunner.rules.room) in the search.

Each policy is searched with its simplest rule. A rule with more room only helps if memory binds. So
its cell is added where the best replayed point has as many requests as memory holds."""

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from xgpt.core.controls import Admission
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xscheduler.feasibility import Feasibility
from xscheduler.replays import Replays
from xscheduler.space import NOTHING, Cell, Point
from xsimulator.rough.workload import Workload

TIE = 0.01  # chosen: share of throughput for which the simplest rule is kept
LOOKS = {"future-peak": "peak look-ahead", "reserve-static": "forecasts in full",
         "reserve-dynamic": "look-ahead to the next end"}
FORECASTS = {"cap": "each request's cap", "known": "known lengths", "column": "given forecasts",
             "distribution": "the distribution", "mean": "finished requests",
             "class": "length classes"}


def room_words(estimate: Estimate, problem: Problem) -> str:
    """`95 -> 130 requests at a time (peak look-ahead, by each request's cap)`: those of a replica
    by reserve, and by its own rule; "" by reserve or greedy."""
    own = getattr(estimate.controls, "admission", None)
    if own is None or own.rule not in LOOKS:
        return ""
    work, tokens = Workload(problem), estimate.deployment.kv_tokens
    before, after = (tokens / work.by(rule).tokens_at_work for rule in (work.admission, own))
    kind = own.forecast.kind
    return (f"{before:,.0f} -> {after:,.0f} requests at a time ({LOOKS[own.rule]}, by "
            f"{FORECASTS.get(kind, kind)})")


def rules_of(name: str, problem: Problem, workload: Workload) -> list[tuple[Admission, float]]:
    """A policy's admission rules, the simplest first, with the requests at a time that each has
    room for, as a multiple of those by the simplest. Others than it have room for more."""
    simplest, *others = policy(name).admissions(problem.adjustment.admission)
    if problem.model.is_encoder_decoder:
        others = []  # its KV cache lies in rows, however few tokens they hold
    tokens = workload.by(simplest).tokens_at_work
    rooms = [(rule, tokens / workload.by(rule).tokens_at_work) for rule in others]
    return [(simplest, 1.0), *(pair for pair in rooms if pair[1] > 1 + NOTHING)]


def further_cells(replayed: Mapping[Cell, Replays], best_qps: float,
                  keeps: Feasibility) -> dict[Cell, Replays]:
    """The cells to add, which may have more than `best_qps` requests/s: throughput grows by no more
    than the share by which the requests at a time do."""
    found = {}
    for cell, replays in replayed.items():
        if (more := cell.further) is None or more in replayed or not cell.off:
            continue
        best = cell.best_replayed(partial(keeps.is_kept, cell))
        if (best.point is not None and more.room * best.throughput_qps > (1 + TIE) * best_qps
                and _is_full(cell, best.point)):
            found[more] = replays
    return found


def _is_full(cell: Cell, point: Point) -> bool:
    """Whether a tenth more requests than the point's have no room, or do not help, by the
    formula."""
    more = np.array([point, (math.ceil(1.1 * point[0]), *point[1:])], np.int64)
    kept, rough = cell.with_room(more)
    return len(kept) < 2 or rough.throughput_qps[1] <= (1 + NOTHING) * rough.throughput_qps[0]
