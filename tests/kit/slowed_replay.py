"""A run that is slowed in the middle, replayed with its launcher beside it: what would be decided,
when, and how many queries would be over the bound.

The rules, the stages and the launcher's decider are those of a run. The clock is not: a step's work
is what the timing source says, and `worked` when it is done. The launcher looks as often as it does
beside ranks, and a plan takes `plan_s` seconds of the run's clock, a change at once AT_ONCE_S."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from xgpt.app.running.follow import LOOK_S
from xgpt.core.policies import policy
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xrunner.files.heartbeat import MOST_STEPS, ReportedStep
from xrunner.rules.changes import Changeable, changes_of
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import EncodingRule, Step, rules_for
from xscheduler.cache_sizing import HEADROOM, slots_for
from xscheduler.live.decisions import Decider, Decision, Evidence, FollowedRun
from xsimulator.replay.event_replay import Handover
from xsimulator.replay.job import planned_queries
from xsimulator.replay.kernel import ARRIVAL, Kernel
from xsimulator.replay.pipeline import Pipeline
from xsimulator.replay.pool import HandoverPlan, PoolHead, PoolPlan, PoolProcess
from xsimulator.replay.queries import Queries
from xsimulator.replay.routing import Replica, Routing
from xsimulator.replay.step_clock import StepClock, StepClocks, StepSizes
from xsimulator.stage_times import HandoverCost

BEAT_S = 1.0  # between what ranks tell
AT_ONCE_S = 0.4  # that a change at once takes, on cores that are taken
TAKES_S = 0.5  # between looks of a run for a change
# (stage, from when on, seconds of work) -> when the work is done
Worked = Callable[[int, float, float], float]
Told = dict[int, dict[str, list[ReportedStep]]]  # by stage and kind, since they were told last


def steadily(factor: float, stages: Sequence[int], from_s: float) -> Worked:
    """Work on these stages takes so many times as long from then on."""
    def worked(stage: int, start_s: float, work_s: float) -> float:
        if stage not in stages:
            return start_s + work_s
        before_s = min(max(from_s - start_s, 0.0), work_s)
        return start_s + before_s + (work_s - before_s) * factor
    return worked


def in_pulses(share: float, period_s: float, from_s: float) -> Worked:
    """All stages stand still for a share of each period from then on."""
    works_s = (1 - share) * period_s  # of each period, at its end

    def worked(stage: int, start_s: float, work_s: float) -> float:
        if start_s + work_s <= from_s:
            return start_s + work_s
        work_s -= max(from_s - start_s, 0.0)
        periods, place = divmod(max(start_s - from_s, 0.0), period_s)
        # of the work that there is time for since from_s
        done, left = divmod(periods * works_s + max(place - share * period_s, 0.0) + work_s,
                            works_s)
        return from_s + done * period_s + (share * period_s + left if left > 0 else 0.0)
    return worked


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of it, by query; the decisions, each with when it was made."""

    start_s: np.ndarray
    latency_s: np.ndarray
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)  # when taken up, from phase

    def over(self, bound_s: float, since_s: float = -math.inf) -> float:
        """The share of the queries begun since then that are over the bound."""
        own = self.latency_s[self.start_s >= since_s]
        return float((own > bound_s).mean()) if len(own) else math.nan


class _Untabled:
    """A clock whose steps are taken one by one (PoolProcess takes many of a StepClock's)."""

    def __init__(self, clock: StepClock) -> None:
        self.seconds = clock.seconds


class _SlowedLine(Pipeline):
    """Stages whose steps take as long as `worked` says, and are told of."""

    def __init__(self, plan: PoolPlan, worked: Worked, told: Told) -> None:
        super().__init__(plan.clock, len(plan.stages))
        self._plan, self._worked, self._told = plan, worked, told

    def work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """See Line."""
        seconds, ends, at_s, free_s = [], [], now, self.free_s
        for place, work_s in enumerate(self._clock.seconds(sizes)):
            stage, start_s = self._plan.stages[place], max(at_s, free_s[place])
            at_s = self._worked(stage, start_s, work_s)
            free_s[place] = at_s
            seconds.append(at_s - start_s)
            ends.append(at_s)
            self._told.setdefault(stage, {}).setdefault(step.kind.value, []).append(ReportedStep(
                step.kind.value, sizes.encoded + sizes.decoded, sizes.tokens + sizes.decoded,
                sizes.decoded, sizes.context, int(sizes.longest),
                sizes.tokens / max(sizes.encoded, 1), seconds[-1]))
        self._steps.append(step)
        self._sizes.append(sizes[1:5])
        self._durations.append(seconds)
        self._ends.append(ends)
        return at_s


