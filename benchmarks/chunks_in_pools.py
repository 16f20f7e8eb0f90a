"""What does WAA bring whose decode pool takes chunks of inputs while its encode pool is behind?

    python benchmarks/chunks_in_pools.py [--only 405b ...] [--out benchmarks/results]

The best schedule of any policy and number of copies (`policy: auto`, steady state, no margin) with
such chunks (`encode_chunk` of WAA) and without, for problems of hand_problems.py up to 32 GPUs.
Where chunks win, the schedule is replayed, one copy of it: throughput of the steady state, and
latency of the bound's sequence, in the mean of those handed over and those encoded in chunks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from closed_form_speed import cpu
from hand_problems import SCENARIOS, HandScenario

from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xprofiler.roofline import Roofline
from xscheduler.copies import problems_of_copies
from xscheduler.planner import PlanOptions, plan
from xscheduler.spaces import waa
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady import enough_queries, steady_figures

MOST_GPUS = 32
LEAST_GAIN = 0.005  # the gap to which schedules are searched


def chosen(problem: Problem, timing: Roofline, *, has_chunks: bool) -> Schedule | None:
    """The best schedule; without: as if no chunk of WAA's had a size. None where there is none."""
    options = PlanOptions(has_margin=False, horizon="steady", is_brief=True)
    with mock.patch.object(waa, "CHUNKS", waa.CHUNKS if has_chunks else ()):
        try:
            return plan(problem, timing, options)
        except InfeasibleError:
            return None


def replayed(problem: Problem, timing: Roofline, found: Schedule) -> tuple[float, float]:
    """(queries a second, latency in s) of all copies, by replay of one."""
    copies = found.deployment.replicas
    part = next(parts[0] for parts in problems_of_copies(problem) if parts[0].copies == copies)
    count = enough_queries(found.estimate, least=3000, rounds=10, most=20_000)
    inputs, outputs = part.lengths.sample(count, np.random.default_rng(0))
    steady = steady_figures(
        replay_job(part, timing, found.estimate.one_copy, planned_queries(part, inputs, outputs)),
        part.constraint, part.lengths.outputs)
    assert steady is not None, f"{count = }"
    return copies * steady.throughput_qps, steady.latency_s


def row_of(one: HandScenario, bound_s: float) -> tuple[str, float]:
    """A line of the table, and what chunks bring."""
    problem, timing = one.problem(bound_s), one.timing()
    before, after = (chosen(problem, timing, has_chunks=has_chunks) for has_chunks in (False, True))
    name = f"| {one.name} | {'none' if math.isinf(bound_s) else f'{bound_s:g}'} |"
    if before is None or after is None:
        return f"{name} - | - | - | - | - |", 0.0
    most, qps = after.figures.throughput_qps, before.figures.throughput_qps
    gain, chunk = most / qps - 1, after.estimate.variables.get("encode_chunk")
    cells = f"{before.estimate.policy} | {qps:.4g} | {after.estimate.policy}"
    if gain <= LEAST_GAIN or not chunk:
        return f"{name} {cells} | {most:.4g} | | |", 0.0
    rate, latency_s = replayed(problem, timing, after)
    return (f"{name} {cells}, chunks of {chunk} | {most:.4g} | {gain:.1%} | "
            f"{rate:.4g} at {latency_s:.4g} s |"), gain


def page(rows: Sequence[tuple[str, float]]) -> list[str]:
    gains = np.array([gain for _, gain in rows])
    return ["# Chunks in WAA's decode pools", "",
            *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), "",
            f"In {int((gains > 0).sum())} of {len(rows)} problems they win, by "
            f"{gains.max(initial=0.0):.1%} at most.", "",
            "| problem | bound s | without | queries/s | with | queries/s | more | replay |",
            f"|{'---|' * 8}", *(line for line, _ in rows), "",
            f"{cpu()}, {datetime.date.today()}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for one in SCENARIOS:
        if one.nodes * one.per_node in range(2, MOST_GPUS + 1) and (
                not arguments.only or any(part in one.name for part in arguments.only)):
            for bound_s in one.bounds():
                rows.append(row_of(one, bound_s))
                print(rows[-1][0], flush=True)
    text = "\n".join(page(rows))
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"chunks-in-pools-{datetime.date.today()}.md"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
