"""Watches a running job from the launcher: replans when output lengths or step times differ from
the plan (xscheduler.live.decisions), and ends a run that makes no progress. Plans are made in a
thread of lower priority, since the ranks use the cores. A rank that is stopped, swapped out, or
waits for a disk or a device that does not answer stops all the others; the error names it."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.app.opened_job import OpenedJob
from xgpt.app.running.prepare import uses_kv_blocks
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.policies import policy, replanned_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds
from xgpt.run_folder.state import SILENT_S
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xrunner.files.heartbeat import RankState, read_heartbeats
from xrunner.files.launcher_link import ChangeOrder, read_observed
from xrunner.files.lock import StopRequest
from xrunner.rules.changes import Changes, ChangesByShape, changes_of
from xscheduler.cache_sizing import HEADROOM, headroom, kv_tokens_for, slots_for
from xscheduler.fallback import can_settle
from xscheduler.live.decisions import Decider, Decision, Evidence, FollowedRun
from xscheduler.live.observations import LEAST_QUERIES
from xscheduler.live.quick_change import is_urgent
from xscheduler.live.shapes import CacheSizes, differ

LOOK_S = 0.5
# A plan takes from a third of a second to a few seconds of a core. At nice 10 it got a twentieth of
# a core that two programs and two ranks shared, and a run of half a minute ended before it; at 5 it
# gets a seventh.
_NICENESS = 5
# Where steps have become slower, queries that start before the change will be late: the plan gets a
# full share of the cores.
_URGENT = 0
# After a plan, step reports are ignored so long, since it slowed those steps; ranks report each
# second.
_DEAF_S = 2.0
LEAST_S, _STEPS = 60.0, 10  # limit without progress: at least; times the longest step known
# limit for a rank's first heartbeat (it imports, perhaps over a slow network) and its first step
_START_S = 600.0
_BEATS_LOOK_S = 1.0
_AWAY_S = 5.0  # a launcher that has not looked for so long was stopped itself
_GRACE_S = 20.0  # least time from a request to stop until ranks that ignore it are ended


class Rescheduler:
    """Replans one run while it lasts. Call `update` many times a second; it never waits for a
    plan."""

    def __init__(self, followed: FollowedRun, timing: TimingSource, output: Path, *,
                 waits: bool = False) -> None:
        """`waits`: `update` waits for each plan (tests)."""
        self.decider, self._output, self._waits = Decider(followed, timing), output, waits
        self._looked_s = -math.inf
        self._deaf_until_s = -math.inf
        self._changed: set[int] = set()  # shapes of copies that are not as the run began
        self.decisions: list[Decision] = []
        self._turns = self._decided()

    @property
    def rooms(self) -> tuple[CacheSizes, ...]:
        """Sizes that the KV caches of each replica shape need, in shape order."""
        return self.decider.followed.rooms

    def update(self) -> bool:
        """Reads the run's reports and starts a plan, or writes the order of a finished one. Returns
        whether there is a new decision."""
        return next(self._turns, False)

    def _decided(self) -> Iterator[bool]:
        """Yields at each turn whether there is a decision. Ends after a plan that failed, which was
        reported; the run continues."""
        follow_up: Evidence | None = None  # decided on next, before anything else
        while True:
            if (look := follow_up or self._next_look()) is None:
                yield False
                continue
            found = list[Decision | None]()
            thread = threading.Thread(target=self._decide, args=(look, found), daemon=True)
            thread.start()
            if self._waits:
                thread.join()
            while thread.is_alive():
                yield False
            if not self._waits:
                self._deaf_until_s = time.monotonic() + _DEAF_S
            if not found or (decision := found[0]) is None:
                return
            follow_up, before = decision.follow_up, self.decider.running.estimate
            is_taken = self.decider.carry_out(look, decision)
            if is_taken and decision.schedule is not None:
                ChangeOrder(revision=self.decider.revision, controls=self._changes(
                    before, decision.schedule.estimate)).save(self._output)
            if is_taken:
                self.decisions.append(decision)
            yield is_taken

    def _next_look(self) -> Evidence | None:
        """The next evidence to decide on; None if there is none, or it was just looked for."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S and not self._waits:
            return None
        self._looked_s = now
        if (written := read_observed(self._output)) is None:
            return None
        self._read_steps()
        # this first: the other two use how the limit was kept so far
        at_bound = self.decider.late_evidence(written)
        return (self.decider.length_evidence(written) or self.decider.step_evidence(written)
                or at_bound)

    def _read_steps(self) -> None:
        """Reads the ranks' step reports, except steps that a plan beside them made slower."""
        if self.decider.step_monitor is None or time.monotonic() < self._deaf_until_s:
            return
        for rank in read_heartbeats(self._output):
            self.decider.step_monitor.add_report(rank.rank, rank.stage, rank.elapsed_s, rank.steps)

    def _decide(self, look: Evidence, found: list[Decision | None]) -> None:
        if sys.platform == "linux" and not self._waits:  # where a thread has its own priority
            thread = threading.get_native_id()  # under `nice` it has the command's already
            os.setpriority(os.PRIO_PROCESS, thread, max(
                _URGENT if is_urgent(look) else _NICENESS,
                os.getpriority(os.PRIO_PROCESS, thread)))
        found.append(self.decider.decide_quickly(look) or self.decider.decide(look))

    def _changes(self, before: Estimate, now: Estimate) -> Changes | ChangesByShape:
        """Changes that the rules must follow from now on. An order replaces one that the run may
        not have read, so it includes every shape that was ever changed."""
        self._changed |= {place for place, (old, new) in enumerate(
            zip(before.shapes, now.shapes, strict=True)) if differ(old, new)}
        own = tuple(changes_of(shape, slots=room.slots, kv_tokens=room.kv_tokens or None)
                    if place in self._changed or len(self.rooms) == 1 else None
                    for place, (shape, room) in enumerate(
                        zip(now.shapes, self.rooms, strict=True)))
        return own[0] if len(own) == 1 and own[0] is not None else ChangesByShape(own)


