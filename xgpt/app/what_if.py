"""A plan and what may be asked besides: what more of each limit would bring, what becomes of the
schedule when output lengths change, and how to go on from one that is deployed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xgpt.app.opened import OpenedJob
from xgpt.app.schedule import JobPlanner, Plan
from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import to_json
from xgpt.report.what_if_tables import (
    drift_table,
    offers_table,
    reschedule_table,
)
from xscheduler.drift import DriftRow, drift_rows
from xscheduler.fallback import hint
from xscheduler.live.reschedule import Reschedule, reschedule
from xscheduler.planner import Horizon, Planner, PlanOptions
from xscheduler.price import AS_IT_IS, Offer, price
from xscheduler.room import with_room


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A plan, or why there is none, and the answers to what was asked besides (None: it was not).
    As text they are the tables that `xgpt schedule` prints."""

    opened: OpenedJob
    horizon: Horizon
    plan: Plan | None
    infeasible: InfeasibleError | None
    hint: str  # at what a run would do all the same
    offers: Sequence[Offer] | None
    drift: Sequence[DriftRow] | None
    ways: Reschedule | None

    def __str__(self) -> str:
        parts = [] if self.plan is None else [str(self.plan)]
        if self.ways is not None:
            parts.append(reschedule_table(self.ways))
        if self.offers is not None:
            parts.append(offers_table(self.offers))
        if self.drift is not None:
            parts.append(drift_table(self.drift, self.opened.problem.constraint))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The schedule's keys, as its file has them, then those asked for."""
        keys: dict[str, Any] = {} if self.plan is None else to_json(self.plan.schedule)
        keys["horizon"] = self.horizon
        if self.infeasible is not None:
            keys["infeasible"] = str(self.infeasible)
        asked = (("price", self.offers), ("drift", self.drift), ("reschedule", self.ways))
        return keys | {key: value for key, value in asked if value is not None}

    @property
    def recommended(self) -> Schedule | None:
        """The schedule to deploy: the plan's or, of a deployed one that is to be kept or adjusted,
        what that comes to."""
        if self.plan is None or self.ways is None or self.ways.chosen is None or (
                self.ways.choice == "redeploy"):
            return None if self.plan is None else self.plan.schedule
        schedule, chosen = self.plan.schedule, self.ways.chosen
        return with_room(schedule.changed(
            estimate=chosen, gap=schedule.proof.bound_qps / chosen.figures.throughput_qps - 1,
            explanation=(), rejected=()), self.opened.problem)


def answers_for(opened: OpenedJob, options: PlanOptions, *, with_price: bool = False,
                with_drift: bool = False, deployed: Schedule | None = None) -> Answers:
    """Plans the job, and answers what is asked about it. `deployed`: the schedule to go on from.
    """
    plans = JobPlanner(opened, options)
    plan: Plan | None = None
    infeasible: InfeasibleError | None = None
    try:
        plan = plans.plan()
    except InfeasibleError as why:
        infeasible = why
    opened, planner = plans.of(plan)
    offers: Sequence[Offer] | None = None
    if with_price:
        offers = price(planner.problem, planner.of)
        # the first says why there is no schedule now, which the command does anyway
        offers = offers if offers[0].what != AS_IT_IS else offers[1:]
    return Answers(
        hint="" if infeasible is None else hint(opened.problem, planner.timing), opened=opened,
        horizon=options.horizon, plan=plan, infeasible=infeasible, offers=offers,
        ways=None if deployed is None else _ways(planner, deployed),
        drift=_drift(planner, plan) if with_drift and plan is not None else None)


def _ways(planner: Planner, deployed: Schedule) -> Reschedule:
    try:
        steady: Schedule | InfeasibleError = planner.steady()
    except InfeasibleError as why:
        steady = why
    limit_s = None if isinstance(steady, InfeasibleError) else (
        planner.problem.constraint.latency_s / steady.margin.factor)
    return reschedule(deployed, planner.problem, planner.timing, best=steady,
                      latency_limit_s=limit_s)


def _drift(planner: Planner, plan: Plan) -> Sequence[DriftRow]:
    plan.opened.tell.say(
        "replaying the schedule, and the best one, on 13 changed distributions ...")
    return drift_rows(
        planner.problem, planner.timing, plan.schedule.estimate,
        search=lambda problem: planner.without_margin(problem).estimate)
