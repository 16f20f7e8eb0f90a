"""Decisions while a job runs, by its output lengths (paper sections 7.6 and 7.7), its step times
and its late queries.

RRA adjusts its batch sizes to new lengths in place. WAA would need other buffers and mostly other
layers; continuous policies take queries of any length as others end. For these two a change of
lengths only leads to a message about what a redeployment would bring. To new step times all
policies adjust, WAA and the continuous ones within their caches."""

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
from xscheduler.fallback import FIRST_QUERIES
from xscheduler.live.allowance import Allowance, AllowanceEvidence, LatencyCounts
from xscheduler.live.evidence import LengthEvidence, StepTimeEvidence
from xscheduler.live.observations import (
    LEAST_QUERIES,
    Observation,
    drift_of,
    joint_of,
    observed_lengths,
)
from xscheduler.live.quick_change import FollowUpEvidence, is_pressing, revise_at_once
from xscheduler.live.reschedule import Reschedule, Revised, reschedule, revise
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

# chosen: queries done before lengths count: a share of the job, from LEAST_QUERIES up to so many
MOST_QUERIES, SHARE = 200, 0.1
CAUTION = 0.5  # chosen: share of the limit planned for after fewer queries: few are long ones
# the reason for no change of lengths if copies are unequal and none executes RRA
NOT_RRA = ("no copy executes RRA, whose batches alone follow lengths, and for copies of several "
           "shapes it is not looked for what a re-deployment would bring")
MOST_UNKNOWN = 0.02  # chosen: probability of outputs longer than any query was watched for


