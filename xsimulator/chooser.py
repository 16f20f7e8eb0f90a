"""Predictions as a chooser: of the configurations that somebody measured, the one that they would
have made us take under a bound on latency, and what it measured.

A case is a workload (model, GPU, engine, dtype, input and output tokens) of at least `LEAST`
configurations (degree, requests at a time) and one bound. Bounds lie halfway
(geometrically) between neighbours of the measured latencies, at each of `QUANTILES`, and a tenth
above the longest. Chosen is what is predicted to have most throughput a GPU among those whose
predicted latency, times the margin, is within the bound."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xsimulator.closed_loop import Served
from xsimulator.measured_loops import ServingPoint

LEAST = 4  # chosen
QUANTILES = (0.2, 0.4, 0.6, 0.8, 1.0)  # chosen
ABOVE = 1.1  # chosen: the last bound over the longest latency


class Choices(NamedTuple):
    """Shares of the cases: no answer; bound broken (of the answers); the measured best. `regret`:
    the mean share of the best throughput that answers which keep their bound miss."""

    cases: int
    none: float
    broken: float
    exact: float
    regret: float


def choices(points: Sequence[ServingPoint], times: Mapping[ServingPoint, Served],
            margin_of: Callable[[ServingPoint], float]) -> Choices:
    """`margin_of`: factor by which a point's predicted latency is raised."""
    workloads: dict[tuple[str, ...], list[ServingPoint]] = defaultdict(list)
    for point in points:
        workloads[point.workload].append(point)
    cases = none = broken = exact = 0
    regrets = []
    for own in workloads.values():
        if len(own) < LEAST:
            continue
        latencies = sorted(point.latency_s for point in own)
        latencies.append(ABOVE**2 * latencies[-1])
        for quantile in QUANTILES:
            at = int(np.ceil(quantile * len(own))) - 1
            bound_s = float(np.sqrt(latencies[at] * latencies[at + 1]))
            cases += 1
            best = max((p for p in own if p.latency_s <= bound_s),
                       key=lambda p: throughput(p, p.latency_s))
            within = [p for p in own if times[p].latency_s * margin_of(p) <= bound_s]
            if not within:
                none += 1
                continue
            chosen = max(within, key=lambda p: throughput(p, times[p].latency_s))
            exact += chosen is best
            if chosen.latency_s > bound_s:
                broken += 1
            else:
                regrets.append(1 - throughput(chosen, chosen.latency_s)
                               / throughput(best, best.latency_s))
    answers = max(cases - none, 1)
    return Choices(cases, none / max(cases, 1), broken / answers, exact / max(cases, 1),
                   float(np.mean(regrets)) if regrets else float("nan"))


def throughput(point: ServingPoint, latency_s: float) -> float:
    """Requests a second and GPU of a closed loop."""
    return point.concurrency / latency_s / point.tp_degree
