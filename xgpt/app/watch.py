"""The launcher's eye on a running job: output lengths as they come, and what they mean for the
schedule (paper sections 7.6 and 7.7).

RRA changes its batch sizes in place. WAA's would need other buffers and, mostly, other layers: for
it the launcher says what a re-deployment would bring, and the job goes on. Plans are made beside
the run, in a thread of lower priority, since the cores are the ranks'.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.app.session import Session
from xgpt.core.controls import max_in_system
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import TimingSource
from xrunner.engines.engine import engine_of
from xrunner.io.launcher_link import ChangeOrder, LengthsSoFar, ObservedState, read_observed
from xrunner.rules.rra import most_active, phase_controls
from xscheduler.beginning import FIRST_QUERIES, can_settle, headroom
from xscheduler.live.observed import (
    Drift,
    Observation,
    ObservedLengths,
    drift_of,
    joint_of,
    observed_lengths,
)
from xscheduler.live.pinned import POLICIES
from xscheduler.live.reschedule import Reschedule, reschedule
from xscheduler.live.revision import Revised, revise
from xscheduler.room import with_room_for

LEAST_QUERIES, MOST_QUERIES, SHARE = 50, 200, 0.1  # done before lengths count: a share of the job
# Of fewer queries the long ones are seldom seen: what they lead to is planned for this share of the
# bound.
CAUTION = 0.5
MOST_UNKNOWN = 0.02  # of the outputs longer than any query was watched for
LOOK_S = 0.5
# Caches are sized once: room for as many times the queries that a group is planned to hold, should
# outputs turn out shorter.
HEADROOM = 2.0
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One look at the lengths that led to something, in words and figures."""

    sentence: str
    record: dict[str, Any]  # of metrics.json
    schedule: Schedule | None = None  # what runs from now on; None: what ran before
    is_kept: bool = True  # the bound, by what runs from now on