class _Thresholds(NamedTuple):
    """Relative differences of output lengths and of step times from the plan above which the
    schedule is planned again; None: not watched."""

    lengths: float | None = None
    steps: float | None = None


def _thresholds(opened: OpenedJob, policy_name: str) -> _Thresholds:
    """The job's thresholds, None where nothing can be observed or changed."""
    job, problem, row = opened.job, opened.problem, policy(policy_name)
    fixed, engine = job.schedule, engine_of(opened.job)
    is_fixed = (fixed.encode_batch is not None or fixed.max_active is not None) and (
        not row.is_changeable or fixed.decode_iterations is not None)
    if job.run.reschedule is None or is_fixed or not engine.is_changeable or (
            policy_name not in replanned_policies()):
        return _Thresholds()
    if problem.queries is None and not problem.is_synthetic:
        return _Thresholds()
    if (problem.num_queries or 0) <= LEAST_QUERIES and not can_settle(problem):
        return _Thresholds()
    is_known = job.workload.count is not None or job.workload.output_tokens.kind == "from_requests"
    # a policy from elsewhere does not say what may change
    is_timed = engine.tells_steps and (row.is_changeable or row.limits is not None)
    return _Thresholds(lengths=None if is_known else job.run.reschedule,
                       steps=job.run.step_times if is_timed else None)


