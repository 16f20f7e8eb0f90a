"""Decisions while a job runs, by its output lengths (paper sections 7.6 and 7.7), its step times
and its late requests.

RRA adjusts its batch sizes to new lengths in place. WAA would need other buffers and mostly other
layers. Continuous policies admit requests of any length as others end. For these two a change of
lengths only leads to a message about the gain of a redeployment. To new step times all policies
adjust, WAA and the continuous ones within their caches."""

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
    joint_lengths,
    length_drift,
    observed_lengths,
)
from xscheduler.live.quick_change import FollowUpEvidence, is_urgent, revise_quickly
from xscheduler.live.reschedule import Reschedule, Revision, reschedule, revise
from xscheduler.live.shapes import (
    CacheSizes,
    can_change_lengths,
    make_monitor,
    most_allowed,
    most_planned,
    revise_shapes,
    variables_of,
    with_caches,
)

# chosen: requests done before lengths count: a share of the job, from LEAST_QUERIES up to so many
MOST_QUERIES, SHARE = 200, 0.1
CAUTION = 0.5  # chosen: share of the limit planned for after fewer requests: few are long ones
# the reason for no change of lengths if replicas are unequal and none executes RRA
NOT_RRA = ("only RRA's batches follow lengths, and no replica executes RRA; a redeployment is not "
           "searched for replicas of several shapes")
MOST_UNKNOWN = 0.02  # chosen: probability of outputs longer than any that was observed


