"""What is decided while a job runs, by the output lengths that it has shown (paper sections 7.6 and
7.7), and by how long its steps take.

To other lengths RRA changes its batch sizes in place. WAA's would need other buffers and, mostly,
other layers; the continuous policies' take up queries as others end, whatever their lengths, and
have caches of one size: for them what is decided is what a re-deployment would bring, and the job
goes on. To other step times all of them change, WAA and the continuous policies within the caches
that they have."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from xgpt.core.lengths import IntArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile_timing import Retimed
from xprofiler.timing import TimingSource
from xscheduler.beginning import FIRST_QUERIES
from xscheduler.live.allowance import Allowance, Kept, KeptLook
from xscheduler.live.at_once import WholeLook, is_pressing, revise_at_once
from xscheduler.live.drifted import Look
from xscheduler.live.observed import Observation, drift_of, joint_of, observed_lengths
from xscheduler.live.reschedule import WORTH_CHANGING, Reschedule, Revised, reschedule, revise
from xscheduler.live.shapes import (
    Room,
    can_change_lengths,
    most_at_work,
    most_planned,
    pace_of,
    revise_shapes,
    roomy,
    variables_of,
)
from xscheduler.live.slowed import StepLook

LEAST_QUERIES, MOST_QUERIES, SHARE = 50, 200, 0.1  # done before lengths count: a share of the job
# Of fewer queries the long ones are seldom seen: what they lead to is planned for this share of the
# bound.
CAUTION = 0.5  # chosen
# Share of throughput that a change must bring where steps take other times and the bound is kept as
# it is: steps scatter, and a change costs a few phases.
STEPS_WORTH = 0.05  # chosen
# What is said of other lengths where copies are of several shapes, and none of them executes RRA.
NOT_RRA = ("no copy executes RRA, whose batches alone follow lengths, and for copies of several "
           "shapes it is not looked for what a re-deployment would bring")
MOST_UNKNOWN = 0.02  # chosen: of the outputs longer than any query was watched for


class Written(Protocol):
    """What a run has shown: (input, output) tokens by the place of each query in the job, of those
    that are done and of those at work. Queries before `first` are forgotten. `kept`: see
    xscheduler.live.allowance."""

    @property
    def first(self) -> int: ...
    @property
    def finished(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def active(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def kept(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A run that is followed, of a job by a schedule.

    threshold: share of the mean output length that counts as drift; None: lengths are known, or
    not looked at. is_observing: the plan is no expectation, but every query's cap. longest: KV
    tokens that a query may need. slots, kv_tokens: see Room; other_rooms: of the other shapes that
    its copies have. step_threshold: share by which steps must take longer, or less long, than
    planned; None: they are not looked at."""

    problem: Problem
    schedule: Schedule
    threshold: float | None
    is_observing: bool
    longest: int
    slots: int
    kv_tokens: int = 0
    other_rooms: tuple[Room, ...] = ()
    step_threshold: float | None = None

    @property
    def rooms(self) -> tuple[Room, ...]:
        """Of every shape that its copies have."""
        return (Room(slots=self.slots, kv_tokens=self.kv_tokens), *self.other_rooms)

    @property
    def num_queries(self) -> int:
        return self.problem.num_queries or 0

    @property
    def enough(self) -> int:
        """Queries done before lengths count."""
        return max(LEAST_QUERIES, min(MOST_QUERIES, int(self.num_queries * SHARE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One look at the lengths that led to something, in words and figures."""

    sentence: str
    record: dict[str, Any]  # of metrics.json
    schedule: Schedule | None = None  # what runs from now on; None: what ran before
    is_kept: bool = True  # the bound, by what runs from now on
    follow_up: WholeLook | None = None  # of a change at once: what is to be decided on next


AnyLook = Look | StepLook | KeptLook | WholeLook


class Decider:
    """Decides on one run: `look` at what it has written, `decide`, which takes a while and may be
    done beside the run, then `take` the decision."""

    def __init__(self, followed: Followed, timing: TimingSource) -> None:
        self.followed, self._timing = followed, timing
        self.running = followed.schedule
        self.pace = None if followed.step_threshold is None else pace_of(
            followed.problem, timing, followed.schedule.estimate, longest=followed.longest,
            threshold=followed.step_threshold)
        self.allowance = Allowance(followed.problem.constraint, followed.num_queries)
        self._kept: Kept | None = None  # as it was looked at last
        self._known = followed.problem  # with the lengths that were seen last
        self.is_observing = followed.is_observing
        self.needed = followed.enough  # queries done, for the next look
        if self.is_observing and can_change_lengths(self.running.estimate):
            self.needed = FIRST_QUERIES
        self.revision = 0  # of the schedule that is running
        self._planned = followed.problem.lengths.outputs
        self._since = 0  # first query that has not led to a decision yet

    def look(self, written: Written) -> Look | None:
        """What there is to decide on by what the run has written; None where nothing is, yet."""
        problem, since = self.followed.problem, max(self._since, written.first)
        if self.followed.threshold is None:
            return None
        finished, active = (_rows(part, since) for part in (written.finished, written.active))
        admitted = max((*written.finished, *written.active), default=-1) + 1
        waiting = self.followed.num_queries - admitted
        at_work = max(len(written.active), most_at_work(self.running.estimate))
        if waiting <= at_work or len(finished) < self.needed:  # what is left is the job's drain
            return None
        seen = Observation(finished=finished, active=active)
        observed = observed_lengths(seen, self._planned, problem.default_max_tokens)
        quantile = problem.constraint.quantile
        # those that nobody was watched for are planned at their caps: they must not be the bound's
        most = min(MOST_UNKNOWN, 1 - quantile) if self.is_observing else MOST_UNKNOWN
        if observed.unknown > most:
            return None
        drift = drift_of(self._planned, observed, threshold=self.followed.threshold,
                         quantile=quantile)
        if not drift and not self.is_observing:
            return None
        done = admitted - len(written.active)
        return Look(seen=seen, observed=observed, drift=drift, is_observing=self.is_observing,
                    left=self.followed.num_queries - done, done=done, admitted=admitted)

    def look_at_steps(self, written: Written) -> StepLook | None:
        """What there is to decide on by the steps that `pace` has heard of; None where they are as
        planned, or nobody waits any more whom a change would concern."""
        drift = None if self.pace is None else self.pace.drift()
        admitted = max((*written.finished, *written.active), default=-1) + 1
        if drift is None or admitted >= self.followed.num_queries:
            return None
        done = admitted - len(written.active)
        return StepLook(drift=drift, left=self.followed.num_queries - done, done=done)

    def look_at_bound(self, written: Written) -> KeptLook | None:
        """What there is to decide on by how many queries are over the bound; None where about as
        many are as is planned for, or what is left is the job's drain."""
        self._kept = None if written.kept is None else Kept(*written.kept)
        if self.followed.step_threshold is None or self.is_observing:
            return None
        admitted = max((*written.finished, *written.active), default=-1) + 1
        if self.followed.num_queries - admitted <= most_planned(self.running.estimate):
            return None
        return self.allowance.look(self._kept)

    def decide(self, look: AnyLook) -> Decision:
        """Plans for the lengths, or the step times, that were seen and the queries that are
        left."""
        began_s = time.monotonic()
        if not isinstance(look, Look):
            decision = self._change(replace(self._known, num_queries=look.left), look)
        else:
            problem = _observed(self.followed.problem, look)
            decision = (self._change(problem, look) if _can_change(self.followed, look)
                        else self._ask(problem, look))
        decision.record["search_s"] = time.monotonic() - began_s
        return decision

    def decide_at_once(self, look: AnyLook) -> Decision | None:
        """A change that takes no time to find, where queries that are begun will be late; None
        where there is none. What is to be decided on after it comes with it."""
        if not (isinstance(look, (StepLook, KeptLook)) and is_pressing(look)):
            return None
        began_s = time.monotonic()
        problem = replace(self._known, num_queries=look.left, constraint=(
            self.allowance.constrained(self._known.constraint, self._kept)))
        revised = self._of_shapes(look, problem, lambda shape, own, part, **held: revise_at_once(
            own, part, self._timing_by(look, shape), **held))
        if revised is None:
            return None
        decision = self._revised(look, problem, revised)
        decision.record["search_s"] = time.monotonic() - began_s
        return None if decision.schedule is None else replace(
            decision, follow_up=WholeLook(look=look))

    def _timing_by(self, look: AnyLook, shape: int) -> TimingSource:
        """What a shape is planned with, after this look: the source's times, as steps of its copies
        were seen to take them."""
        factors = {} if self.pace is None else self.pace.factors_of(shape)
        if isinstance(look, StepLook) and look.drift.shape == shape:
            factors = {**factors, **look.drift.planned}
        return Retimed(self._timing, factors) if factors else self._timing

    def _of_shapes(self, look: AnyLook, problem: Problem,
                   revise: Callable[..., Revised | None]) -> Revised | None:
        """What of the copies that the look is about is to change (xscheduler.live.shapes)."""
        shapes = self.running.estimate.shapes
        seen = look.look if isinstance(look, WholeLook) else look
        own = [seen.drift.shape] if isinstance(seen, StepLook) else [
            shape for shape, estimate in enumerate(shapes) if not isinstance(seen, Look)
            or policy(estimate.policy).is_changeable]
        return revise_shapes(self.running, own, problem, self.followed.schedule.estimate,
                       self.followed.rooms, revise)

    def take(self, look: AnyLook, decision: Decision) -> bool:
        """Goes on with what was decided; whether there is anything to tell."""
        if _can_change(self.followed, look):
            self.allowance.take(self._kept)
        if isinstance(look, WholeLook):
            self._run_on(decision)
            return True
        if isinstance(look, KeptLook):
            self._run_on(decision)
            return decision.schedule is not None or not decision.is_kept or look.is_lost
        if isinstance(look, StepLook):
            assert self.pace is not None, "who saw them"
            self.pace.take(look.drift)
            self._run_on(decision)
            return True
        enough = self.followed.enough
        # an early look that changes nothing has nothing to tell, nor has the same once more
        is_awaited = self.needed <= enough <= look.seen.num_finished
        is_settled = self._learn(look, decision)
        self._run_on(decision)
        self._known = _observed(self.followed.problem, look)
        return decision.schedule is not None or is_settled or is_awaited

    def _run_on(self, decision: Decision) -> None:
        if decision.schedule is not None:
            self.running = decision.schedule
            self.revision += 1

    def _learn(self, look: Look, decision: Decision) -> bool:
        """What the next look is about; whether lengths count as known from now on. A job that
        observes looks again at more and more queries until enough are done and the bound is kept:
        what is left to chance by then is what the confidence allows."""
        seen, enough = look.seen.num_finished, self.followed.enough
        if look.is_observing and (seen < enough or not decision.is_kept):
            if decision.schedule is not None:
                self._planned = look.observed.outputs
            looks = (LEAST_QUERIES, enough)
            self.needed = next((count for count in looks if count > seen), 2 * seen)
            return False
        # the next decision is about queries that this one has not seen
        self._since, self.is_observing = look.admitted, False
        self._planned, self.needed = look.observed.outputs, enough
        return True

    def _change(self, problem: Problem, look: AnyLook) -> Decision:
        """Batch sizes change on the stages there are, if that is worth it."""
        problem = replace(problem, constraint=self.allowance.constrained(
            problem.constraint, self._kept))
        is_early = isinstance(look, Look) and look.is_observing and (
            look.seen.num_finished < LEAST_QUERIES)
        found = self._of_shapes(look, problem, lambda shape, own, part, **held: revise(
            own, part, self._timing_by(look, shape), caution=CAUTION if is_early else 1.0,
            worth=WORTH_CHANGING if isinstance(look, Look) else STEPS_WORTH, **held))
        assert found is not None, "there is something to say of each"
        return self._revised(look, problem, found)

    def _revised(self, look: AnyLook, problem: Problem, revised: Revised) -> Decision:
        """The decision that it comes to."""
        now, record = self.running.estimate, look.record()
        record |= {"choice": "keep", "reason": revised.reason, "from": variables_of(now),
                   "throughput_qps": {"before": revised.keep.qps or None}}
        if revised.estimate is None:
            return self._unchanged(look, record, revised)
        changed = roomy(self.running, revised.estimate, problem, self.followed.longest)
        if changed is None:
            record["reason"] = "other batch sizes leave no room for the longest request"
            return Decision(sentence=f"{look.sentence}; the schedule stays: {record['reason']}",
                            record=record)
        record |= {"choice": "adjust", "to": variables_of(changed.estimate),
                   "revision": self.revision + 1}
        record["throughput_qps"]["after"] = changed.estimate.figures.throughput_qps
        return Decision(schedule=changed, record=record, is_kept=revised.is_kept, sentence=(
            f"{look.sentence}; {_changed(now, changed.estimate)} ({revised.reason})"))

    def _unchanged(self, look: AnyLook, record: dict[str, Any],
                   revised: Revised) -> Decision:
        """The schedule stays; but of a job that observes, one that few queries led to and that
        does not keep the bound makes way for the one it began with."""
        now, first = self.running.estimate, self.followed.schedule.estimate
        if not look.is_observing or revised.is_kept or variables_of(now) == variables_of(first):
            return Decision(sentence=f"{look.sentence}; the schedule stays: {revised.reason}",
                            record=record, is_kept=revised.is_kept)
        record |= {"choice": "adjust", "to": variables_of(first), "revision": self.revision + 1}
        return Decision(schedule=self.followed.schedule, record=record, is_kept=False, sentence=(
            f"{look.sentence}; back to the beginning, {_changed(now, first)}: {revised.reason}"))

    def _ask(self, problem: Problem, look: Look) -> Decision:
        """A run that cannot change is only told what a re-deployment would bring."""
        if self.running.estimate.others:
            record = look.record() | {"choice": "keep", "reason": NOT_RRA,
                                      "from": variables_of(self.running.estimate)}
            return Decision(sentence=f"{look.sentence}; the schedule stays: {NOT_RRA}",
                            record=record)
        limit_s = problem.constraint.latency_s / self.running.margin.factor
        ways = reschedule(self.running, problem, self._timing, latency_limit_s=limit_s)
        record = look.record() | {"choice": ways.choice, "reason": ways.sentence,
                                  "from": variables_of(self.running.estimate),
                                  "throughput_qps": {"before": ways.keep.qps or None}}
        if ways.choice in ("adjust", "redeploy"):
            assert ways.chosen is not None
            record |= {"choice": "redeploy", "to": variables_of(ways.chosen), "cost_s": ways.cost_s,
                       "break_even_queries": ways.break_even_queries}
            record["throughput_qps"]["after"] = ways.chosen.figures.throughput_qps
        return Decision(sentence=f"{look.sentence}. {_advice(ways)}", record=record)


def _can_change(followed: Followed, look: AnyLook) -> bool:
    """Whether what is decided changes the schedule, or is only told."""
    return not isinstance(look, Look) or can_change_lengths(followed.schedule.estimate)


def _observed(planned: Problem, look: Look) -> Problem:
    """The problem of the queries that are left, by the lengths that were seen."""
    return replace(
        planned, num_queries=look.left, lengths=joint_of(look.seen, look.observed, planned.lengths),
        default_max_tokens=max(planned.default_max_tokens, look.observed.outputs.max))


def _rows(part: Mapping[int, tuple[int, int]], since: int) -> IntArray:
    rows = [lengths for query, lengths in sorted(part.items()) if query >= since]
    return np.array(rows, np.int64).reshape(-1, 2)


def _changed(old: Estimate, new: Estimate) -> str:
    before, after = variables_of(old), variables_of(new)
    return ", ".join(f"{key} {before[key]} -> {after[key]}" for key in before
                     if before[key] != after[key])


def _advice(ways: Reschedule) -> str:
    if ways.choice == "keep" or ways.choice is None:
        return ways.sentence
    return (f"{ways.sentence} Only RRA changes while it runs: if that is worth it, stop the job "
            "(Ctrl-C) and submit it with the lengths seen so far (docs/running.md)")