def rescheduler_of(opened: OpenedJob, timing: TimingSource,
                   schedule: Schedule) -> Rescheduler | None:
    """Makes the rescheduler of a run; None where the job wants none, there is nothing to observe
    or to change, requests arrive over time, or bytes lie below the devices."""
    job, problem, estimate = opened.job, opened.problem, schedule.estimate
    thresholds = _thresholds(opened, estimate.policy)
    if thresholds == _Thresholds() or estimate.deployment.decoding.placement is not None or (
            problem.arrivals is not None):
        return None  # a placement's budgets are those of its block, a service's plan is no job's
    longest = problem.lengths.inputs.max + problem.lengths.outputs.max
    if (known := problem.queries) is not None:  # longer ones become error records
        held = known.reserves[known.reserves <= estimate.longest_query]
        longest = int(held.max(initial=1))
    is_observing = job.workload.output_tokens.kind == "observe"
    in_blocks = uses_kv_blocks(opened, estimate)
    first, *others = (_room(shape, problem, longest, headroom(shape, problem, timing)
                            if is_observing else HEADROOM, in_blocks=in_blocks)
                      if policy(shape.policy).is_changeable else CacheSizes(slots=0)
                      for shape in estimate.shapes)
    return Rescheduler(FollowedRun(
        problem=problem, schedule=schedule, step_threshold=thresholds.steps,
        threshold=thresholds.lengths, other_rooms=tuple(others), is_observing=is_observing,
        slots=first.slots, kv_tokens=first.kv_tokens, longest=longest), timing, job.output)


def _room(estimate: Estimate, problem: Problem, longest: int, times: float, *,
          in_blocks: bool) -> CacheSizes:
    """Sizes that the KV caches of replicas under RRA need (xscheduler.cache_sizing)."""
    slots = slots_for(estimate, problem, longest, times, in_blocks=in_blocks)
    return CacheSizes(slots=slots, kv_tokens=kv_tokens_for(
        estimate, problem, longest * slots, slots) if in_blocks else 0)


