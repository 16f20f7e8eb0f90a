"""Is a random configuration better than the schedule that the planner chooses?

    python benchmarks/best_by_hand.py [--scenarios 8b ...] [--copied-heads] [--devices N]
        [--drawn N] [--out benchmarks/results]

For every problem of hand_problems.py: the schedule that `xgpt schedule --horizon steady` chooses
without a margin, beside the best of random configurations. Of each the number of devices of a copy,
the policy and the tensor plan are drawn, then every control variable, evenly over its logarithm
between the least and the largest value that the planner considers. As many equal copies as the
cluster holds run it; copies on unlike numbers of devices are not drawn.

Both are judged by the planner's longest replay, of the same queries; a drawn one is first given a
shorter replay, which has to show more than the best so far within 1.02 bounds. It is not replayed
where memory does not hold it, or where its rough formula has less than half of the planner's
throughput or more than twice the latency bound. Seconds are the processor's, of one thread, of the
first schedule that is asked for. The exit status is 1 where a ratio is below 0.98.
"""

from __future__ import annotations

import os

from runner import about, cpu, options, table, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hand_problems import COPIED_HEADS, SCENARIOS, HandScenario

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, devices_of_copies
from xprofiler.timing import TimingSource
from xscheduler.cells import cells_of
from xscheduler.labels import configuration
from xscheduler.planner import PlanOptions, plan
from xscheduler.replays import Replays
from xscheduler.replicas import problem_on
from xscheduler.search import SURE
from xscheduler.space import Cell, Limits
from xsimulator.replay.prediction import num_checked_queries

LEAST_RATIO, DRAWN, SEED = 0.98, 2000, 20261128  # chosen
SCATTER = 1.02  # chosen: by which a shorter replay's latency may be off
LIKELY_QPS, LIKELY_LATENCY = 0.5, 2.0  # chosen: a rough formula is within some 15 % of a replay


class Judged(NamedTuple):
    """A configuration, and its copies' throughput in a replay; 0 where that breaks the bound."""

    throughput_qps: float = 0.0
    words: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem. `bound_qps`: the planner's upper bound. `replays`: of drawn configurations."""

    scenario: str
    bound_s: float
    planned: Judged
    bound_qps: float
    drawn: Judged
    replays: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Of the planner's throughput to the best drawn; infinite where none keeps the bound."""
        other = self.drawn.throughput_qps
        return self.planned.throughput_qps / other if other else math.inf

    @property
    def is_below(self) -> bool:
        return self.ratio < LEAST_RATIO


def planned(problem: Problem, timing: TimingSource) -> tuple[Schedule | None, float]:
    """(what the planner chooses, the processor's seconds that it took)"""
    began = time.process_time()
    try:
        found: Schedule | None = plan(problem, timing, PlanOptions(
            horizon="steady", has_margin=False))
    except InfeasibleError:
        found = None
    return found, time.process_time() - began


def replayed(problem: Problem, timing: TimingSource, chosen: Estimate) -> Judged:
    """A schedule's copies, each shape replayed alone."""
    found, words = [], []
    for shape in chosen.shapes:
        copies, (devices, *_) = shape.deployment.replicas, devices_of_copies(shape)
        replays = Replays(problem_on(problem, devices), timing)
        found.append(copies * judged(replays, shape.one_copy))
        words.append(words_of(shape, copies, devices))
    return Judged(sum(found) if all(found) else 0.0, "; ".join(words))


def judged(replays: Replays, estimate: Estimate, least_qps: float = 0.0) -> float:
    """Requests/s of one copy in the longest replay; 0 without a steady state, beyond the bound, or
    where a shorter replay shows no more than `least_qps`."""
    queries, bound_s = num_checked_queries(replays.problem, estimate), (
        replays.problem.constraint.latency_s)
    for times, limits in ((1, Limits(latency_s=SCATTER * bound_s)),
                          (SURE, Limits(latency_s=bound_s))):
        found = replays.of(estimate, times * queries)
        if (found.figures is None or not limits.are_kept(found.figures)
                or found.throughput_qps <= least_qps):
            return 0.0
    return found.throughput_qps


def words_of(estimate: Estimate, copies: int, devices: int) -> str:
    what = configuration(estimate)
    return what if copies == 1 else f"{copies} copies on {devices}: {what}"


def drawn_cells(cells: Sequence[Cell], count: int,
                rng: np.random.Generator) -> Iterator[tuple[Cell, int]]:
    """(cell, how many of `count` draws are of it); sizes, policies and plans are drawn evenly."""
    tree: dict[int, dict[str, list[int]]] = {}
    for place, cell in enumerate(cells):
        own = tree.setdefault(cell.problem.cluster.num_devices, {})
        own.setdefault(cell.policy, []).append(place)
    counts = np.zeros(len(cells), np.int64)
    for _ in range(count):
        of_size = list(tree.values())[rng.integers(len(tree))]
        places = list(of_size.values())[rng.integers(len(of_size))]
        counts[places[rng.integers(len(places))]] += 1
    return ((cell, int(many)) for cell, many in zip(cells, counts, strict=True) if many)


