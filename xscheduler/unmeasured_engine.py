"""Static batches for an engine whose step times were not measured. The batch is chosen by the times
of xgpt's own kernels. No margin and no proof is given, since the engine's times differ."""

import math
import time
from dataclasses import replace

from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError, wrong
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Proof, Schedule, Status
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.search_planner import SearchPlanner
from xsimulator.rough.formulas import fixed_estimate


def plan_untimed(problem: Problem, timing: TimingSource, note: str) -> Schedule:
    """The schedule of the batch that the job fixes, even if it exceeds the limit, else of the batch
    with the highest throughput within it. note: added to the estimate. Raises InfeasibleError."""
    began, fixed, constraint = time.monotonic(), problem.fixed, problem.constraint
    if fixed.encode_batch is not None:
        estimate, nodes, status = _of_batch(problem, timing, fixed), 1, Status.GIVEN
        _refuse(problem, estimate)
    else:
        search = SearchPlanner(problem, timing, is_brief=True)
        estimate, status = _best_batch(problem, timing, search), Status.BEST_SEEN
        nodes = search.nodes
    estimate = replace(estimate, notes=(*estimate.notes, note))
    proof = Proof(status=status, bound_qps=math.inf, gap=math.inf, nodes=nodes,
                  seconds=time.monotonic() - began)
    return Schedule(estimate=estimate, bounds=(constraint.latency,), proof=proof,
                    fingerprint=problem.fingerprint)


def _of_batch(problem: Problem, timing: TimingSource, fixed: FixedSchedule) -> Estimate:
    return fixed_estimate(str(fixed.policy), problem, timing, replace(
        fixed, decode_micro_batches=fixed.decode_micro_batches or 1))


def _refuse(problem: Problem, estimate: Estimate) -> None:
    fixed, figures = problem.fixed, estimate.figures
    if not figures.fits:
        raise InfeasibleError(f"schedule.encode_batch = {fixed.encode_batch} does not fit: it "
                              f"takes {max(figures.memory_bytes)} bytes of "
                              f"{figures.memory_capacity_bytes} a rank")
    if math.isinf(figures.latency_s):
        raise wrong("schedule", "schedule.encode_batch", fixed.encode_batch,
                    "sizes that the profile does not reach")


def _best_batch(problem: Problem, timing: TimingSource, search: SearchPlanner) -> Estimate:
    fixed, bound_s = problem.fixed, problem.constraint.latency_s
    assert fixed.tp_degree is not None and fixed.tp_gpus is not None, f"{fixed = }"
    try:
        return search.best(bound_s, has_margin=False).estimate
    except InfeasibleError:
        alone = _of_batch(problem, timing, replace(fixed, encode_batch=1))
        raise InfeasibleError(
            f"no batch of {fixed.policy} on {problem.cluster.num_devices} ranks fits and keeps the "
            f"latency limit of {format_seconds(bound_s)}: one request alone takes "
            f"{format_seconds(alone.figures.latency_s)}, by the times of xgpt's own kernels"
            ) from None