class _SlowedPool(PoolProcess):
    """A pool of such stages."""

    def __init__(self, plan: PoolPlan, kernel: Kernel, queries: Queries, worked: Worked,
                 told: Told) -> None:
        super().__init__(plan, kernel, queries)
        self.told, self._pipeline = told, _SlowedLine(plan, worked, told)
        self.head = PoolHead(plan, queries, self._pipeline)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The progress of a run (xscheduler.live.decisions.RunProgress)."""

    first: int
    finished: dict[int, tuple[int, int]]
    active: dict[int, tuple[int, int]]
    kept: tuple[int, int, int]


class _Launcher:
    """Looks, plans, and hands changes on, on the run's clock."""

    def __init__(self, decider: Decider, kernel: Kernel, queries: Queries, rule: Changeable,
                 pools: Sequence[_SlowedPool], found: Replayed, plan_s: float) -> None:
        self._decider, self._kernel, self._queries = decider, kernel, queries
        self._rule, self._pools, self._found, self._plan_s = rule, pools, found, plan_s
        self._told_s, self._is_planning = 0.0, False

    def look(self, now: float) -> None:
        if self._queries.num_done == len(self._queries.inputs):
            return
        if now - self._told_s >= BEAT_S:
            self._told_s = now
            for stage, kinds in self._pools[0].told.items():
                steps = [step for own in kinds.values() for step in own[-MOST_STEPS:]]
                self._decider.step_monitor.add_report(stage, stage, now, steps)
                kinds.clear()
        if self._is_planning:
            look = None
        else:
            seen = self._seen()
            at_bound = self._decider.late_evidence(seen)
            look = self._decider.step_evidence(seen) or at_bound
        if look is not None:
            self._decide(look, now)
        self._kernel.at(now + LOOK_S, ARRIVAL, self.look)

    def _decide(self, look: Evidence, now: float) -> None:
        self._is_planning = True
        at_once = self._decider.decide_quickly(look)
        decision = at_once or self._decider.decide(look)
        takes_s = self._plan_s if at_once is None else AT_ONCE_S
        self._kernel.at(now + takes_s, ARRIVAL, lambda at: self._take(look, decision, at))

    def _take(self, look: Evidence, decision: Decision, now: float) -> None:
        self._is_planning = False
        self._decider.carry_out(look, decision)
        self._found.decisions.append((now, decision))
        if decision.schedule is not None:
            self._kernel.at(now + TAKES_S / 2, ARRIVAL, lambda at: self._change(decision, at))
        if decision.follow_up is not None:
            self._decide(decision.follow_up, now)

    def _change(self, decision: Decision, now: float) -> None:
        assert decision.schedule is not None
        phase = self._rule.next_phase
        self._rule.change(changes_of(decision.schedule.estimate,
                                     slots=self._decider.followed.slots), phase=phase)
        self._found.changes.append((now, phase))
        for pool in self._pools:
            pool.wake(now)

    def _seen(self) -> _Seen:
        own = self._queries
        begun = [query for query, start_s in enumerate(own.start_s) if start_s is not None]
        lengths = {query: (own.inputs[query], int(own.output_tokens[query])) for query in begun}
        active = {query: lengths[query] for query in begun if own.last_token_s[query] is None}
        limit_s = self._decider.followed.schedule.bound.limit_s
        took_s = [own.last_token_s[query] - own.start_s[query] for query in begun
                  if query not in active]
        return _Seen(first=0, active=active, kept=(0, len(took_s), sum(
            one > limit_s for one in took_s)), finished={
                query: pair for query, pair in lengths.items() if query not in active})


def slowed_replay(problem: Problem, timing: TimingSource, schedule: Schedule, worked: Worked,
                  lengths: Sequence[np.ndarray], *, threshold: float | None = 0.15,
                  plan_s: float = 1.0) -> Replayed:
    """One replay of a job of one copy with these (inputs, outputs). threshold: `run.step_times`;
    None: nothing is planned anew."""
    estimate = schedule.estimate
    inputs, outputs = lengths
    jobs: QueryLengths = planned_queries(problem, inputs, outputs)
    queries = Queries(jobs, encode_gives_token=not problem.model.is_encoder_decoder)
    kernel, clocks = Kernel(), StepClocks(problem, timing)
    rules = rules_for(estimate)
    longest = int(inputs.max() + max(outputs.max(), jobs.most_outputs.max())) + 1
    slots = 0
    if policy(estimate.policy).is_changeable:
        slots = slots_for(estimate, problem, longest, HEADROOM, in_blocks=False)
        assert isinstance(rules[0], RraRule)
        rules[0].make_room(slots)
    told: Told = {}
    pools = []
    for pool, rule in zip(estimate.deployment.pools, rules, strict=True):
        plan = PoolPlan(name=pool.name, role=pool.role, rule=rule, kv_tokens=pool.kv_tokens,
                        clock=_Untabled(clocks.of(pool.stages, longest)),
                        stages=tuple(stage.index for stage in pool.stages))
        pools.append(_SlowedPool(plan, kernel, queries, worked, told))
    if len(pools) > 1:
        source, target = estimate.deployment.pools
        assert isinstance(rules[0], EncodingRule)
        Handover(HandoverPlan(
            seconds=HandoverCost(problem, timing, source.stages, target.stages).seconds,
            release=rules[0].release, source=source.name, target=target.name), kernel, queries,
            {own.plan.name: own for own in pools})
    found = Replayed(start_s=np.zeros(0), latency_s=np.zeros(0))
    if threshold is not None:
        assert isinstance(rules[0], Changeable)
        decider = Decider(FollowedRun(
            problem=problem, schedule=schedule, step_threshold=threshold, threshold=None,
            is_observing=False, slots=slots, longest=longest), timing)
        launcher = _Launcher(decider, kernel, queries, rules[0], pools, found, plan_s)
        kernel.at(LOOK_S, ARRIVAL, launcher.look)
    Routing(kernel, queries, [Replica(queries, pools[:1])]).start()
    kernel.run()
    found.start_s = np.array(queries.start_s, float)
    found.latency_s = np.array(queries.last_token_s, float) - found.start_s
    return found
