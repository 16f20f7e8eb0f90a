"""The order of a job's requests, chosen after its schedule: that of the shortest makespan by
replay. Long outputs that begin early shorten the drain, and static batches of like outputs waste
fewer steps."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.controls import Order
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xrunner.rules.order import WINDOW, run_order, window_of
from xscheduler.evaluator import evenly_spread, job_lengths
from xsimulator.replay.prediction import job_replays, makespan_s
from xsimulator.replay.replicas import replayer_of
from xsimulator.replay.steady_state import limited_s

TRIED: tuple[Order, ...] = ("longest-output", "shortest-output", "longest-input", "shortest-input",
                            "random", "deadline")
WORTH = 0.01  # chosen: least share of the makespan that another order must save
SURE = 2  # chosen: standard errors that the saving must exceed where outputs are sampled
MOST_ORDERED, MOST_SAMPLED, REPLAYS = 20_000, 4_000, 5  # chosen: requests, and replays of sampled


def in_chosen_order(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with the order of a schedule in place of what its job asked for."""
    return replace(problem, adjustment=replace(
        problem.adjustment, order=schedule.order, window=schedule.window))


def with_order(problem: Problem, timing: TimingSource, schedule: Schedule, *,
               is_free: bool = True, longer: float = 1.0) -> Schedule:
    """The schedule with the order that the job asks for. If the job leaves it open and `is_free`,
    the quickest order that keeps the limits as well as the input's. `longer`: safety margin on the
    deadlines, a factor."""
    asked = problem.adjustment
    if asked.order == "input" or (asked.order == "auto" and not is_free):
        return schedule
    if asked.order != "auto":
        return schedule.changed(order=asked.order, window=window_of(
            asked, schedule.figures.encode_batch))
    lengths = job_lengths(problem, schedule.estimate)
    if lengths is None or not len(lengths.inputs):
        return schedule
    try:
        return _Trials(problem, timing, schedule, lengths, longer).best(
            (WINDOW, 0) if asked.window is None else (asked.window,))
    except XgptError:  # times that the profile refuses
        return schedule


class _Trial(NamedTuple):
    """Makespans of the job in one order, [replays], and [3] its latency, TTFT and TPOT, all in
    seconds. `late`: share of requests beyond their deadlines, above the share that may be."""

    makespans_s: FloatArray
    limited_s: FloatArray
    late: float

    def is_better(self, other: "_Trial") -> bool:
        """Whether fewer requests are late than in `other`, or as few, and it is worth it."""
        return self.late < other.late or (
            self.late == other.late and self.saving(other) >= WORTH)

    def saving(self, other: "_Trial") -> float:
        """Share of `other`'s makespan that this order saves; 0 if it may be chance."""
        saved_s = other.makespans_s - self.makespans_s
        error_s = saved_s.std(ddof=1) / math.sqrt(len(saved_s)) if len(saved_s) > 1 else 0.0
        share = float(saved_s.mean() / other.makespans_s.mean())
        return share if saved_s.mean() > SURE * error_s else 0.0


class _Trials:
    """Replays of a job's requests in different orders, with the same outputs."""

    def __init__(self, problem: Problem, timing: TimingSource, schedule: Schedule,
                 lengths: QueryLengths, longer: float) -> None:
        self._problem, self._schedule, self._total = problem, schedule, len(lengths.inputs)
        self._longer = longer
        is_known = lengths.outputs is not None or problem.observes
        self._lengths = evenly_spread(problem, lengths, min(
            self._total, MOST_ORDERED if is_known else MOST_SAMPLED))
        self._replayer = replayer_of(problem, timing, schedule.estimate, has_steps=False)

    def best(self, windows: tuple[int, ...]) -> Schedule:
        """The schedule in the quickest order within one of the windows (0: the whole job)."""
        count, best = len(self._lengths.inputs), self._schedule
        own = first = self._trial(np.arange(count))
        known = {np.arange(count).tobytes()}
        if not np.isfinite(first.makespans_s).all():
            return best
        for window in windows:
            # of a longer job the replayed part does not show what sorting all of it brings
            trials = dict[Order, _Trial]()
            for name in TRIED if window or count == self._total else ("random",):
                order = run_order(name, window, self._lengths, self._problem.seed)
                if (key := order.tobytes()) not in known:
                    known.add(key)
                    trials[name] = self._trial(order)
            kept = [name for name, trial in trials.items() if self._is_kept(trial, first)]
            quickest = min(kept, key=lambda name: (
                trials[name].late, trials[name].makespans_s.mean()), default=None)
            if quickest is not None and trials[quickest].is_better(own):
                own = trials[quickest]
                best = self._schedule.changed(order=quickest, window=window,
                                              order_gain=max(own.saving(first), 0.0))
        return best

    def _trial(self, order: IntArray) -> _Trial:
        problem, count = self._problem, len(order)
        results = [*job_replays(self._replayer, count, np.random.default_rng(problem.seed),
                                known=self._lengths, order=order, replays=REPLAYS)]
        if not all(one.is_timed for one in results):
            return _Trial(np.array([np.inf]), np.full(3, np.inf), 1.0)
        makespans_s = np.array([makespan_s(one, self._total) for one in results])
        late, bound = 0.0, problem.constraint.bound_on("deadline")
        if bound is not None:
            own_s = self._lengths.deadlines_s
            ends_s = [one.times.last_token_s * (self._longer * makespan / one.makespan_s)
                      for one, makespan in zip(results, makespans_s, strict=True)]
            is_late = np.array(ends_s) > (bound.limit_s if own_s is None else own_s[order])
            late = max(float(is_late.mean()) - (1 - bound.quantile), 0.0)
        return _Trial(makespans_s, np.mean([
            limited_s(one.times, one.output_tokens, problem.constraint, problem.lengths.outputs)
            for one in results], axis=0), late)

    def _is_kept(self, trial: _Trial, first: _Trial) -> bool:
        """Whether an order keeps the limits with the schedule's margin, or as well as the input's
        order does."""
        constraint = self._problem.constraint
        limits_s = np.array([self._schedule.bound.limit_s, constraint.limit_s("ttft"),
                             constraint.limit_s("tpot")]) / self._schedule.margin.factor
        return not (trial.limited_s > np.maximum(limits_s, first.limited_s)).any()
