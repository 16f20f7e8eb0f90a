"""The order of a job's requests, chosen after its schedule: that of the shortest makespan by
replay. Long outputs that begin early shorten the drain, and static batches of like outputs waste
fewer steps. Requests that share a prefix find it in the cache if they run together."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.controls import SHARING_ORDERS, Order
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Reordered, Schedule
from xprofiler.timing import TimingSource
from xrunner.rules.order import WINDOW, run_order, shared_window, window_of
from xscheduler.evaluator import evenly_spread, job_lengths
from xsimulator.replay.prediction import job_replays, makespan_s
from xsimulator.replay.replicas import JobReplayer, replayer_of
from xsimulator.replay.steady_state import limited_s

TRIED: tuple[Order, ...] = ("longest-output", "shortest-output", "longest-input", "shortest-input",
                            "random", "deadline")
WORTH = 0.01  # chosen: least share of the makespan that another order must save
FIRST = 0.01  # chosen: share of the results that are the first ones
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
    lengths = job_lengths(problem, schedule.estimate)
    prefixes = None if lengths is None else lengths.prefixes
    if asked.order != "auto":
        schedule = schedule.changed(order=asked.order, window=window_of(
            asked, schedule.figures.encode_batch, prefixes))
        is_shared = prefixes is not None and schedule.estimate.shares_prefixes
        if not (is_free and is_shared and asked.order in SHARING_ORDERS):
            return schedule
    if lengths is None or not len(lengths.inputs):
        return schedule
    try:
        return _in_best_order(problem, timing, schedule, lengths, longer)
    except XgptError:  # times that the profile refuses
        return schedule


class _Trial(NamedTuple):
    """Makespans of the job in one order, [replays], and [3] its latency, TTFT and TPOT, all in
    seconds. `late`: share of requests beyond their deadlines, above the share that may be.
    `first_s`: when the first results are written. `encoded`: tokens."""

    makespans_s: FloatArray
    limited_s: FloatArray
    late: float
    first_s: float
    encoded: float

    def saving(self, other: "_Trial") -> float:
        """Share of `other`'s makespan that this order saves; 0 if it may be chance."""
        saved_s = other.makespans_s - self.makespans_s
        error_s = saved_s.std(ddof=1) / len(saved_s) ** 0.5 if len(saved_s) > 1 else 0.0
        share = float(saved_s.mean() / other.makespans_s.mean())
        return share if saved_s.mean() > SURE * error_s else 0.0


def _trial(replayer: JobReplayer, own: QueryLengths, order: IntArray, total: int,
           longer: float) -> _Trial:
    """The trial of an order of the requests `own`, of `total` in all. `longer`: as of
    with_order."""
    problem, constraint = replayer.problem, replayer.problem.constraint
    results = [*job_replays(replayer, len(order), np.random.default_rng(problem.seed),
                            known=own, order=order, replays=REPLAYS)]
    makespans_s = np.array([makespan_s(one, total) for one in results])
    bound, late = constraint.bound_on("deadline"), 0.0
    with np.errstate(invalid="ignore"):  # infinite: unknown times
        ends_s = np.array([one.times.last_token_s * (longer * whole_s / one.makespan_s)
                           for one, whole_s in zip(results, makespans_s, strict=True)])
        limits_s = np.mean([
            limited_s(one.times, one.output_tokens, constraint, problem.lengths.outputs)
            for one in results], axis=0)
    if bound is not None:
        due_s = bound.limit_s if own.deadlines_s is None else own.deadlines_s[order]
        has_deadline = np.isfinite(np.broadcast_to(due_s, ends_s.shape))
        if has_deadline.any():
            late = max(float((ends_s > due_s)[has_deadline].mean()) - (1 - bound.quantile), 0.0)
    # a result is written after all those before it in the input
    first_s = ends_s[:, order < FIRST * len(order)].max(axis=1).mean() / longer
    encoded = sum(float(pool.tokens.sum()) for one in results for pool in one.pools)
    return _Trial(makespans_s, limits_s, late, float(first_s), encoded / len(results))


def _in_best_order(problem: Problem, timing: TimingSource, schedule: Schedule,
                   lengths: QueryLengths, longer: float) -> Schedule:
    """The schedule in the quickest order by replays with the same outputs, or in its own with what
    that costs. `lengths`: of all requests, some of which are replayed. `longer`: as of
    with_order."""
    total, is_known = len(lengths.inputs), lengths.outputs is not None or problem.observes
    own = evenly_spread(problem, lengths, min(total, MOST_ORDERED if is_known else MOST_SAMPLED))
    prefixes = lengths.prefixes if schedule.estimate.shares_prefixes else None
    replayer = replayer_of(problem, timing, schedule.estimate, has_steps=prefixes is not None)
    constraint, places = problem.constraint, np.arange(len(own.inputs))
    first = best = _trial(replayer, own, places, total, longer)
    if not np.isfinite(first.makespans_s).all():
        return schedule
    limits_s = np.maximum(first.limited_s, np.array([
        schedule.bound.limit_s, constraint.limit_s("ttft"), constraint.limit_s("tpot")])
        / schedule.margin.factor)
    seen, chosen, asked = {places.tobytes()}, schedule, problem.adjustment.window
    is_given = problem.adjustment.order != "auto"
    # of a longer job the replayed part does not show what sorting all of it brings
    tried = [(window, window, TRIED if window or len(places) == total else ("random",))
             for window in ((WINDOW, 0) if asked is None else (asked,))]
    if prefixes is not None:
        window = shared_window(prefixes) if asked is None else asked
        tried.insert(0, (window, math.ceil(window * len(places) / total), SHARING_ORDERS))
    if is_given:
        tried = [(*tried[0][:2], (schedule.order,))]
    for window, replayed, names in tried:
        trials = dict[Order, _Trial]()
        for name in names:
            order = run_order(name, replayed, own, problem.seed)
            if (key := order.tobytes()) not in seen:
                seen.add(key)
                found = _trial(replayer, own, order, total, longer)
                if np.isfinite(found.makespans_s).all() and (
                        is_given or not (found.limited_s > limits_s).any()):
                    trials[name] = found
        if trials:
            name, found = min(trials.items(), key=lambda one: (
                one[1].late, one[1].makespans_s.mean()))
            if is_given or found.late < best.late or (
                    found.late == best.late and found.saving(best) >= WORTH):
                best, chosen = found, schedule.changed(
                    order=name, window=window,
                    order_gain=0.0 if is_given else max(found.saving(first), 0.0),
                    reordered=None if name not in SHARING_ORDERS else Reordered(
                        first_s=found.first_s, input_first_s=first.first_s,
                        input_saved=max(1 - first.encoded / float(own.inputs.sum()), 0.0)))
    return chosen
