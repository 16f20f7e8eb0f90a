"""Why no schedule satisfies a problem, and the tightest latency that one could."""

from __future__ import annotations

import math

import numpy as np

from xgpt.errors import InfeasibleError
from xgpt.units import format_bytes, format_seconds
from xprofiler.interpolation import REFUSED_BEYOND
from xscheduler.admission import Admission, Key
from xscheduler.space import batch_range, iteration_range

LATENCY_SAMPLES = 64  # values of decode_iterations looked at for the tightest latency


def explain(admission: Admission, *, is_proved: bool) -> InfeasibleError:
    """The error to raise: the binding constraint, the tightest latency and who reaches it."""
    keys = _easiest(admission)
    with_room = [key for key in keys if admission.crowding(key) is None]
    if not with_room:
        return InfeasibleError(_without_room(admission, keys))
    admission.evaluate(with_room)
    key = min(with_room, key=lambda key: (admission.figures(key).latency_s, key))
    tightest, config, problem = admission.figures(key), admission.config(key), admission.problem
    longest = problem.lengths.outputs.quantile(problem.constraint.quantile)
    start = "no schedule satisfies" if is_proved else "the search's limit came before any that met"
    return InfeasibleError(
        f"{start} the bound of {format_seconds(problem.constraint.latency_s)} for a query of "
        f"{longest} output tokens (quantile {problem.constraint.quantile:g}); latency binds. The "
        f"tightest that can be met is {_rounded_up(tightest.latency_s)} s, by policy rra, "
        f"encode_batch {config.encode_batch}, decode_iterations {config.decode_iterations}, "
        f"tp_degree {config.tp_degree}, tp_gpus {config.tp_gpus} "
        f"({tightest.throughput_qps:.3g} queries/s)")


def _rounded_up(seconds: float) -> str:
    """Four digits, never less than `seconds`: the figure must work as a bound itself."""
    digits = 3 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def _easiest(admission: Admission) -> list[Key]:
    """Smallest batch over the range of decode_iterations, of every plan."""
    problem = admission.problem
    batch, _ = batch_range(problem.fixed, problem.num_queries)
    low, up = iteration_range(problem.fixed, admission.rra.flow.max_iterations)
    samples = np.linspace(low, up, min(up - low + 1, LATENCY_SAMPLES))
    values = sorted({round(value) for value in samples})
    return [(root, (batch, n)) for root in range(len(admission.plans)) for n in values]


def _without_room(admission: Admission, keys: list[Key]) -> str:
    memory_bytes, present, _ = admission.rra.room([admission.config(key) for key in keys])
    reasons = {admission.crowding(key) for key in keys}
    ranged = [key for key in keys if admission.crowding(key) == "measured range"]
    if ranged:
        # a smaller memory need than the capacity must not be told as the reason
        beyond = admission.rra.beyond(admission.config(ranged[0]), REFUSED_BEYOND)
        return ("no schedule: the profile was measured for smaller sizes than this job's, and "
                f"says nothing beyond {REFUSED_BEYOND:g} times as much ({'; '.join(beyond)}); "
                "measure one for this job")
    if reasons == {"number of queries"}:
        return (f"no schedule: the job has {admission.problem.num_queries} queries, and the fixed "
                f"values keep {present.min():.0f} present at a time")
    return (f"no schedule: memory binds. {admission.problem.model.name} needs at least "
            f"{format_bytes(memory_bytes.min())} on its fullest device, of which "
            f"{format_bytes(admission.rra.capacity_bytes)} can be used; it takes more devices, or "
            "a smaller model, dtype or maximum output")
