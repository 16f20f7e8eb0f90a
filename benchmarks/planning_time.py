"""How long planning takes: seconds of one core for every problem of hand_problems.py and every job
of jobs/ that names its cluster.

    python benchmarks/planning_time.py [--only 8b "opt-13b/1x4 A40/S 11.5" ...]
        [--out benchmarks/results]

A row is the first schedule that a fresh planner is asked for, as `xgpt schedule` asks for it: all
policies and numbers of copies, explanation, and what there would be without a bound; once with the
margin and once without. Step times are the roofline's. Seconds are the processor's, of one thread.
"""

from __future__ import annotations

import os

from runner import about, cpu, options, table, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hand_problems import SCENARIOS

from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve
from xprofiler.roofline import Roofline
from xscheduler.labels import configuration
from xscheduler.planner import PlanOptions, plan

JOBS = Path(__file__).resolve().parents[1] / "jobs"
SWEEP = "paper-scenarios"  # 640 points, not one job


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem to plan. `is_job`: of jobs/, else of hand_problems.py."""

    name: str
    problem: Problem
    timing: Roofline
    is_job: bool = False

    @property
    def bound_words(self) -> str:
        bound_s = self.problem.constraint.latency_s
        return "none" if math.isinf(bound_s) else f"{bound_s:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`found`: cells of the table, what was chosen with the margin among them."""

    asked: Asked
    margin_s: float
    bare_s: float
    found: str


def all_asked() -> Iterator[Asked]:
    """Every problem once."""
    for one in SCENARIOS:
        for bound_s in one.bounds():
            yield Asked(name=one.name, problem=one.problem(bound_s), timing=one.timing())
    for path in sorted(JOBS.glob("*.yaml")):
        if path.stem == SWEEP or (job := load_job(path)).cluster == "local":
            continue
        problem = resolve(job)
        yield Asked(name=f"jobs/{path.name}", problem=problem, is_job=True,
                    timing=Roofline(problem.model, problem.cluster.device, problem.dtype))


def planned(asked: Asked, *, has_margin: bool) -> tuple[Schedule | None, float]:
    """(what is chosen, seconds)"""
    began = time.process_time()
    try:
        found: Schedule | None = plan(asked.problem, asked.timing, PlanOptions(
            has_margin=has_margin))
    except InfeasibleError:
        found = None
    return found, time.process_time() - began


def row_of(asked: Asked) -> Row:
    _, bare_s = planned(asked, has_margin=False)
    found, margin_s = planned(asked, has_margin=True)
    row = Row(asked=asked, margin_s=margin_s, bare_s=bare_s, found=words_of(found))
    print(line_of(row), flush=True)
    return row


def words_of(found: Schedule | None) -> str:
    if found is None:
        return "- | no schedule keeps the bound | -"
    what, copies = configuration(found.estimate), found.deployment.replicas
    return (f"{found.figures.throughput_qps:.4g} | "
            f"{what if copies == 1 else f'{copies} copies of {what}'} | {found.proof.gap:.1%}")


def line_of(row: Row) -> str:
    return (f"| {row.asked.name} | {row.asked.bound_words} | {row.margin_s:.2f} "
            f"| {row.bare_s:.2f} | {row.found} |")


def summary(label: str, seconds: Sequence[float]) -> str:
    return (f"- {label}, {len(seconds)} problems: median {np.median(seconds):.2f} s, longest "
            f"{max(seconds):.2f} s; {sum(one < 1 for one in seconds)} under 1 s, "
            f"{sum(one > 5 for one in seconds)} over 5 s.")


def page(rows: Sequence[Row]) -> list[str]:
    """The summaries and the table."""
    lines = ["# Planning time", "", *about(__doc__).splitlines(), ""]
    for label, is_job in (("Problems of hand_problems.py", False), ("Jobs of jobs/", True)):
        own = [row for row in rows if row.asked.is_job == is_job]
        if own:
            lines += [summary(f"{label} with the margin", [row.margin_s for row in own]),
                      summary(f"{label} without", [row.bare_s for row in own])]
    header = ("problem", "bound s", "s", "s without margin", "requests/s", "chosen", "gap")
    return [*lines, "", *table(header), *map(line_of, rows), "",
            f"One thread of {cpu()}, {today()}."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[""],
                        help="problems whose model/cluster/task and bound contains one of these")
    arguments = parser.parse_args()
    rows = [row_of(one) for one in all_asked()
            if any(part in f"{one.name} {one.bound_words}" for part in arguments.only)]
    write("planning-time", "\n".join(page(rows)), arguments.out)


if __name__ == "__main__":
    main()