class Written(Protocol):
    """Progress of a run: {index of the query: (input, output) tokens} of finished and active ones.
    Queries before `first` are left out. kept: counts as xscheduler.live.allowance.LatencyCounts."""

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
    """A run that is followed.

    threshold: relative change of the mean output length that counts; None: lengths are not
    followed. is_observing: the planned lengths are the caps. longest: most KV tokens of a query.
    slots, kv_tokens: see Room. other_rooms: rooms of the other shapes of copies. step_threshold:
    relative change of step times that counts; None: step times are not followed."""

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
        """Room of every shape of copies."""
        return (Room(slots=self.slots, kv_tokens=self.kv_tokens), *self.other_rooms)

    @property
    def num_queries(self) -> int:
        return self.problem.num_queries or 0

    @property
    def enough(self) -> int:
        """Number of finished queries before lengths count."""
        return max(LEAST_QUERIES, min(MOST_QUERIES, int(self.num_queries * SHARE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in words and figures."""

    sentence: str
    record: dict[str, Any]  # of metrics.json
    schedule: Schedule | None = None  # to run from now on; None: no change
    is_kept: bool = True  # whether what runs from now on keeps the limit
    follow_up: FollowUpEvidence | None = None  # after a quick change: decide on this next


Evidence = LengthEvidence | StepTimeEvidence | AllowanceEvidence | FollowUpEvidence


class Decider:
    """Decisions on one run: `look` for evidence, `decide` (takes seconds, beside the ranks), then
    `take` the decision."""

    def __init__(self, followed: Followed, timing: TimingSource) -> None:
        self.followed, self._timing = followed, timing
        self.running = followed.schedule
        self.pace = None if followed.step_threshold is None else pace_of(
            followed.problem, timing, followed.schedule.estimate, longest=followed.longest,
            threshold=followed.step_threshold)
        self.allowance = Allowance(followed.problem.constraint, followed.num_queries)
        self._kept: LatencyCounts | None = None  # latest counts
        self._known = followed.problem  # with the latest lengths
        self.is_observing = followed.is_observing
        self.needed = followed.enough  # finished queries for the next look
        if self.is_observing and can_change_lengths(self.running.estimate):
            self.needed = FIRST_QUERIES
        self.revision = 0  # of the running schedule
        self._planned = followed.problem.lengths.outputs
        self._since = 0  # first query that no decision has used yet

    def look(self, written: Written) -> LengthEvidence | None:
        """Evidence about output lengths; None if they are as planned or too few are known."""
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
        # longer outputs than observed are planned at the caps: they must not decide the limit
        most = min(MOST_UNKNOWN, 1 - quantile) if self.is_observing else MOST_UNKNOWN
        if observed.unknown > most:
            return None
        drift = drift_of(self._planned, observed, threshold=self.followed.threshold,
                         quantile=quantile)
        if not drift and not self.is_observing:
            return None
        done = admitted - len(written.active)
        return LengthEvidence(
            seen=seen, observed=observed, drift=drift, is_observing=self.is_observing,
            left=self.followed.num_queries - done, done=done, admitted=admitted)

    def look_at_steps(self, written: Written) -> StepTimeEvidence | None:
        """Evidence about step times; None if they are as planned or no query waits any more."""
        drift = None if self.pace is None else self.pace.drift()
        admitted = max((*written.finished, *written.active), default=-1) + 1
        if drift is None or admitted >= self.followed.num_queries:
            return None
        done = admitted - len(written.active)
        return StepTimeEvidence(drift=drift, left=self.followed.num_queries - done, done=done)

    def look_at_bound(self, written: Written) -> AllowanceEvidence | None:
        """Evidence about late queries; None if about as many are late as planned, or the job only
        drains."""
        self._kept = None if written.kept is None else LatencyCounts(*written.kept)
        if self.followed.step_threshold is None or self.is_observing:
            return None
        admitted = max((*written.finished, *written.active), default=-1) + 1
        if self.followed.num_queries - admitted <= most_planned(self.running.estimate):
            return None
        return self.allowance.look(self._kept)

    def decide(self, look: Evidence) -> Decision:
        """A plan for the evidence and the remaining queries."""
        began_s = time.monotonic()
        if not isinstance(look, LengthEvidence):
            decision = self._change(replace(self._known, num_queries=look.left), look)
        else:
            problem = _observed(self.followed.problem, look)
            decision = (self._change(problem, look) if _can_change(self.followed, look)
                        else self._ask(problem, look))
        decision.record["search_s"] = time.monotonic() - began_s
        return decision

    def decide_at_once(self, look: Evidence) -> Decision | None:
        """A quick change if queries are late; None if there is none. Its `follow_up` is the
        evidence for the full plan that follows."""
        if not (isinstance(look, (StepTimeEvidence, AllowanceEvidence)) and is_pressing(look)):
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
            decision, follow_up=FollowUpEvidence(look=look))

    def _timing_by(self, look: Evidence, shape: int) -> TimingSource:
        """The times to plan a shape with: the source's, corrected by its observed steps."""
        factors = {} if self.pace is None else self.pace.factors_of(shape)
        if isinstance(look, StepTimeEvidence) and look.drift.shape == shape:
            factors = {**factors, **look.drift.planned}
        return Retimed(self._timing, factors) if factors else self._timing

    def _of_shapes(self, look: Evidence, problem: Problem,
                   revise: Callable[..., Revised | None]) -> Revised | None:
        """The change for the copies that the evidence is about (xscheduler.live.shapes)."""
        shapes = self.running.estimate.shapes
        seen = look.look if isinstance(look, FollowUpEvidence) else look
        own = [seen.drift.shape] if isinstance(seen, StepTimeEvidence) else [
            shape for shape, estimate in enumerate(shapes) if not isinstance(seen, LengthEvidence)
            or policy(estimate.policy).is_changeable]
        return revise_shapes(self.running, own, problem, self.followed.schedule.estimate,
                       self.followed.rooms, revise)

    def take(self, look: Evidence, decision: Decision) -> bool:
        """Carries out a decision; returns whether it is worth a message."""
        if _can_change(self.followed, look):
            self.allowance.take(self._kept)
        if isinstance(look, FollowUpEvidence):
            self._run_on(decision)
            return True
        if isinstance(look, AllowanceEvidence):
            self._run_on(decision)
            return decision.schedule is not None or not decision.is_kept or look.is_lost
        if isinstance(look, StepTimeEvidence):
            assert self.pace is not None, "who saw them"
            self.pace.take(look.drift)
            self._run_on(decision)
            return True
        enough = self.followed.enough
        # no message for an early look without a change, nor for the same decision again
        is_awaited = self.needed <= enough <= look.seen.num_finished
        is_settled = self._learn(look, decision)
        self._run_on(decision)
        self._known = _observed(self.followed.problem, look)
        return decision.schedule is not None or is_settled or is_awaited

    def _run_on(self, decision: Decision) -> None:
        if decision.schedule is not None:
            self.running = decision.schedule
            self.revision += 1

    def _learn(self, look: LengthEvidence, decision: Decision) -> bool:
        """Sets when to look next; returns whether lengths count as known from now on. A job that
        observes looks again after more and more queries, until enough are done and the limit is
        kept with its confidence."""
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

    def _change(self, problem: Problem, look: Evidence) -> Decision:
        """A change of batch sizes on the given stages, if it gains enough."""
        problem = replace(problem, constraint=self.allowance.constrained(
            problem.constraint, self._kept))
        is_early = isinstance(look, LengthEvidence) and look.is_observing and (
            look.seen.num_finished < LEAST_QUERIES)
        found = self._of_shapes(look, problem, lambda shape, own, part, **held: revise(
            own, part, self._timing_by(look, shape), caution=CAUTION if is_early else 1.0, **held))
        assert found is not None, "there is something to say of each"
        return self._revised(look, problem, found)

    def _revised(self, look: Evidence, problem: Problem, revised: Revised) -> Decision:
        """The decision for a revision that was found."""
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

    def _unchanged(self, look: Evidence, record: dict[str, Any],
                   revised: Revised) -> Decision:
        """No change; but a job that still observes goes back to its first schedule if the present
        one, planned after few queries, misses the limit."""
        now, first = self.running.estimate, self.followed.schedule.estimate
        if not look.is_observing or revised.is_kept or variables_of(now) == variables_of(first):
            return Decision(sentence=f"{look.sentence}; the schedule stays: {revised.reason}",
                            record=record, is_kept=revised.is_kept)
        record |= {"choice": "adjust", "to": variables_of(first), "revision": self.revision + 1}
        return Decision(schedule=self.followed.schedule, record=record, is_kept=False, sentence=(
            f"{look.sentence}; back to the beginning, {_changed(now, first)}: {revised.reason}"))

    def _ask(self, problem: Problem, look: LengthEvidence) -> Decision:
        """A message about what a redeployment would bring, for a run that cannot change."""
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


def _can_change(followed: Followed, look: Evidence) -> bool:
    """Whether the decision can change the running schedule."""
    return not isinstance(look, LengthEvidence) or can_change_lengths(followed.schedule.estimate)


def _observed(planned: Problem, look: LengthEvidence) -> Problem:
    """The problem of the remaining queries with the observed lengths."""
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