def drawn_points(cell: Cell, count: int, rng: np.random.Generator) -> IntArray:
    """[count, variables] evenly over their logarithms."""
    columns = []
    for values in cell.points.T:
        known = values[values > 0]
        if not len(known):
            columns.append(np.zeros(count, np.int64))
            continue
        low, high = math.log(known.min()), math.log(known.max())
        own = np.rint(np.exp(rng.uniform(low, high, count)))
        columns.append(own.astype(np.int64))
    return np.stack(columns, axis=1)


def best_drawn(problem: Problem, timing: TimingSource, planned_qps: float, count: int,
               rng: np.random.Generator) -> tuple[Judged, int]:
    """(the best of `count` random configurations, how many were replayed)"""
    replays = {cell: own for cell, own in cells_of(problem, timing) if len(cell.points)}
    best, num_replays = Judged(), 0
    for cell, many in drawn_cells(list(replays), count, rng):
        points, rough = cell.with_room(np.unique(drawn_points(cell, many, rng), axis=0))
        is_likely = ((cell.copies * rough.throughput_qps >= LIKELY_QPS * planned_qps)
                     & (rough.latency_s <= LIKELY_LATENCY * problem.constraint.latency_s))
        for point in points[is_likely].tolist():
            estimate = cell.formula.estimate(cell.plan, tuple(point))
            num_replays += 1
            least_qps = best.throughput_qps / cell.copies
            if qps := cell.copies * judged(replays[cell], estimate, least_qps):
                devices = cell.problem.cluster.num_devices
                best = Judged(qps, words_of(estimate, cell.copies, devices))
    return best, num_replays


def row_of(scenario: HandScenario, bound_s: float, count: int) -> Row:
    problem, timing = scenario.problem(bound_s), scenario.timing()
    found, seconds = planned(problem, timing)
    own = Judged() if found is None else replayed(problem, timing, found.estimate)
    rng = np.random.default_rng(SEED)
    drawn, replays = best_drawn(problem, timing, own.throughput_qps, count, rng)
    row = Row(scenario=scenario.name, bound_s=bound_s, planned=own, drawn=drawn, replays=replays,
              bound_qps=0.0 if found is None else found.proof.bound_qps, seconds=seconds)
    print(line_of(row), flush=True)
    return row


def line_of(row: Row) -> str:
    bound, mark = f"{row.bound_s:.3g}", " **below**" * row.is_below
    return (f"| {row.scenario} | {bound} | {row.planned.words} | {row.planned.throughput_qps:.4g} "
            f"| {row.bound_qps:.4g} | {row.drawn.words} | {row.drawn.throughput_qps:.4g} "
            f"| {row.replays} | {row.ratio:.3f}{mark} | {row.seconds:.2f} |")


def page(rows: Sequence[Row], count: int) -> list[str]:
    """The summary and the table."""
    ratios = [row.ratio for row in rows if math.isfinite(row.ratio)] or [math.nan]
    seconds = [row.seconds for row in rows]
    header = ("problem", "bound s", "chosen", "requests/s", "upper bound", "best drawn", "its rate",
              "replayed", "ratio", "s")
    return ["# Best by hand", "", *about(__doc__).splitlines(), "",
            f"- {len(rows)} problems, {count:,} configurations drawn of "
            f"each. The planner has less than {LEAST_RATIO:.0%} of the best drawn in "
            f"{sum(row.is_below for row in rows)}.",
            f"- Its throughput over the best drawn: least {min(ratios):.3f}, median "
            f"{np.median(ratios):.3f}. In {len(rows) - sum(map(math.isfinite, ratios))} no drawn "
            "configuration keeps the bound.",
            f"- Seconds of planning: median {np.median(seconds):.2f}, longest {max(seconds):.2f}.",
            "", *table(header), *map(line_of, rows), "", f"One thread of {cpu()}, {today()}."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--scenarios", nargs="*", default=[""],
                        help="those whose model/cluster/task contains one of these")
    parser.add_argument("--copied-heads", action="store_true", help="those whose tensor-parallel "
                        "groups may exceed the KV heads, instead of the others")
    parser.add_argument("--devices", type=int, default=64, help="those of at most so many")
    parser.add_argument("--drawn", type=int, default=DRAWN, help="configurations of each problem")
    arguments = parser.parse_args()
    every = COPIED_HEADS if arguments.copied_heads else SCENARIOS
    chosen = [one for one in every if one.nodes * one.per_node <= arguments.devices
              and any(part in one.name for part in arguments.scenarios)]
    rows = [row_of(one, bound_s, arguments.drawn) for one in chosen for bound_s in one.bounds()]
    name = "best-by-hand" + "-copied-heads" * arguments.copied_heads
    write(name, "\n".join(page(rows, arguments.drawn)), arguments.out)
    sys.exit(any(row.is_below for row in rows))


if __name__ == "__main__":
    main()
