"""Why no schedule satisfies a problem, and the tightest latency that one could."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xgpt.errors import InfeasibleError
from xgpt.units import format_bytes, format_seconds
from xscheduler.admission import Admission, Figures, Point
from xscheduler.branch_and_bound import Box

LATENCY_SAMPLES = 64  # values of decode_iterations looked at for the tightest latency


def explain(admission: Admission, roots: Sequence[Box], *, is_proved: bool) -> InfeasibleError:
    """The error to raise: names the binding constraint, the tightest latency and its configuration."""
    seen = _easiest(admission, roots)
    bound_s = admission.problem.constraint.latency_s
    start = "no schedule satisfies the bound" if is_proved else (
        "none found within the search's limit")
    fitting = {key: f for key, f in seen.items() if admission.forbidden(f, math.inf) is None}
    if not fitting:
        return InfeasibleError(_without_room(admission, seen))
    (root, point), tightest = min(fitting.items(), key=lambda item: (item[1].latency_s, item[0]))
    config = admission.config(root, point)
    problem = admission.problem
    longest = problem.lengths.outputs.quantile(problem.constraint.quantile)
    return InfeasibleError(
        f"{start} of {format_seconds(bound_s)} on a query of {longest} output tokens "
        f"(quantile {problem.constraint.quantile:g}): latency binds. The tightest latency that can "
        f"be met is {format_seconds(tightest.latency_s)}, by policy rra, encode_batch "
        f"{config.encode_batch}, decode_iterations {config.decode_iterations}, tp_degree "
        f"{config.tp_degree}, tp_gpus {config.tp_gpus} ({tightest.throughput_qps:.3g} queries/s)")


def _easiest(admission: Admission, roots: Sequence[Box]) -> dict[tuple[int, Point], Figures]:
    """Smallest batch over the range of decode_iterations, of every plan."""
    keys = []
    for box in roots:
        low, up = box.lower[1], box.upper[1]
        values = sorted({round(v) for v in np.linspace(low, up, min(up - low + 1, LATENCY_SAMPLES))})
        keys += [(box.root, (box.lower[0], n)) for n in values]
    admission.evaluate(keys)
    return {(root, point): admission.figures(root, point) for root, point in keys}


def _without_room(admission: Admission, seen: dict[tuple[int, Point], Figures]) -> str:
    obstacles = {admission.forbidden(figures, math.inf) for figures in seen.values()}
    if obstacles == {"number of queries"}:
        present = min(figures.present for figures in seen.values())
        return (f"no schedule: the job has {admission.problem.num_queries} queries, and the fixed "
                f"values keep {present:.0f} present at a time")
    needed = min(figures.memory_bytes for figures in seen.values())
    return (f"no schedule: memory binds. {admission.problem.model.name} needs at least "
            f"{format_bytes(needed)} on its fullest device, of which "
            f"{format_bytes(admission.rra.capacity_bytes)} can be used; more devices or a smaller "
            "model, dtype or length of output would fit")