class Rescheduler:
    """Follows one run. `update` is called many times a second; it never waits for a plan."""

    def __init__(self, *, problem: Problem, timing: TimingSource, schedule: Schedule, output: Path,
                 threshold: float, is_observing: bool, num_queries: int, longest: int, slots: int,
                 waits: bool = False) -> None:
        """threshold: share of the mean output length. is_observing: the plan is no expectation,
        but every query's cap. longest: KV tokens that a query may need. slots: of a group's cache.
        waits: `update` does wait (tests)."""
        self._problem, self._timing, self._output = problem, timing, output
        self._running, self._threshold = schedule, threshold
        self._is_observing, self._num_queries = is_observing, num_queries
        self._longest, self.slots, self._waits = longest, slots, waits
        self._first = schedule
        self._enough = max(LEAST_QUERIES, min(MOST_QUERIES, int(num_queries * SHARE)))
        self._needed = self._enough  # done, for the next look
        if is_observing and schedule.estimate.policy == "rra":
            self._needed = FIRST_QUERIES
        self._planned = problem.lengths.outputs
        self._since = 0  # first query that has not led to a decision yet
        self._looked_s = -math.inf
        self._thread: threading.Thread | None = None
        self._work: _Work | None = None  # of the thread
        self._found: Decision | None = None
        self._is_over = False
        self._revision = 0
        self.decisions: list[Decision] = []

    def update(self) -> bool:
        """Look at what the run has written, and plan; or pass a plan's decision on, and return
        that there is one."""
        now = time.monotonic()
        if self._is_over or (now - self._looked_s < LOOK_S and not self._waits):
            return False
        self._looked_s = now
        if self._thread is None and (state := read_observed(self._output)) is not None:
            self._consider(state)
        if self._thread is not None and self._waits:
            self._thread.join()
        return self._thread is not None and not self._thread.is_alive() and self._take_up()

    def _take_up(self) -> bool:
        found, self._thread, self._found = self._found, None, None
        if found is None:  # the plan failed, and has said so; the run goes on
            self._is_over = True
            return False
        assert self._work is not None, "a thread has its work"
        # an early look that changes nothing has nothing to tell, nor has the same once more
        is_awaited = self._needed <= self._enough <= self._work.seen.num_finished
        is_settled = self._learn(self._work, found)
        if found.schedule is None and not (is_settled or is_awaited):
            return False
        if found.schedule is not None:
            self._running = found.schedule
            self._revision += 1
            ChangeOrder(revision=self._revision, controls=phase_controls(
                found.schedule.estimate, slots=self.slots)).save(self._output)
        self.decisions.append(found)
        return True

    def _learn(self, work: _Work, found: Decision) -> bool:
        """What the next look is about; whether lengths count as known from now on. A job that
        observes looks again at more and more queries until enough are done and the bound is kept:
        what is left to chance by then is what the confidence allows."""
        seen = work.seen.num_finished
        if work.is_observing and (seen < self._enough or not found.is_kept):
            if found.schedule is not None:
                self._planned = work.observed.outputs
            looks = (LEAST_QUERIES, self._enough)
            self._needed = next((count for count in looks if count > seen), 2 * seen)
            return False
        # the next decision is about queries that this one has not seen
        self._since, self._is_observing = work.admitted, False
        self._planned, self._needed = work.observed.outputs, self._enough
        return True

    def _consider(self, state: ObservedState) -> None:
        since = max(self._since, state.first)
        finished, active = (_rows(part, since) for part in (state.finished, state.active))
        admitted = max((*state.finished, *state.active), default=-1) + 1
        waiting = self._num_queries - admitted
        at_work = max(len(state.active), max_in_system(self._running.estimate.controls))
        if waiting <= at_work:  # what is left is the job's drain
            return
        if len(finished) < self._needed:
            return
        seen = Observation(finished=finished, active=active)
        observed = observed_lengths(seen, self._planned, self._problem.default_max_tokens)
        quantile = self._problem.constraint.quantile
        # those that nobody was watched for are planned at their caps: they must not be the bound's
        most = min(MOST_UNKNOWN, 1 - quantile) if self._is_observing else MOST_UNKNOWN
        if observed.unknown > most:
            return
        drift = drift_of(self._planned, observed, threshold=self._threshold, quantile=quantile)
        if not drift and not self._is_observing:
            return
        done = admitted - len(state.active)
        self._begin(_Work(seen, observed, drift, self._is_observing, self._num_queries - done, done,
                          admitted))

    def _begin(self, work: _Work) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._decide, args=(work,), daemon=True)
        self._thread.start()

    def _decide(self, work: _Work) -> None:
        if sys.platform == "linux" and not self._waits:  # there a thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began_s = time.monotonic()
        longest = max(self._problem.default_max_tokens, work.observed.outputs.max)
        problem = replace(
            self._problem, num_queries=work.left, default_max_tokens=longest,
            lengths=joint_of(work.seen, work.observed, self._problem.lengths))
        decide = self._change if self._running.estimate.policy == "rra" else self._ask
        found = decide(problem, work)
        found.record["search_s"] = time.monotonic() - began_s
        self._found = found

    def _change(self, problem: Problem, work: _Work) -> Decision:
        """RRA: other batch sizes on the stages there are."""
        now, record = self._running.estimate, work.record()
        is_early = work.is_observing and work.seen.num_finished < LEAST_QUERIES
        found = revise(self._running, problem, self._timing,
                       most_present=now.deployment.num_groups * _mean_present(self.slots),
                       caution=CAUTION if is_early else 1.0)
        record |= {"choice": "keep", "reason": found.reason, "from": _variables(now),
                   "throughput_qps": {"before": found.keep.qps or None}}
        if found.estimate is None:
            return self._unchanged(work, record, found)
        changed = with_room_for(replace(self._running, estimate=found.estimate), problem,
                                self._longest)
        if changed.estimate.deployment.group_kv_tokens < self._longest:
            record["reason"] = "other batch sizes leave no room for the longest request"
            return Decision(sentence=f"{work.sentence}; the schedule stays: {record['reason']}",
                            record=record)
        record |= {"choice": "adjust", "to": _variables(changed.estimate),
                   "revision": self._revision + 1}
        record["throughput_qps"]["after"] = changed.estimate.figures.throughput_qps
        return Decision(schedule=changed, record=record, is_kept=found.is_kept, sentence=(
            f"{work.sentence}; {_changed(now, changed.estimate)} ({found.reason})"))

    def _unchanged(self, work: _Work, record: dict[str, Any], found: Revised) -> Decision:
        """The schedule stays; but of a job that observes, one that few queries led to and that
        does not keep the bound makes way for the one it began with."""
        now, first = self._running.estimate, self._first.estimate
        if not work.is_observing or found.is_kept or _variables(now) == _variables(first):
            return Decision(sentence=f"{work.sentence}; the schedule stays: {found.reason}",
                            record=record, is_kept=found.is_kept)
        record |= {"choice": "adjust", "to": _variables(first), "revision": self._revision + 1}
        return Decision(schedule=self._first, record=record, is_kept=False, sentence=(
            f"{work.sentence}; back to the beginning, {_changed(now, first)}: {found.reason}"))

    def _ask(self, problem: Problem, work: _Work) -> Decision:
        """WAA: what a re-deployment would bring."""
        limit_s = problem.constraint.latency_s / self._running.margin.factor
        ways = reschedule(self._running, problem, self._timing, latency_limit_s=limit_s)
        record = work.record() | {
            "choice": ways.choice, "reason": ways.sentence,
            "from": _variables(self._running.estimate),
            "throughput_qps": {"before": ways.keep.qps or None}}
        if ways.choice in ("adjust", "redeploy"):
            assert ways.chosen is not None
            record |= {"choice": "redeploy", "to": _variables(ways.chosen), "cost_s": ways.cost_s,
                       "break_even_queries": ways.break_even_queries}
            record["throughput_qps"]["after"] = ways.chosen.figures.throughput_qps
        return Decision(sentence=f"{work.sentence}. {_advice(ways)}", record=record)


