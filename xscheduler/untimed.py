"""Static batches for an engine whose steps take other times than those that there are: chosen by
these, without the margin that other times would make meaningless; nothing is claimed of them."""

import math
import time
from dataclasses import replace

from xgpt.core.errors import InfeasibleError, wrong
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, Status
from xgpt.core.schedule_file import schedule_from_flat
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.found_schedule import SearchPlanner
from xsimulator.policies import ClosedForm, make_config, make_policy


def plan_untimed(problem: Problem, timing: TimingSource, note: str) -> Schedule:
    """The batches that the problem fixes, even beyond its bound, else those of highest throughput
    within it. `note` is left with the estimate. Raises InfeasibleError."""
    began, fixed, constraint = time.monotonic(), problem.fixed, problem.constraint
    form = make_policy(str(fixed.policy), problem, timing)
    if fixed.encode_batch is not None:
        estimate, nodes, status = _given_batch(problem, form), 1, Status.GIVEN
    else:
        search = SearchPlanner(problem, timing, is_brief=True)
        estimate, status = _best_batch(problem, search, form), Status.BEST_SEEN
        nodes = search.nodes
    estimate = replace(estimate, notes=(*estimate.notes, note))
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=constraint.latency_s, constraint_kind=constraint.kind,
        quantile=constraint.quantile, status=status, bound_qps=math.inf, gap=math.inf, nodes=nodes,
        seconds=time.monotonic() - began, fingerprint=problem.fingerprint)


def _given_batch(problem: Problem, form: ClosedForm) -> Estimate:
    fixed = problem.fixed
    config, _ = make_config(str(fixed.policy), replace(
        fixed, decode_micro_batches=fixed.decode_micro_batches or 1))
    estimate = form.estimate(config)
    if not estimate.figures.fits:
        raise InfeasibleError(f"schedule.encode_batch = {fixed.encode_batch} does not fit: it "
                              f"takes {max(estimate.figures.memory_bytes)} bytes of "
                              f"{estimate.figures.memory_capacity_bytes} a rank")
    if math.isinf(estimate.figures.latency_s):
        raise wrong("schedule", "schedule.encode_batch", fixed.encode_batch,
                    "sizes that the profile does not reach")
    return estimate


def _best_batch(problem: Problem, search: SearchPlanner, form: ClosedForm) -> Estimate:
    fixed, bound_s = problem.fixed, problem.constraint.latency_s
    assert fixed.tp_degree is not None and fixed.tp_gpus is not None, f"{fixed = }"
    try:
        return search.best(bound_s, has_margin=False).estimate
    except InfeasibleError:
        single, _ = make_config(str(fixed.policy), replace(
            FixedSchedule(), encode_batch=1, decode_micro_batches=1, tp_degree=fixed.tp_degree,
            tp_gpus=fixed.tp_gpus))
        alone = form.estimate(single)
        raise InfeasibleError(
            f"no batch of {fixed.policy} on {problem.cluster.num_devices} ranks fits and keeps the "
            f"latency bound of {format_seconds(bound_s)}: one query alone takes "
            f"{format_seconds(alone.figures.latency_s)}, by the times of xgpt's own kernels"
            ) from None
