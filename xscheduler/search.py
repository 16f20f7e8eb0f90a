"""The best RRA schedule of a problem, and what is proved about it (paper section 5).

Every tensor plan is a root box of encode_batch B_E x decode_iterations N_D. Memory, the number of
queries present and latency grow with B_E and fall with N_D, so that for each N_D there is a largest
admissible B_E, its frontier, which bisection finds; throughput grows with B_E, so the optimum lies
on it. A box is therefore contracted to the frontier of its largest N_D, and split along N_D only.

What the bounds rest on, and how far it holds for the roofline on the paper's tasks:

- Latency rises with B_E, and falls with N_D within 0.02 %: frontiers that bound are sought within
  LATENCY_TOLERANCE of the latency bound.
- Throughput rises with B_E wherever memory has room (time per token falls with size; padding to
  the longest context bends it by up to 1.5 % beyond that): bounds are widened by BATCH_TOLERANCE.
- Throughput is *not* monotone in N_D: with attention in charge, as for long outputs in large
  batches, fewer iterations lose up to 9 %. A box is bounded by its top edge, sampled at
  EDGE_SAMPLES values of N_D and widened by EDGE_TOLERANCE where values lie between the samples.

A measured profile is as monotone as its table: the reported bound holds within these tolerances.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from xgpt.errors import InputError, Mistake
from xgpt.problem import Problem
from xgpt.schedule import Rejected, Schedule
from xprofiler.timing import TimingSource
from xscheduler.admission import Admission, Frontier, Frontiers, Key
from xscheduler.branch_and_bound import Box, Candidate, NodeResult, Outcome, Status, maximise
from xscheduler.infeasible import explain
from xscheduler.space import batch_range, iteration_range, tensor_plans, timed_plans

EDGE_SAMPLES = 6
EDGE_TOLERANCE = 0.02
BATCH_TOLERANCE = 0.001
LATENCY_TOLERANCE = 0.001


def find_schedule(problem: Problem, timing: TimingSource, *, gap: float = 0.005,
                  max_nodes: int | None = None, max_seconds: float | None = None,
                  padded: bool = True) -> Schedule:
    """The schedule of highest steady-state throughput within the problem's constraint.

    gap: stop once no admissible schedule can be better by more than this share. max_nodes,
    max_seconds: limits; the result's status says when one was hit. padded: see
    xsimulator.policies.rra.Rra. Raises InfeasibleError naming the tightest latency that can be
    met, InputError for fixed values that the model or cluster cannot hold.
    """
    began = time.monotonic()
    _refuse_other_policies(problem)
    plans = timed_plans(tensor_plans(problem.model, problem.cluster, problem.fixed),
                        problem.cluster, timing)
    admission = Admission(problem, timing, plans, padded=padded)
    bound_s = problem.constraint.latency_s

    def search(latency_bound_s: float) -> Outcome:
        own = _RraSearch(admission, latency_bound_s)
        return maximise(own.roots, own.examine, gap=gap, max_nodes=max_nodes,
                        max_seconds=max_seconds, split=split_iterations)

    outcome = search(bound_s)
    if outcome.best is None:
        raise explain(admission, is_proved=outcome.status is Status.INFEASIBLE)
    free = outcome if math.isinf(bound_s) else search(math.inf)
    estimate = admission.rra.estimate(admission.config(_key(outcome.best)))
    return Schedule(
        estimate=estimate, latency_bound_s=bound_s, constraint_kind=problem.constraint.kind,
        quantile=problem.constraint.quantile, status=outcome.status.value,
        bound_qps=outcome.upper_bound, gap=outcome.upper_bound / estimate.throughput_qps - 1,
        nodes=admission.num_evaluated, seconds=time.monotonic() - began,
        fingerprint=problem.fingerprint,
        unbounded_qps=None if free.best is None else free.best.objective,
        rejected=_rejected(admission, outcome, free, bound_s),
    )


class _RraSearch:
    """Examines boxes of RRA's space under one latency bound."""

    def __init__(self, admission: Admission, latency_bound_s: float) -> None:
        self._admission, self._bound_s = admission, latency_bound_s
        self._frontiers = Frontiers(admission, latency_bound_s,
                                    latency_tolerance=LATENCY_TOLERANCE)
        problem = admission.problem
        self._batches = batch_range(problem.fixed, problem.num_queries)
        iterations = iteration_range(problem.fixed, admission.rra.flow.max_iterations)
        self.roots = [
            Box(root=root, lower=(self._batches[0], iterations[0]),
                upper=(self._batches[1], iterations[1])) for root in range(len(admission.plans))]

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        """Contract each box, look at its frontier's end, and bound it by its top edge."""
        self._frontiers.find([_line(box) for box in boxes], *self._batches)
        keys = []
        for box in boxes:
            frontier = self._frontiers.of(_line(box))
            if frontier.strict is not None:
                keys.append((box.root, (frontier.strict, box.upper[1])))
            if frontier.outer is not None:
                keys += [(box.root, (frontier.outer, n)) for n in _edge(box)]
        self._admission.evaluate(keys)
        return [self._result(box, self._frontiers.of(_line(box))) for box in boxes]

    def _result(self, box: Box, frontier: Frontier) -> NodeResult:
        if frontier.outer is None:
            easiest = (box.root, (box.lower[0], box.upper[1]))
            reason = self._admission.forbidden(easiest, self._bound_s, LATENCY_TOLERANCE)
            assert reason is not None, f"{easiest = } is admissible without a frontier"
            return NodeResult(upper_bound=-math.inf, best=None, box=box, is_settled=True,
                              reason=reason)
        best = None
        if frontier.strict is not None:
            point = (frontier.strict, box.upper[1])
            figures = self._admission.figures((box.root, point))
            best = Candidate(objective=figures.throughput_qps, root=box.root, point=point)
        edge, (low, up) = _edge(box), (box.lower[1], box.upper[1])
        top = max(self._most_qps(box.root, frontier.outer, n) for n in edge)
        is_sampled = len(edge) <= up - low
        bound = top * (1 + BATCH_TOLERANCE) * (1 + (EDGE_TOLERANCE if is_sampled else 0.0))
        contracted = Box(root=box.root, lower=box.lower, upper=(frontier.outer, up))
        return NodeResult(upper_bound=bound, best=best, box=contracted, is_settled=low == up,
                          reason="decided on its frontier")


    def _most_qps(self, root: int, batch: int, iterations: int) -> float:
        """No admissible batch of this (root, decode_iterations) up to `batch` has a higher
        throughput. A batch that memory forbids still says so, by its figure; of one that the
        timing source refuses there is none, so the largest it answers for is asked instead."""
        found = self._admission.figures((root, (batch, iterations))).throughput_qps
        if found > 0:
            return found
        roomy = self._frontiers.roomy((root, iterations), self._batches[0], batch)
        if roomy is None:
            return 0.0
        return self._admission.figures((root, (roomy, iterations))).throughput_qps


