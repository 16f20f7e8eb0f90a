"""What a schedule loses when output lengths drift (the paper's section 7.6 and its Figure 11).

    python benchmarks/drift.py [--policies waa-c,rra] [--queries 6000] [--out benchmarks/results]

OPT-13B on four A40, task T, timed by the roofline; the latency bound is that of the bottom 30 % of
FT's batch sizes (every fourth from 4 on), and of the bottom 70 %, for under the first the roofline
leaves WAA batches of one query, whose next size is twice as large. Each policy's best schedule is
replayed on distributions whose mean, standard deviation or skewness
differs, beside the best schedule for each. With --out the table and a picture are written.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.report.chart import Axis, Chart, Series
from xgpt.report.image import write_image
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.drift import DriftRow, drift_rows
from xscheduler.search import Scheduler
from xsimulator.policies import make_policy
from xsimulator.policies.static.config import StaticConfig

SHARES = (0.30, 0.70)  # of FT's batch sizes have a lower latency
STEP, MOST_BATCH = 4, 2000


def problem_of(latency_s: float) -> Problem:
    joint = catalog.task("T")
    return Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), lengths=joint,
        dtype="float16", num_queries=None, fixed=FixedSchedule(),
        constraint=latency_constraint(latency_s=latency_s), default_max_tokens=joint.outputs.max)


def ft_bound_s(timing: TimingSource, share: float) -> float:
    """Latency that this share of FT's batch sizes are within: pipelined over all devices, a
    micro-batch a stage."""
    problem = problem_of(math.inf)
    configs = [StaticConfig(encode_batch=size, decode_micro_batches=problem.cluster.num_devices)
               for size in range(STEP, MOST_BATCH + 1, STEP)]
    policy: Any = make_policy("ft", problem, timing)
    found = policy.evaluate(configs)
    return float(np.quantile(found.latency_s[found.fits], share))


def best_of(policy: str, problem: Problem, timing: TimingSource) -> Estimate:
    """The policy's best within the problem's bound. Raises InfeasibleError."""
    fixed = replace(problem.fixed, policies=(policy,))
    return Scheduler(replace(problem, fixed=fixed), timing).find(compares=False).estimate


def controls(estimate: Estimate) -> str:
    return (
        f"encode_batch {estimate.figures.encode_batch}, decode_iterations "
        f"{estimate.figures.decode_iterations}, "
        f"decode_micro_batches {estimate.deployment.num_groups}, "
        f"tp_degree {estimate.deployment.tp_degree}, tp_gpus {estimate.deployment.tp_gpus}; "
        f"closed form: "
        f"{estimate.figures.throughput_qps:.2f} queries/s, {estimate.figures.latency_s:.1f} s"
    )


def table(rows: Sequence[DriftRow]) -> list[str]:
    lines = ["| change | this schedule, queries/s | the best one's | difference | P99 of all, "
             "ratio | bound kept | tighter by | latency of the planned P99 length, ratio | "
             "bound kept | tighter by |", "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        other = "none" if row.best is None else f"{row.best.throughput_qps:.2f}"
        off = "" if row.best is None else f"{row.throughput_difference:+.1%}"
        lines.append(
            f"| {words(row)} | {row.kept.throughput_qps:.2f} | {other} | {off} | "
            f"{row.queries_ratio:.3f} | {'yes' if row.keeps_queries else 'no'} | "
            f"{tighter(row.queries_ratio):.1%} | " + (
                "- | - | - |" if row.keeps_sequence is None else
                f"{row.sequence_ratio:.3f} | {'yes' if row.keeps_sequence else 'no'} | "
                f"{tighter(row.sequence_ratio):.1%} |"))
    return lines


def tighter(ratio: float) -> float:
    """Share by which a bound must be tightened beforehand for a change that lets latency grow by
    this ratio to break it no more than the unchanged distribution does."""
    return ratio if math.isnan(ratio) else max(1 - 1 / ratio, 0.0)


def latency_difference(row: DriftRow) -> float:
    """Of the kept schedule to the best, at the quantile of all queries; nan without a best."""
    return math.nan if row.best is None else row.kept.queries_s / row.best.queries_s - 1


def words(row: DriftRow) -> str:
    if row.statistic == "skewness":
        return f"skewness {row.change:+g}"
    return f"{row.change:g} {row.statistic}"


def beside_the_paper(policy: str, rows: Sequence[DriftRow]) -> list[str]:
    """The paper's statements and ours."""
    def of(statistic: str, change: float) -> DriftRow:
        return next(r for r in rows if (r.statistic, r.change) == (statistic, change))

    def most(statistics: Sequence[str], what: str) -> float:
        values = [abs(r.throughput_difference if what == "throughput" else latency_difference(r))
                  for r in rows if r.statistic in statistics]
        return float(np.nanmax(values))

    if policy == "rra":
        return ["| RRA | paper | here |", "|---|---|---|",
                f"| mean changed: difference in throughput to the best | under 28 % | "
                f"{most(['mean'], 'throughput'):.1%} |",
                f"| mean changed: difference in P99 latency to the best | under 12.6 % | "
                f"{most(['mean'], 'latency'):.1%} |",
                f"| the other two: in throughput | at most 11 % | "
                f"{most(['std', 'skewness'], 'throughput'):.1%} |",
                f"| the other two: in P99 latency | at most 17 % | "
                f"{most(['std', 'skewness'], 'latency'):.1%} |"]
    return [f"| {policy.upper()} | paper | here |", "|---|---|---|",
            f"| mean 15 % up, P99 of all queries: bound tighter by | 13 % | "
            f"{tighter(of('mean', 1.15).queries_ratio):.1%} |",
            f"| mean 15 % up, fixed length: bound tighter by | 10 % | "
            f"{tighter(of('mean', 1.15).sequence_ratio):.1%} |",
            f"| 1.3 std, P99 of all queries: bound tighter by | 5 % | "
            f"{tighter(of('std', 1.3).queries_ratio):.1%} |",
            f"| 1.3 std, fixed length: bound tighter by | 0 % | "
            f"{tighter(of('std', 1.3).sequence_ratio):.1%} |",
            f"| skewness: difference in throughput | slight | "
            f"{most(['skewness'], 'throughput'):.1%} |"]