def decisions_with_phases(decisions: Sequence[Decision],
                          changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The decisions as metrics.json holds them, with the phase and time at which each took effect:
    those of the first replica, since replicas have phases of their own."""
    taken = {change["revision"]: change for change in sorted(
        changes, key=lambda change: -(change.get("replica") or 0))}
    return [{**decision.record, "sentence": decision.sentence,
             **{key: taken.get(decision.record.get("revision"), {}).get(key)
                for key in ("phase", "elapsed_s")}} for decision in decisions]


class RanksHang(XgptError):
    """No rank died, and the run makes no progress."""


@dataclass(slots=True)
class _Seen:
    """The last state of a rank, and when its heartbeat and its steps last changed, on the watch's
    clock."""

    state: RankState
    changed_s: float
    worked_s: float


class StallWatch:
    """Detects ranks that make no progress, by their heartbeats. `limit_s` None: several times the
    longest step known; `step_s`: the longest planned one."""

    def __init__(self, output: Path, *, ranks: int, limit_s: float | None, step_s: float = 0.0,
                 leaves_engines: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`leaves_engines`: ranks notice hanging engines themselves, within the same limit."""
        self._output, self._ranks, self._limit_s, self._step_s = output, ranks, limit_s, step_s
        self._clock, self._start_s, self._looked_s = clock, clock(), clock()
        self._times = 2 if leaves_engines else 1
        self._seen: dict[int, _Seen] = {}

    def look(self) -> None:
        """Reads the heartbeats, at most once a second. Raises RanksHang where the run makes no
        progress."""
        now, before = self._clock(), self._looked_s
        if now - before < _BEATS_LOOK_S:
            return
        self._looked_s = now
        if now - before > _AWAY_S:  # the ranks may have been stopped with it
            for seen in self._seen.values():
                seen.changed_s = seen.worked_s = now
        for state in read_heartbeats(self._output):
            self._take(state, now)
        if (why := self._why(now)) is not None:
            raise RanksHang(f"the run hangs: {why}. It was ended; finished queries are kept")

    def _take(self, state: RankState, now: float) -> None:
        seen = self._seen.get(state.rank)
        if seen is None:
            self._seen[state.rank] = _Seen(state, now, now)
            return
        if state.at_s != seen.state.at_s:
            seen.changed_s = now
        # a note is of something with a limit of its own, such as loading an engine
        if state.note or state.num_steps != seen.state.num_steps or (
                state.step_since_s != seen.state.step_since_s):
            seen.worked_s = now
        seen.state = state

    @property
    def silent(self) -> str | None:
        """Words that name the rank that has been silent for longest; None if none is silent for
        long."""
        first = min(self._seen.values(), key=lambda one: one.changed_s, default=None)
        if first is None or (passed_s := self._clock() - first.changed_s) <= SILENT_S:
            return None
        return f"rank {first.state.rank} silent for {format_seconds(round(passed_s))}"

    def limit_s(self) -> float:
        """Seconds without progress after which the run is ended."""
        return self._times * (max(LEAST_S, _STEPS * self.longest_step_s)
                              if self._limit_s is None else self._limit_s)

    @property
    def longest_step_s(self) -> float:
        """Duration of the longest step, planned or measured so far."""
        return max([self._step_s, *(seen.state.longest_step_s for seen in self._seen.values())])

    def _why(self, now: float) -> str | None:
        """Words that name the rank that stops the run; None where all make progress."""
        limit_s, seen = self.limit_s(), list(self._seen.values())
        silent = [one for one in seen if now - one.changed_s > limit_s]
        if silent:
            first = min(silent, key=lambda one: one.changed_s)
            return (f"{first.state.name} has given no sign of life for "
                    f"{format_seconds(round(now - first.changed_s))}; its last order was "
                    f"{first.state.told}")
        # the first step compiles what is not compiled yet
        stuck = [one for one in seen if one.state.step_since_s is not None and (
            now - one.worked_s > (limit_s if one.state.num_steps else max(limit_s, _START_S)))]
        if stuck:
            first = min(stuck, key=lambda one: one.worked_s)
            return (f"{first.state.name} is alive, but has been in one step for "
                    f"{format_seconds(round(now - first.worked_s))}, after the order "
                    f"{first.state.told}")
        begun = [one for one in seen if one.state.num_steps]
        if begun and len(begun) == len(seen) and all(now - one.worked_s > limit_s for one in seen):
            first = max(begun, key=lambda one: one.worked_s)
            return (f"no rank has started a step for "
                    f"{format_seconds(round(now - first.worked_s))}, though all are alive; the "
                    f"last was {first.state.name}, after the order {first.state.told}")
        missing = sorted(set(range(self._ranks)) - self._seen.keys())
        if missing and now - self._start_s > max(limit_s, _START_S):
            return (f"{'ranks' if missing[1:] else 'rank'} {', '.join(map(str, missing))} of "
                    f"{self._ranks} gave no sign of life within "
                    f"{format_seconds(round(now - self._start_s))} of the start")
        return None


class Guard:
    """Ends the ranks of a run that was asked to stop, hangs, or lost its folder."""

    def __init__(self, output: Path, stall: StallWatch | None) -> None:
        """`stall` None: the ranks write no heartbeats."""
        self._output, self._stall, self._stop = output, stall, StopRequest(output)
        self._folder_id, self._looked_s = _folder_id(output), time.monotonic()
        self._asked_s: float | None = None

    @property
    def silent(self) -> str | None:
        """Words that name a rank that has been silent for long; None if none is."""
        return None if self._stall is None else self._stall.silent

    def look(self) -> None:
        """Checks the run; called often. Raises StoppedEarly, RanksHang or XgptError to end it."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if _folder_id(self._output) != self._folder_id:
            raise XgptError(
                f"{self._output} was removed or renamed while a run wrote in it. A renamed folder "
                "still has all finished queries: give it its name back, and the same command "
                "goes on from there")
        if self._stop.is_made:
            self._asked_s = now if self._asked_s is None else self._asked_s
            # a run stops after the steps under way, which may be long
            grace_s = max(_GRACE_S, 0.0 if self._stall is None else 3 * self._stall.longest_step_s)
            if now - self._asked_s > grace_s:
                raise StoppedEarly(
                    f"asked to stop, and the ranks did not within {grace_s:.0f} s: they were "
                    "ended. Finished queries are kept, and the same command goes on from there")
        elif self._stall is not None:
            self._stall.look()


def _folder_id(folder: Path) -> tuple[int, int] | None:
    """Device and inode of the folder; None where there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
