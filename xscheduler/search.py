"""The best RRA schedule of a problem, and what is proved about it (paper section 5).

Bounds of a box [B_E] x [N_D] of one tensor plan, and what they rest on:

- It holds no admissible point if its easiest corner (smallest B_E, largest N_D) violates memory,
  the number of queries, or the latency bound by more than LATENCY_TOLERANCE. Memory grows with B_E
  and falls with N_D exactly; latency does so within 0.02 % on the paper's tasks.
- Its throughput is bounded at its largest B_E: T grows with B_E where a source's time per token
  falls with size (the roofline's do; padding to the longest context bends that by up to 1.5 %,
  beyond the memory of a device). In N_D it is *not* monotone: with attention in charge, as for
  long outputs in large batches, fewer iterations lose up to 9 % within memory. So the edge at the
  largest B_E is sampled at up to EDGE_SAMPLES values of N_D, all of them in a narrow box, and the
  bound is widened by EDGE_TOLERANCE, by WIDE_EDGE_TOLERANCE where values were left out.
- A box of few points is evaluated point by point, and its bound is exact.

tests/xscheduler holds the search against brute force, and bounds against optima.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xgpt.errors import InputError, Mistake
from xgpt.problem import Problem
from xgpt.schedule import Rejected, Schedule
from xprofiler.timing import TimingSource
from xscheduler.admission import Admission, Point
from xscheduler.branch_and_bound import Box, Candidate, NodeResult, Outcome, Status, maximise
from xscheduler.infeasible import explain
from xscheduler.space import MAX_ENCODE_BATCH, root_box, tensor_plans

EDGE_SAMPLES = 6
EDGE_TOLERANCE = 0.015
WIDE_EDGE_TOLERANCE = 0.05
LATENCY_TOLERANCE = 0.005
LEAF_POINTS = 12  # boxes up to this size are evaluated whole


def find_schedule(problem: Problem, timing: TimingSource, *, gap: float = 0.005,
                  max_nodes: int | None = None, max_seconds: float | None = None,
                  padded: bool = True) -> Schedule:
    """The schedule of highest steady-state throughput within the problem's constraint.

    gap: stop once no admissible schedule can be better by more than this share. max_nodes,
    max_seconds: limits per tensor-parallel degree; the result says when one was hit. Raises
    InfeasibleError naming the tightest latency that can be met, InputError for fixed values the
    model or cluster cannot hold.
    """
    began = time.monotonic()
    _refuse_other_policies(problem)
    admission = Admission(problem, timing, tensor_plans(problem.model, problem.cluster,
                                                        problem.fixed), padded=padded)
    search = _RraSearch(admission, gap=gap, max_nodes=max_nodes, max_seconds=max_seconds)
    bound_s = problem.constraint.latency_s
    per_degree = search.per_degree(bound_s)
    found = [outcome for outcome in per_degree.values() if outcome.best is not None]
    if not found:
        raise explain(admission, search.roots,
                      is_proved=all(o.status is Status.INFEASIBLE for o in per_degree.values()))
    best = min((outcome.best for outcome in found if outcome.best is not None),
               key=lambda candidate: candidate.rank)
    free = per_degree if math.isinf(bound_s) else search.per_degree(math.inf)
    without_bound = _best_of(free)
    upper = max(outcome.upper_bound for outcome in per_degree.values())
    limited = any(outcome.status is Status.LIMIT for outcome in per_degree.values())
    estimate = admission.rra.estimate(admission.config(best.root, _point(best)))
    return Schedule(
        estimate=estimate, latency_bound_s=bound_s, constraint_kind=problem.constraint.kind,
        quantile=problem.constraint.quantile,
        status=(Status.LIMIT if limited else Status.OPTIMAL).value, bound_qps=upper,
        gap=max(upper / estimate.throughput_qps - 1, 0.0), nodes=admission.num_evaluated,
        seconds=time.monotonic() - began, fingerprint=problem.fingerprint,
        unbounded_qps=None if without_bound is None else without_bound.objective,
        rejected=_rejected(admission, best, per_degree, without_bound, bound_s),
    )


class _RraSearch:
    """Branch and bound over the tensor plans' boxes, degree by degree."""

    def __init__(self, admission: Admission, *, gap: float, max_nodes: int | None,
                 max_seconds: float | None) -> None:
        self._admission = admission
        self._gap, self._max_nodes, self._max_seconds = gap, max_nodes, max_seconds
        self.roots = [self._root(index) for index in range(len(admission.plans))]

    def per_degree(self, latency_bound_s: float) -> dict[int, Outcome]:
        """tp_degree -> what a search over its plans found."""
        outcomes = {}
        for degree in sorted({plan.tp_degree for plan in self._admission.plans}):
            roots = [box for box in self.roots
                     if self._admission.plans[box.root].tp_degree == degree]
            outcomes[degree] = maximise(
                roots, lambda boxes: self._examine(boxes, latency_bound_s), gap=self._gap,
                max_nodes=self._max_nodes, max_seconds=self._max_seconds)
        return outcomes

    def _root(self, index: int) -> Box:
        admission, fixed = self._admission, self._admission.problem.fixed
        deepest = fixed.decode_iterations or admission.rra.flow.max_iterations
        cap = min(admission.problem.num_queries or MAX_ENCODE_BATCH, MAX_ENCODE_BATCH)

        def is_possible(batch: int) -> bool:
            figures = admission.figures(index, (batch, deepest))
            return admission.forbidden(figures, math.inf) is None

        return root_box(index, fixed, admission.rra.flow.max_iterations, cap, is_possible)

    def _examine(self, boxes: Sequence[Box], latency_bound_s: float) -> list[NodeResult]:
        points = [_points_of(box) for box in boxes]
        self._admission.evaluate([(box.root, point) for box, own in zip(boxes, points, strict=True)
                                  for point in own])
        return [self._result(box, own, latency_bound_s)
                for box, own in zip(boxes, points, strict=True)]

    def _result(self, box: Box, points: Sequence[Point], latency_bound_s: float) -> NodeResult:
        admission = self._admission
        best: Candidate | None = None
        for point in points:
            figures = admission.figures(box.root, point)
            if admission.forbidden(figures, latency_bound_s) is None:
                seen = Candidate(objective=figures.throughput_qps, root=box.root, point=point)
                best = seen if best is None or seen.rank < best.rank else best
        is_whole = box.num_points <= LEAF_POINTS
        if is_whole:
            bound = -math.inf if best is None else best.objective
            return NodeResult(upper_bound=bound, best=best, is_settled=True,
                              reason="evaluated point by point")
        easiest = admission.figures(box.root, (box.lower[0], box.upper[1]))
        obstacle = admission.forbidden(easiest, latency_bound_s, LATENCY_TOLERANCE)
        if obstacle is not None and best is None:
            return NodeResult(upper_bound=-math.inf, best=None, is_settled=True, reason=obstacle)
        edge = _edge(box)
        highest = max(admission.figures(box.root, point).throughput_qps for point in edge)
        is_sampled = len(edge) < box.upper[1] - box.lower[1] + 1
        widened = highest * (1 + (WIDE_EDGE_TOLERANCE if is_sampled else EDGE_TOLERANCE))
        return NodeResult(upper_bound=widened, best=best, is_settled=False, reason="")


