"""How far xsimulator.bound lies above what the planner finds, on the problems of hand_problems.py.

    python benchmarks/bound_gap.py [--scenarios 8b ...]

For each: queries/s of the schedule that `xgpt schedule --horizon steady` chooses without a margin,
by how much its own proof leaves it open, by how much the bound over all equal copies does, and the
processor's seconds of the bound alone."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import argparse
import time
from typing import NamedTuple

import numpy as np
from best_by_hand import planned
from hand_problems import SCENARIOS, HandScenario

from xgpt.core.errors import InputError
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xscheduler.copies import problems_of_copies
from xscheduler.tensor_plans import tensor_plans
from xsimulator.bound import upper_bound


class Gap(NamedTuple):
    """Of one problem: what is open by the planner's proof, and by the bound."""

    claimed: float
    bound: float
    seconds: float


def bound_of_copies(problem: Problem, timing: Roofline) -> float:
    """Queries/s that no number of equal copies exceeds."""
    most_qps = 0.0
    for parts in problems_of_copies(problem):
        for part in parts:
            try:
                plans = tensor_plans(part, timing)
            except InputError:  # the model has no room
                continue
            most_qps = max(most_qps, part.copies * upper_bound(part, timing, plans))
    return most_qps


def gap_of(scenario: HandScenario, latency_s: float) -> Gap | None:
    """Prints its row; None where no schedule keeps the bound on latency."""
    problem, timing = scenario.problem(latency_s), scenario.timing()
    found, _ = planned(problem, timing, has_margin=False)
    began = time.process_time()
    most_qps = bound_of_copies(problem, timing)
    seconds = time.process_time() - began
    own_qps = found.figures.throughput_qps if found else 0.0
    gap = None if found is None else Gap(max(
        found.proof.bound_qps, *(one.bound_qps for one in found.over_copies), 0.0) / own_qps - 1,
        most_qps / own_qps - 1, seconds)
    print(f"| {scenario.name} | {latency_s:.3g} | {own_qps:.4g} | "
          f"{found.estimate.policy if found else '-'} | {most_qps:.4g} | "
          + (f"{gap.claimed:.1%} | {gap.bound:.1%}" if gap else "- | -") + f" | {seconds:.2f} |",
          flush=True)
    return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="*", default=[],
                        help="those whose model/cluster/task contains one of these")
    chosen = parser.parse_args().scenarios
    print("| problem | latency s | queries/s | policy | bound | gap by proof | gap | s |\n"
          "|---|---|---|---|---|---|---|---|")
    gaps = [gap for scenario in SCENARIOS
            if not chosen or any(part in scenario.name for part in chosen)
            for latency_s in scenario.bounds() if (gap := gap_of(scenario, latency_s))]
    for name in Gap._fields:
        values = [getattr(gap, name) for gap in gaps]
        print(f"{name}: median {np.median(values):.3f}, most {max(values):.3f}")


if __name__ == "__main__":
    main()