def split_iterations(box: Box) -> tuple[Box, Box]:
    """Halves of the range of decode_iterations, at its geometric middle."""
    (batch, low), (top, up) = box.lower, box.upper
    middle = min(max(math.isqrt(low * up), low), up - 1)
    return (Box(root=box.root, lower=(batch, low), upper=(top, middle)),
            Box(root=box.root, lower=(batch, middle + 1), upper=(top, up)))


def _line(box: Box) -> tuple[int, int]:
    """Where a box is contracted: its plan at its largest decode_iterations."""
    return box.root, box.upper[1]


def _edge(box: Box) -> list[int]:
    """Values of decode_iterations at which the top edge is looked at, both ends included."""
    low, up = box.lower[1], box.upper[1]
    if up - low < EDGE_SAMPLES:
        return list(range(low, up + 1))
    return sorted({min(max(round(v), low), up) for v in np.geomspace(low, up, EDGE_SAMPLES)})


def _key(candidate: Candidate) -> Key:
    batch, iterations = candidate.point
    return candidate.root, (batch, iterations)


def _rejected(admission: Admission, outcome: Outcome, free: Outcome,
              bound_s: float) -> tuple[Rejected, ...]:
    """The best found of each other tensor-parallel degree, and what the latency bound excluded."""
    assert outcome.best is not None
    rows = []
    for degree in sorted({plan.tp_degree for plan in admission.plans}):
        if degree == admission.plans[outcome.best.root].tp_degree:
            continue
        roots = [r for r, plan in enumerate(admission.plans) if plan.tp_degree == degree]
        found = [c for c in (outcome.per_root[r][0] for r in roots) if c is not None]
        most = max(outcome.per_root[r][1] for r in roots)
        if found:
            best = min(found, key=lambda candidate: candidate.rank)
            rows.append(_row(admission, best, f"tp_degree {degree}",
                             f"lower throughput: no more than {most:.4g} queries/s at this degree"))
        else:
            rows.append(Rejected(label=f"tp_degree {degree}", throughput_qps=None, latency_s=None,
                                 reason="no admissible schedule"))
    if free.best is not None and free.best != outcome.best:
        rows.append(_row(admission, free.best, "without a latency bound",
                         f"latency above {bound_s:g} s"))
    return tuple(rows)


def _row(admission: Admission, candidate: Candidate, label: str, reason: str) -> Rejected:
    figures, config = admission.figures(_key(candidate)), admission.config(_key(candidate))
    point = (f"encode_batch {config.encode_batch}, decode_iterations {config.decode_iterations}, "
             f"tp_gpus {config.tp_gpus}")
    return Rejected(label=f"{label}: {point}", reason=reason,
                    throughput_qps=figures.throughput_qps, latency_s=figures.latency_s)


def _refuse_other_policies(problem: Problem) -> None:
    if problem.fixed.policy not in (None, "rra"):
        raise InputError([Mistake(
            file="schedule", line=None, key="schedule.policy", value=problem.fixed.policy,
            allowed="rra (or left out): the search knows no other policy in this version; "
                    "`xgpt simulate` estimates them all")])