def _points_of(box: Box) -> list[Point]:
    """What is evaluated of a box: all of a small one; of a large one the edge at the largest B_E,
    the easiest corner, and the middle, which finds incumbents early."""
    (low_b, low_n), (up_b, up_n) = box.lower, box.upper
    if box.num_points <= LEAF_POINTS:
        return [(b, n) for b in range(low_b, up_b + 1) for n in range(low_n, up_n + 1)]
    middle = (math.isqrt(low_b * up_b), math.isqrt(low_n * up_n))
    return sorted({*_edge(box), (low_b, up_n), middle})


def _edge(box: Box) -> list[Point]:
    low, up = box.lower[1], box.upper[1]
    samples = np.geomspace(low, up, EDGE_SAMPLES) if up - low >= EDGE_SAMPLES else range(low, up + 1)
    return [(box.upper[0], n) for n in sorted({min(max(round(v), low), up) for v in samples})]


def _point(candidate: Candidate) -> Point:
    batch, iterations = candidate.point
    return batch, iterations


def _best_of(outcomes: dict[int, Outcome]) -> Candidate | None:
    found = [outcome.best for outcome in outcomes.values() if outcome.best is not None]
    return min(found, key=lambda candidate: candidate.rank, default=None)


def _rejected(admission: Admission, best: Candidate, per_degree: dict[int, Outcome],
              without_bound: Candidate | None, bound_s: float) -> tuple[Rejected, ...]:
    """The best of each other tensor-parallel degree, and what the latency bound excluded."""
    rows = []
    for degree, outcome in per_degree.items():
        if outcome.best is None:
            causes = ", ".join(reason for reason, _ in outcome.closed) or "limit"
            rows.append(Rejected(label=f"tp_degree {degree}", throughput_qps=None, latency_s=None,
                                 reason=f"no admissible schedule ({causes})"))
        elif admission.plans[outcome.best.root].tp_degree != admission.plans[best.root].tp_degree:
            rows.append(_row(admission, outcome.best, f"tp_degree {degree}, its best",
                             "lower throughput"))
    if without_bound is not None and not math.isinf(bound_s) and without_bound != best:
        rows.append(_row(admission, without_bound, "without a latency bound",
                         f"latency above {bound_s:g} s"))
    return tuple(rows)


def _row(admission: Admission, candidate: Candidate, label: str, reason: str) -> Rejected:
    figures = admission.figures(candidate.root, _point(candidate))
    return Rejected(label=f"{label}: {describe(admission, candidate)}", reason=reason,
                    throughput_qps=figures.throughput_qps, latency_s=figures.latency_s)


def describe(admission: Admission, candidate: Candidate) -> str:
    """A configuration in words."""
    config = admission.config(candidate.root, _point(candidate))
    return (f"encode_batch {config.encode_batch}, decode_iterations {config.decode_iterations}, "
            f"tp_gpus {config.tp_gpus}")


def _refuse_other_policies(problem: Problem) -> None:
    if problem.fixed.policy not in (None, "rra"):
        raise InputError([Mistake(file="schedule", line=None, key="schedule.policy",
                                  value=problem.fixed.policy, allowed="known policies: rra")])
