"""Error messages for problems without a schedule: the cause, and the nearest possible limit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from xgpt.core.constraint import METRIC_WORDS, Metric
from xgpt.core.errors import InfeasibleError, InputError, LacksMemoryError, wrong
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.units import format_bytes, format_seconds, seconds_up
from xprofiler.timing import TimingSource
from xscheduler.cells import names_of, parts_of
from xscheduler.feasibility import Feasibility
from xscheduler.labels import point_words
from xscheduler.search import Found, Search
from xscheduler.space import Cell, Point
from xscheduler.tensor_plans import tensor_plans
from xsimulator.memory import capacity_bytes
from xsimulator.rough.formulas import Formulas
from xsimulator.rough.workload import Workload

# control variables of which larger values take more memory
_TAKE_MEMORY = ("encode_batch", "max_active", "token_budget")
_PACE: tuple[Metric, ...] = ("ttft", "tpot")


class Smallest(NamedTuple):
    """The point that needs least memory. memory_bytes: on its fullest device. present: requests in
    the system. is_timed: step times are known for some size."""

    memory_bytes: float = math.inf
    present: float = math.inf
    is_timed: bool = False
    cell: Cell | None = None
    point: Point = ()

    def beside(self, other: Smallest) -> Smallest:
        """The smaller of both points."""
        less = min(self, other, key=lambda one: (one.memory_bytes, one.present))
        return less._replace(is_timed=self.is_timed or other.is_timed)


def check(problem: Problem, timing: TimingSource) -> None:
    """Raises InputError if no number of devices can be divided as the job fixes it."""
    mistake: InputError | None = None
    for part in parts_of(problem, is_any=True):
        try:
            tensor_plans(part, timing)
            break
        except InputError as error:
            mistake = error
    else:
        if mistake is not None:
            raise mistake
    names = names_of(problem)
    if problem.cluster.num_devices < 2 and names and all(
            len(policy(name).pools) > 1 for name in names):
        raise wrong("schedule", "schedule.policy", ", ".join(names),
                    "some devices encode and the others decode, and there is only 1 device")


def refusal_of(problem: Problem, timing: TimingSource, search: Search, keeps: Feasibility,
               bound_s: float) -> InfeasibleError:
    """The error for a problem without a feasible schedule: the tightest latency limit that can be
    kept, or the reason against every configuration."""
    quickest = search.quickest()
    if not quickest:
        return _without_room(problem, timing)
    constraint = problem.constraint
    for metric in _PACE:
        limit_s = constraint.limit_s(metric)
        least_s = min(getattr(one.replayed.figures, f"{metric}_s") for one in quickest)
        if least_s > limit_s:
            return InfeasibleError(
                f"no schedule keeps the limit of {format_seconds(limit_s)} on "
                f"{METRIC_WORDS[metric]}: the least found is {seconds_up(least_s)} s")

    def needed_s(one: Found) -> float:
        return one.replayed.latency_s * keeps.factor(one.cell, one.point)

    best = min(quickest, key=needed_s)
    factor = keeps.factor(best.cell, best.point)
    longest = problem.lengths.outputs.quantile(constraint.quantile)
    tightest = seconds_up(needed_s(best))
    margin = "" if factor <= 1.001 else (
        f" with its margin ({format_seconds(best.replayed.latency_s)} as simulated; "
        f"{keeps.margin(best.cell, best.point).sentence})")
    is_by_margin = margin and best.replayed.latency_s <= bound_s  # nothing else exceeds the limit
    remedy = keeps.margin(best.cell, best.point).remedy if is_by_margin else ""
    qps = best.cell.copies * best.replayed.throughput_qps
    return InfeasibleError(
        f"no schedule was found that keeps the limit of {format_seconds(bound_s)} for a request "
        f"of {longest} output tokens (quantile {constraint.quantile:g}). The tightest that can be "
        f"met is {tightest} s{margin}, by policy {best.cell.policy}, "
        f"{point_words(best.cell, best.point)} ({qps:.3g} requests/s): {_binding(best)}"
        f"{remedy and '. '}{remedy}", float(tightest))


def _binding(one: Found) -> str:
    """The phase that takes most of the latency, in words."""
    estimate = one.replayed.estimate
    figures, depth = estimate.figures, len(estimate.deployment.decoding.stages)
    if figures.encode_s > figures.latency_s - figures.encode_s:
        return f"{figures.encode_s / figures.latency_s:.0%} of it is encoding"
    iteration = f"{format_seconds(figures.decode_iteration_s)} an iteration"
    return f"most of it is decoding, {iteration}" if depth == 1 else (
        f"most of it is decoding, where each token passes {depth} stages, {iteration}")


def _without_room(problem: Problem, timing: TimingSource) -> InfeasibleError:
    least, room = least_room(problem, timing), capacity_bytes(problem.cluster.device)
    fixed = [f"schedule.{name} = {value}" for name in _TAKE_MEMORY
             if (value := problem.fixed.value_of(name)) is not None]
    smaller = f"smaller values than the job fixes ({', '.join(fixed)}), " if fixed else ""
    by = "" if least.cell is None else (
        f", by policy {least.cell.policy}, {point_words(least.cell, least.point)}")
    if least.memory_bytes > room:
        needs = (f"{problem.model.name} needs at least {format_bytes(least.memory_bytes)} on its "
                 f"fullest device, of which {format_bytes(room)} can be used{by}")
        if math.isinf(least.memory_bytes):
            needs = "The weights alone take more than all devices have"
        below = "" if problem.cluster.tiers or problem.offload == "off" else (
            ", or `tiers`, memory of a node below its devices")
        return LacksMemoryError(
            f"no schedule: there is too little memory. {needs}; use {smaller}more devices, or a "
            f"smaller model, dtype or maximum output{below}")
    if not least.is_timed:
        return InfeasibleError(
            "no schedule: the profile was measured for smaller sizes than this job's (at most "
            "4 times its sizes are extrapolated); measure one for this job")
    return InfeasibleError(
        f"no schedule: the job has {problem.num_queries} requests, and every configuration "
        f"has at least {least.present:.0f} present at a time{by}")


def least_room(problem: Problem, timing: TimingSource) -> Smallest:
    """The point that needs least memory, even if it does not fit."""
    least = Smallest()
    for part in parts_of(problem, is_any=True):
        try:
            plans = tensor_plans(part, timing)
        except InputError:
            continue
        formulas = Formulas(part, timing, Workload(part))
        for formula in map(formulas.of, names_of(problem)):
            for plan in plans:
                try:
                    points = formula.points(plan)
                    if not len(points):
                        continue
                    rough = formula.rough(plan, points)
                except InputError:
                    continue
                row = int(np.lexsort((rough.present, rough.memory_bytes))[0])
                least = least.beside(Smallest(
                    float(rough.memory_bytes[row]), float(rough.present[row]),
                    bool((rough.throughput_qps > 0).any()), Cell(part, formula, plan),
                    tuple(points[row].tolist())))
    return least