def picture(found: dict[str, Sequence[DriftRow]]) -> list[Chart]:
    """Throughput and the P99 latency's ratio for each policy and statistic, in rows of two."""
    charts = []
    for policy, rows in found.items():
        for statistic in ("mean", "std", "skewness"):
            own = [row for row in rows if row.statistic == statistic]
            names = [words(row) for row in own]
            x = Axis(label=f"change of the {statistic}", names=names)
            charts += [
                Chart(name=f"{policy}-{statistic}", title=f"{policy}: queries/s", x=x,
                      y=Axis(label="queries/s", from_zero=True), series=[
                          Series(label="this schedule", kind="bars", x=names,
                                 y=[row.kept.throughput_qps for row in own]),
                          Series(label="best for the changed lengths", kind="bars", x=names,
                                 y=[row.best.throughput_qps if row.best else None for row in own],
                                 colour="encode")]),
                Chart(name=f"{policy}-{statistic}-latency", title=f"{policy}: P99 latency", x=x,
                      y=Axis(label="ratio to unchanged", from_zero=True), series=[
                          Series(label="this schedule", kind="line+dots", colour="bad", x=names,
                                 y=[row.queries_ratio for row in own])])]
    return charts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="waa-c,rra")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--queries", type=int, default=6000, help="replayed at least")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    problem = problem_of(math.inf)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    lines = [f"# Schedules under drifting output lengths ({datetime.date.today()})", "",
             "OPT-13B, a40-4, task T, times of the roofline, planned for the 99th percentile "
             "length; figures by replay. Paper: its Figure 11, WAA, bottom 30 % of FT."]
    pictures = {}
    for share in options.shares:
        bound_s, found = ft_bound_s(timing, share), {}
        lines += ["", f"## Latency bound {bound_s:.1f} s (bottom {share:.0%} of FT)"]
        for policy in options.policies.split(","):
            estimate = best_of(policy, problem_of(bound_s), timing)
            rows = drift_rows(problem_of(bound_s), timing, estimate, least_queries=options.queries,
                              search=lambda changed, name=policy: best_of(name, changed, timing))
            found[policy] = rows
            usual = next(row for row in rows if row.change == 1).kept
            lines += ["", f"### {policy}", "", f"{controls(estimate)}; replay: P99 of all queries "
                      f"{usual.queries_s:.1f} s, of that length {usual.sequence_s:.1f} s", "",
                      *table(rows), "", *beside_the_paper(policy, rows)]
        pictures[share] = picture(found)
    print("\n".join(lines))
    if options.out:
        name = f"drift-{datetime.date.today()}"
        (options.out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for share, charts in pictures.items():
            path = options.out / f"{name}-ft{share:.0%}.svg".replace("%", "")
            write_image(charts, path, columns=2)


if __name__ == "__main__":
    main()