class RunProgress(Protocol):
    """Progress of a run. finished, active: {index of the request: (input, output) tokens}. Requests
    before `first` are left out. kept: counts as of LatencyCounts."""

    @property
    def first(self) -> int: ...
    @property
    def finished(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def active(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def kept(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """A run that is followed. `threshold`: relative change of the mean output length that counts;
    None: lengths are not followed. `is_observing`: the planned lengths are the caps. `longest`:
    most KV tokens of a request. `slots`, `kv_tokens`: see CacheSizes. `other_rooms`: cache sizes of
    other shapes of replicas. `step_threshold`: relative change of step times that counts; None:
    they are not followed."""

    problem: Problem
    schedule: Schedule
    threshold: float | None
    is_observing: bool
    longest: int
    slots: int
    kv_tokens: int = 0
    other_rooms: tuple[CacheSizes, ...] = ()
    step_threshold: float | None = None

    @property
    def rooms(self) -> tuple[CacheSizes, ...]:
        """Cache sizes of every shape of replicas."""
        return (CacheSizes(slots=self.slots, kv_tokens=self.kv_tokens), *self.other_rooms)

    @property
    def num_queries(self) -> int:
        return self.problem.num_queries or 0

    @property
    def enough(self) -> int:
        """Least number of finished requests before observed lengths are used."""
        return max(LEAST_QUERIES, min(MOST_QUERIES, int(self.num_queries * SHARE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision on a run: words, record for metrics.json, and the schedule to change to."""

    sentence: str
    record: dict[str, Any]  # of metrics.json
    schedule: Schedule | None = None  # to run from now on; None: no change
    is_kept: bool = True  # whether the schedule from now on keeps the limit
    follow_up: FollowUpEvidence | None = None  # after a quick change: decide on this next


Evidence = LengthEvidence | StepTimeEvidence | AllowanceEvidence | FollowUpEvidence


class Decider:
    """Decisions on one run. The caller asks for evidence (`length_evidence`, `step_evidence`,
    `late_evidence`), then calls `decide` (takes seconds, beside the ranks) and `carry_out`."""

    def __init__(self, followed: FollowedRun, timing: TimingSource) -> None:
        self.followed, self._timing = followed, timing
        self.running = followed.schedule
        self.step_monitor = None if followed.step_threshold is None else make_monitor(
            followed.problem, timing, followed.schedule.estimate, longest=followed.longest,
            threshold=followed.step_threshold)
        self.allowance = Allowance(followed.problem.constraint, followed.num_queries)
        self._kept: LatencyCounts | None = None  # latest counts
        self._known_problem = followed.problem  # with the latest lengths
        self.is_observing = followed.is_observing
        self.needed = followed.enough  # finished requests for the next look
        if self.is_observing and can_change_lengths(self.running.estimate):
            self.needed = FIRST_QUERIES
        self.revision = 0  # of the running schedule
        self._planned = followed.problem.lengths.outputs
        self._since = 0  # first request that no decision has used yet

    def length_evidence(self, progress: RunProgress) -> LengthEvidence | None:
        """Evidence about output lengths; None if they are as planned or too few are known."""
        problem, since = self.followed.problem, max(self._since, progress.first)
        if self.followed.threshold is None:
            return None
        finished, active = (_rows(part, since) for part in (progress.finished, progress.active))
        admitted = max((*progress.finished, *progress.active), default=-1) + 1
        waiting = self.followed.num_queries - admitted
        at_work = max(len(progress.active), most_allowed(self.running.estimate))
        if waiting <= at_work or len(finished) < self.needed:  # what is left is the job's drain
            return None
        observation = Observation(finished=finished, active=active)
        observed = observed_lengths(observation, self._planned, problem.default_max_tokens)
        quantile = problem.constraint.quantile
        # longer outputs than observed are planned at the caps: they must not decide the limit
        most = min(MOST_UNKNOWN, 1 - quantile) if self.is_observing else MOST_UNKNOWN
        if observed.unknown > most:
            return None
        drift = length_drift(self._planned, observed, threshold=self.followed.threshold,
                         quantile=quantile)
        if not drift and not self.is_observing:
            return None
        done = admitted - len(progress.active)
        return LengthEvidence(
            observation=observation, observed=observed, drift=drift, is_observing=self.is_observing,
            left=self.followed.num_queries - done, done=done, admitted=admitted)

    def step_evidence(self, progress: RunProgress) -> StepTimeEvidence | None:
        """Evidence about step times; None if they are as planned or no request waits any more."""
        drift = None if self.step_monitor is None else self.step_monitor.drift()
        admitted = max((*progress.finished, *progress.active), default=-1) + 1
        if drift is None or admitted >= self.followed.num_queries:
            return None
        done = admitted - len(progress.active)
        return StepTimeEvidence(drift=drift, left=self.followed.num_queries - done, done=done)

    def late_evidence(self, progress: RunProgress) -> AllowanceEvidence | None:
        """Evidence about late requests; None if about as many are late as planned."""
        self._kept = None if progress.kept is None else LatencyCounts(*progress.kept)
        if self.followed.step_threshold is None or self.is_observing:
            return None
        admitted = max((*progress.finished, *progress.active), default=-1) + 1
        if self.followed.num_queries - admitted <= most_planned(self.running.estimate):
            return None
        return self.allowance.evidence(self._kept)

    def decide(self, evidence: Evidence) -> Decision:
        """The decision on this evidence for the remaining requests, after a full plan."""
        began_s = time.monotonic()
        if not isinstance(evidence, LengthEvidence):
            decision = self._change(
                replace(self._known_problem, num_queries=evidence.left), evidence)
        else:
            problem = _observed(self.followed.problem, evidence)
            decision = (self._change(problem, evidence) if _can_change(self.followed, evidence)
                        else self._compare_redeployment(problem, evidence))
        decision.record["search_s"] = time.monotonic() - began_s
        return decision

    def decide_quickly(self, evidence: Evidence) -> Decision | None:
        """A quick change if requests are late; None if there is none. Its `follow_up` is the
        evidence for the full plan that follows."""
        if not isinstance(evidence, (StepTimeEvidence, AllowanceEvidence)) or (
                not is_urgent(evidence)):
            return None
        began_s = time.monotonic()
        problem = replace(self._known_problem, num_queries=evidence.left, constraint=(
            self.allowance.constrained(self._known_problem.constraint, self._kept)))
        revised = self._of_shapes(
            evidence, problem, lambda shape, own, part, **held: revise_quickly(
                own, part, self._timing_by(evidence, shape), **held))
        if revised is None:
            return None
        decision = self._revised(evidence, problem, revised)
        decision.record["search_s"] = time.monotonic() - began_s
        return None if decision.schedule is None else replace(
            decision, follow_up=FollowUpEvidence(cause=evidence))

    def _timing_by(self, evidence: Evidence, shape: int) -> TimingSource:
        """The times to plan a shape with: the source's, corrected by its observed steps."""
        factors = {} if self.step_monitor is None else self.step_monitor.factors_of(shape)
        if isinstance(evidence, StepTimeEvidence) and evidence.drift.shape == shape:
            factors = {**factors, **evidence.drift.planned}
        return Retimed(self._timing, factors) if factors else self._timing

    def _of_shapes(self, evidence: Evidence, problem: Problem,
                   revise: Callable[..., Revision | None]) -> Revision | None:
        """The revision of the replicas that the evidence is about (xscheduler.live.shapes)."""
        shapes = self.running.estimate.shapes
        cause = evidence.cause if isinstance(evidence, FollowUpEvidence) else evidence
        own = [cause.drift.shape] if isinstance(cause, StepTimeEvidence) else [
            shape for shape, estimate in enumerate(shapes) if not isinstance(cause, LengthEvidence)
            or policy(estimate.policy).is_changeable]
        return revise_shapes(self.running, own, problem, self.followed.schedule.estimate,
                       self.followed.rooms, revise)

    def carry_out(self, evidence: Evidence, decision: Decision) -> bool:
        """Carries out a decision; returns whether it is worth a message."""
        if _can_change(self.followed, evidence):
            self.allowance.accept(self._kept)
        if isinstance(evidence, FollowUpEvidence):
            self._set_running(decision)
            return True
        if isinstance(evidence, AllowanceEvidence):
            self._set_running(decision)
            return decision.schedule is not None or not decision.is_kept or evidence.is_lost
        if isinstance(evidence, StepTimeEvidence):
            assert self.step_monitor is not None
            self.step_monitor.accept(evidence.drift)
            self._set_running(decision)
            return True
        enough = self.followed.enough
        # no message for an early look without a change, nor for the same decision again
        is_awaited = self.needed <= enough <= evidence.observation.num_finished
        is_settled = self._learn(evidence, decision)
        self._set_running(decision)
        self._known_problem = _observed(self.followed.problem, evidence)
        return decision.schedule is not None or is_settled or is_awaited

    def _set_running(self, decision: Decision) -> None:
        if decision.schedule is not None:
            self.running = decision.schedule
            self.revision += 1

    def _learn(self, evidence: LengthEvidence, decision: Decision) -> bool:
        """Sets when to look next; returns whether lengths count as known from now on. A job that
        observes looks again after more and more requests, until enough are done and the limit is
        kept with its confidence."""
        num_finished, enough = evidence.observation.num_finished, self.followed.enough
        if evidence.is_observing and (num_finished < enough or not decision.is_kept):
            if decision.schedule is not None:
                self._planned = evidence.observed.outputs
            looks = (LEAST_QUERIES, enough)
            self.needed = next((count for count in looks if count > num_finished), 2 * num_finished)
            return False
        # the next decision uses later requests only
        self._since, self.is_observing = evidence.admitted, False
        self._planned, self.needed = evidence.observed.outputs, enough
        return True

    def _change(self, problem: Problem, evidence: Evidence) -> Decision:
        """A change of batch sizes on the same stages, if it gains enough."""
        problem = replace(problem, constraint=self.allowance.constrained(
            problem.constraint, self._kept))
        is_early = isinstance(evidence, LengthEvidence) and evidence.is_observing and (
            evidence.observation.num_finished < LEAST_QUERIES)
        caution = CAUTION if is_early else 1.0
        found = self._of_shapes(evidence, problem, lambda shape, own, part, **held: revise(
            own, part, self._timing_by(evidence, shape), caution=caution, **held))
        assert found is not None, "each shape has a revision"
        return self._revised(evidence, problem, found)

    def _revised(self, evidence: Evidence, problem: Problem, revised: Revision) -> Decision:
        now, record = self.running.estimate, evidence.record()
        record |= {"choice": "keep", "reason": revised.reason, "from": variables_of(now),
                   "throughput_qps": {"before": revised.keep.qps or None}}
        if revised.estimate is None:
            return self._unchanged(evidence, record, revised)
        changed = with_caches(self.running, revised.estimate, problem, self.followed.longest)
        if changed is None:
            record["reason"] = "other batch sizes leave no room for the longest request"
            return Decision(sentence=f"{evidence.sentence}; the schedule stays: {record['reason']}",
                            record=record)
        record |= {"choice": "adjust", "to": variables_of(changed.estimate),
                   "revision": self.revision + 1}
        record["throughput_qps"]["after"] = changed.estimate.figures.throughput_qps
        return Decision(schedule=changed, record=record, is_kept=revised.is_kept, sentence=(
            f"{evidence.sentence}; {_changed(now, changed.estimate)} ({revised.reason})"))

    def _unchanged(self, evidence: Evidence, record: dict[str, Any],
                   revised: Revision) -> Decision:
        """The decision for no change. But a job that still observes goes back to its first schedule
        if the present one, planned after few requests, exceeds the limit."""
        now, first = self.running.estimate, self.followed.schedule.estimate
        if not evidence.is_observing or revised.is_kept or variables_of(now) == variables_of(first):
            return Decision(sentence=f"{evidence.sentence}; the schedule stays: {revised.reason}",
                            record=record, is_kept=revised.is_kept)
        record |= {"choice": "adjust", "to": variables_of(first), "revision": self.revision + 1}
        return Decision(schedule=self.followed.schedule, record=record, is_kept=False, sentence=(
            f"{evidence.sentence}; back to the first schedule, {_changed(now, first)}: "
            f"{revised.reason}"))

    def _compare_redeployment(self, problem: Problem, evidence: LengthEvidence) -> Decision:
        """A message about the gain of a redeployment, for a run that cannot change."""
        if self.running.estimate.others:
            record = evidence.record() | {"choice": "keep", "reason": NOT_RRA,
                                      "from": variables_of(self.running.estimate)}
            return Decision(sentence=f"{evidence.sentence}; the schedule stays: {NOT_RRA}",
                            record=record)
        limit_s = problem.constraint.latency_s / self.running.margin.factor
        ways = reschedule(self.running, problem, self._timing, latency_limit_s=limit_s)
        record = evidence.record() | {"choice": ways.choice, "reason": ways.sentence,
                                  "from": variables_of(self.running.estimate),
                                  "throughput_qps": {"before": ways.keep.qps or None}}
        if ways.choice in ("adjust", "redeploy"):
            assert ways.chosen is not None
            record |= {"choice": "redeploy", "to": variables_of(ways.chosen), "cost_s": ways.cost_s,
                       "break_even_queries": ways.break_even_queries}
            record["throughput_qps"]["after"] = ways.chosen.figures.throughput_qps
        return Decision(sentence=f"{evidence.sentence}. {_advice(ways)}", record=record)


def _can_change(followed: FollowedRun, evidence: Evidence) -> bool:
    """Whether the decision can change the running schedule."""
    return not isinstance(evidence, LengthEvidence) or (
        can_change_lengths(followed.schedule.estimate))


def _observed(planned: Problem, evidence: LengthEvidence) -> Problem:
    lengths = joint_lengths(evidence.observation, evidence.observed, planned.lengths)
    return replace(
        planned, num_queries=evidence.left, lengths=lengths,
        default_max_tokens=max(planned.default_max_tokens, evidence.observed.outputs.max))


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
    return (f"{ways.sentence} Only RRA can change while it runs. For the gain, stop the job "
            "(Ctrl-C) and submit it with the lengths observed so far (docs/running.md)")
