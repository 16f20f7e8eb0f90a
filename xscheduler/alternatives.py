"""What a schedule was chosen before: the best of other policies, of other tensor-parallel degrees,
and what the latency bound excludes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from xgpt.core.schedule import Rejected, Schedule
from xscheduler.branch_and_bound import Candidate
from xscheduler.spaces.space import Searched, Space, words_of

# how the rows are labelled
POLICY_ROW, DEGREE_ROW = "policy ", "tp_degree "
NOT_LOOKED_INTO = "not looked into"  # how the reason of a policy begins that is known to lose
FREE_ROW = "without a latency bound"


class Best(NamedTuple):
    """A policy's best admissible point."""

    space: Space
    searched: Searched
    candidate: Candidate

    @property
    def plan(self) -> int:
        return self.searched.plan_of_root[self.candidate.root]


def best_in(space: Space, searched: Searched) -> list[Best]:
    """At most one; none where no admissible point was found."""
    best = searched.outcome.best
    return [] if best is None else [Best(space, searched, best)]


def rows_beside(best: Best, spaces: Sequence[Space], results: Mapping[str, Searched],
                free: Best | None, latency_bound_s: float) -> tuple[Rejected, ...]:
    """The best of each other policy, of each other tensor-parallel degree of this one, and of
    `free`, without a bound, where that is quicker."""
    rows = [_row(f"{POLICY_ROW}{space.name}", space, results[space.name],
                 range(len(space.plans)), best) for space in spaces if space is not best.space]
    own = best.space
    chosen = own.plans[best.plan].tp_degree
    for degree in sorted({plan.tp_degree for plan in own.plans} - {chosen}):
        plans = [k for k, plan in enumerate(own.plans) if plan.tp_degree == degree]
        rows.append(_row(f"{DEGREE_ROW}{degree}", own, best.searched, plans, best))
    if free is not None and free.candidate.objective > best.candidate.objective:
        point = free.candidate.point
        qps, latency_s = free.space.figures(free.plan, point)
        rows.append(Rejected(
            label=f"{FREE_ROW}: {free.space.name}, {words_of(free.space, free.plan, point)}",
            throughput_qps=qps, latency_s=latency_s, reason=f"latency above {latency_bound_s:g} s"))
    return tuple(rows)


def rows_with_margin(schedule: Schedule, free: Schedule, origin: Schedule) -> tuple[Rejected, ...]:
    """Alternatives to `schedule`, which keeps a margin, in one currency: it was searched for as
    `origin`, for longer outputs, and so were they; `free` is the best without a margin."""
    rows = [row for row in origin.rejected if not row.label.startswith(FREE_ROW)]
    if schedule.estimate != origin.estimate:
        rows = [in_the_same_lengths(row, schedule, origin) for row in rows]
    rows += [row for row in free.rejected if row.label.startswith(FREE_ROW)]
    return (*rows, Rejected(
        label=f"without a margin: {free.estimate.policy}", latency_s=free.figures.latency_s,
        throughput_qps=free.figures.throughput_qps,
        reason="keeps the bound only if all is as expected"))


def in_the_same_lengths(row: Rejected, schedule: Schedule, origin: Schedule) -> Rejected:
    """An alternative to `origin`, which was searched for longer outputs, beside `schedule`, which
    is the same with the problem's own: with the share that it loses there."""
    if row.throughput_qps is None:
        return row
    share = row.throughput_qps / origin.figures.throughput_qps
    return replace(row, latency_s=None, throughput_qps=share * schedule.figures.throughput_qps,
                   reason="no better, with the margin" if share >= 1 else
                   f"lower throughput by {1 - share:.1%}, with the margin")


def _row(label: str, space: Space, searched: Searched, plans: Sequence[int],
         best: Best) -> Rejected:
    candidate, upper = searched.best_of(plans)
    if candidate is None:
        is_proved = upper == -math.inf
        return Rejected(label=label, throughput_qps=None, latency_s=None,
                        reason="no admissible schedule" if is_proved else
                        f"{NOT_LOOKED_INTO}: no more than {upper:.4g} queries/s")
    plan = searched.plan_of_root[candidate.root]
    qps, latency_s = space.figures(plan, candidate.point)
    lost = 1 - qps / best.candidate.objective
    reason = (f"lower throughput by {lost:.1%}: no more than {max(upper, qps):.4g} queries/s"
              if lost > 0 else "no better")
    return Rejected(label=f"{label}: {words_of(space, plan, candidate.point)}", reason=reason,
                    throughput_qps=qps, latency_s=latency_s)