class _Work:
    """What led to a decision."""

    def __init__(self, seen: Observation, observed: ObservedLengths, drift: Drift,
                 is_observing: bool, left: int, done: int, admitted: int) -> None:
        self.seen, self.observed, self.drift = seen, observed, drift
        self.is_observing, self.left, self.done = is_observing, left, done
        self.admitted = admitted

    def record(self) -> dict[str, Any]:
        drift = self.drift
        return {"cause": "observe" if self.is_observing else "drift", "after_queries": self.done,
                "queries_left": self.left,
                "mean_output_tokens": {"planned": drift.planned_mean,
                                       "observed": drift.observed_mean},
                "quantile_output_tokens": {"planned": drift.planned_reach,
                                           "observed": drift.observed_reach}}

    @property
    def sentence(self) -> str:
        drift = self.drift
        figures = f"mean {_figure(drift.planned_mean)} -> {_figure(drift.observed_mean)}"
        if drift.is_reach or not drift.is_mean:
            figures += (f", {drift.quantile * 100:g} % within {drift.planned_reach} -> "
                        f"{drift.observed_reach}")
        what = "observed" if self.is_observing else "drifted"
        return f"output lengths {what}: {figures} after {self.done} queries"


def rescheduler_of(session: Session, timing: TimingSource,
                   schedule: Schedule) -> Rescheduler | None:
    """None where the job does not want it, or there is nothing to observe or to change."""
    job, problem, estimate = session.job, session.problem, schedule.estimate
    known, fixed = problem.queries, job.schedule
    is_fixed = fixed.encode_batch is not None and (
        estimate.policy != "rra" or fixed.decode_iterations is not None)
    is_known = job.workload.output_tokens.kind == "from_requests"
    if job.run.reschedule is None or not engine_of(job).is_changeable or (
            estimate.policy not in POLICIES or is_fixed or is_known):
        return None
    is_observing = job.workload.output_tokens.kind == "observe"
    is_few = (problem.num_queries or 0) <= LEAST_QUERIES
    if known is None or (is_few and not can_settle(problem)):
        return None
    longest = _longest(known.reserves, estimate)
    slots = 0 if estimate.policy != "rra" else slots_for(
        estimate, problem, longest,
        headroom(estimate, problem, timing) if is_observing else HEADROOM)
    return Rescheduler(
        problem=problem, timing=timing, schedule=schedule, output=job.output,
        threshold=job.run.reschedule, is_observing=is_observing, slots=slots,
        num_queries=problem.num_queries or 0, longest=longest)


def slots_for(estimate: Estimate, problem: Problem, longest: int, times: float) -> int:
    """Queries that a group's cache has room for: `times` those planned, as far as the memory of
    every rank and the number of queries go; never fewer than planned."""
    planned, groups = most_active(estimate), estimate.deployment.num_groups
    per_layer = problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
    fits = []
    for stage in estimate.deployment.stages:
        token_bytes = per_layer * stage.num_layers / stage.tp_degree
        for rank in stage.ranks:
            free = estimate.figures.memory_capacity_bytes - estimate.figures.memory_bytes[rank]
            free += int(estimate.deployment.kv_tokens * token_bytes)
            fits.append(free / max(groups * longest * token_bytes, 1))
    wanted = math.ceil(min(times * planned, (problem.num_queries or 0) / groups))
    return max(planned, min(wanted, int(min(fits))))


def decisions_with_phases(decisions: Sequence[Decision],
                          changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For metrics.json: each decision, and where a change was taken up the phase and time of it."""
    taken = {change["revision"]: change for change in changes}
    return [{**found.record, "sentence": found.sentence,
             **{key: taken.get(found.record.get("revision"), {}).get(key)
                for key in ("phase", "elapsed_s")}} for found in decisions]


def _longest(reserves: IntArray, estimate: Estimate) -> int:
    """Of the requests that the schedule can hold; the others become error records."""
    held = reserves[reserves <= estimate.deployment.group_kv_tokens]
    return int(held.max(initial=1))


def _mean_present(slots: int) -> int:
    """Queries of a group in the mean that, with three deviations above them (see most_active),
    have so many slots."""
    return max(math.floor(((math.sqrt(9 + 4 * slots) - 3) / 2) ** 2), 1)


def _rows(part: LengthsSoFar, since: int) -> IntArray:
    rows = [lengths for query, lengths in sorted(part.items()) if query >= since]
    return np.array(rows, np.int64).reshape(-1, 2)


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _variables(estimate: Estimate) -> dict[str, int]:
    iterations = {"decode_iterations": estimate.figures.decode_iterations}
    return {"encode_batch": estimate.figures.encode_batch,
            **(iterations if estimate.policy == "rra" else {}),
            "decode_micro_batches": estimate.deployment.num_groups}


def _changed(old: Estimate, new: Estimate) -> str:
    before, after = _variables(old), _variables(new)
    return ", ".join(f"{key} {before[key]} -> {after[key]}" for key in before
                     if before[key] != after[key])


def _advice(ways: Reschedule) -> str:
    if ways.choice == "keep" or ways.choice is None:
        return ways.sentence
    return (f"{ways.sentence} WAA changes nothing while it runs: if that is worth it, stop the job "
            "(Ctrl-C) and submit it with the lengths seen so far (docs/schedule.md)")
