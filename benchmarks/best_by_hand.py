"""Is there a better schedule by hand? What the planner chooses against what a patient person finds.

    python benchmarks/best_by_hand.py [--scenarios 8b ...] [--hand FILE] [--out benchmarks/results]

For every problem of hand_problems.py: the schedule that `xgpt schedule --horizon steady` chooses,
beside the best of
- any policy at its best (RRA and WAA by their search, all others by a grid and every neighbour of
  its best points), on the whole cluster, as any number of equal copies of a smaller part of it,
  and, on one node, as copies on unlike numbers of devices;
- 2,000 configurations drawn at random: the number of copies, the policy, the tensor plan, and every
  control variable, sizes evenly over their logarithms.
All by the same times (the roofline's) and closed forms, all without a margin. Seconds are the
processor's, of one thread, of the first schedule that is asked for.
"""

from __future__ import annotations

import os

from runner import about, cpu, options, table, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from by_hand import DRAWN, NOTHING, ByHand, Drawn, Found
from hand_problems import SCENARIOS, HandScenario, copies, other_sizes
from xscheduler.search import GAP

from xgpt.core.copies import devices_of_copies, sum_of
from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.report.policy_words import controls_cell
from xprofiler.roofline import Roofline
from xscheduler.partition import best_unequal
from xscheduler.planner import Planner, PlanOptions

EQUAL = 1.0 + 1e-6  # of one another: figures of the same schedule
_SEED = 20261123


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem. `planned` None: the planner finds no schedule; `margin_s`: seconds of the whole
    command, margin and explanation included."""

    scenario: str
    bound_s: float
    planned: Found | None
    bound_qps: float
    by_hand: Found
    drawn: Found
    search_s: float
    margin_s: float

    @property
    def best_by_hand(self) -> Found:
        return max(self.by_hand, self.drawn)

    @property
    def ratio(self) -> float:
        """Of the planner's throughput to the best by hand; nan where neither has one."""
        own = self.planned.throughput_qps if self.planned is not None else 0.0
        other = self.best_by_hand.throughput_qps
        return own / other if other else math.nan if not own else math.inf

    @property
    def gap(self) -> float:
        """What the planner proves of this problem: none is better by more. Over GAP where a
        policy's own bound is loose, or the search was long; nan where it finds no schedule."""
        return math.nan if self.planned is None else (
            self.bound_qps / self.planned.throughput_qps - 1)

    @property
    def is_below(self) -> bool:
        """Whether a person finds better by more than GAP, whatever was proved."""
        return self.ratio * (1 + GAP) < 1

    @property
    def is_disproved(self) -> bool:
        """Whether a person finds better by more than this problem's own `gap`: better than the
        upper bound that the planner claims."""
        return self.best_by_hand.throughput_qps > self.bound_qps * EQUAL


def kept_by_hand(scenario: HandScenario, path: Path | None) -> list[tuple[Found, Found]]:
    """(the best of any policy and number of copies, the best drawn) of each of its bounds. What a
    file has is taken from there, what is new is put there piece by piece (a number of copies under
    one bound; what is drawn): it takes minutes, and does not change with the planner."""
    bounds, timing = scenario.bounds(), scenario.timing()
    parts = [part for count, problem in copies(scenario.problem())
             if (part := ByHand(count, problem, timing)).plans]
    unlike = [part for problem in other_sizes(scenario.problem())
              if (part := ByHand(1, problem, timing)).plans]
    pieces: dict[str, Callable[[], Any]] = {
        f"{name} under {_seconds(bound_s)}": partial(part.best, bound_s)
        for name, part in _named(scenario, parts, unlike) for bound_s in bounds}
    drawn = f"{scenario.name}: drawn"
    pieces[drawn] = lambda: [Drawn(parts, timing, np.random.default_rng(_SEED)).best(bound_s)
                             for bound_s in bounds]
    kept = _kept(path)
    for name, find in pieces.items():
        if name not in kept:
            found = find()
            kept = {**_kept(path), **kept, name: found}
            if path is not None:
                path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    rows = []
    for place, bound_s in enumerate(bounds):
        found = [(part, Found(*kept[f"{name} under {_seconds(bound_s)}"]))
                 for name, part in _named(scenario, parts, unlike)]
        equal = (one for part, one in found if part in parts)
        rows.append((max([*equal, divided(scenario, found)]), Found(*kept[drawn][place])))
    return rows


def divided(scenario: HandScenario, found: Sequence[tuple[ByHand, Found]]) -> Found:
    """The best of copies on unlike numbers of devices of one node, by the best of each."""
    if scenario.nodes > 1:
        return NOTHING
    each = {part.problem.cluster.num_devices: Found(one.throughput_qps / part.count, one.words)
            for part, one in found}
    best = best_unequal({size: one.throughput_qps for size, one in each.items()}, scenario.per_node)
    return NOTHING if best is None else Found(best.worth, "; ".join(
        f"{best.sizes.count(size)} on {size}: {each[size].words.rpartition(' copies of ')[2]}"
        for size in dict.fromkeys(best.sizes)))


def _named(scenario: HandScenario, parts: Sequence[ByHand],
           unlike: Sequence[ByHand]) -> list[tuple[str, ByHand]]:
    """Each part by the name that its results are kept under."""
    return [*((f"{scenario.name}: {part.count}", part) for part in parts),
            *((f"{scenario.name}: on {part.problem.cluster.num_devices}", part) for part in unlike)]


def _kept(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path is not None and path.is_file() else {}


def rows_of(scenario: HandScenario, hand: Path | None = None) -> list[Row]:
    """The four problems of a scenario."""
    rows = []
    for bound_s, (by_hand, drawn) in zip(scenario.bounds(), kept_by_hand(scenario, hand),
                                         strict=True):
        asked = scenario.problem(bound_s)
        found, search_s = planned(asked, scenario.timing(), has_margin=False)
        _, margin_s = planned(asked, scenario.timing(), has_margin=True)
        rows.append(Row(
            scenario=scenario.name, bound_s=bound_s, search_s=search_s, margin_s=margin_s,
            planned=None if found is None else Found(
                found.figures.throughput_qps, words_of(found)),
            bound_qps=0.0 if found is None else max(
                found.proof.bound_qps, *(one.bound_qps for one in found.over_copies), 0.0),
            by_hand=by_hand, drawn=drawn))
        print(line_of(rows[-1]), flush=True)
    return rows


def planned(problem: Problem, timing: Roofline, *,
            has_margin: bool) -> tuple[Schedule | None, float]:
    """(what the planner chooses, the processor's seconds that it took)"""
    began = time.process_time()
    try:
        found: Schedule | None = Planner(problem, timing, PlanOptions(
            horizon="steady", has_margin=has_margin)).plan()
    except InfeasibleError:
        found = None
    return found, time.process_time() - began


def words_of(schedule: Schedule) -> str:
    count = getattr(schedule.deployment, "replicas", 1)
    one = f"{policy(schedule.estimate.policy).title}: {controls_cell(schedule.estimate)}"
    if others := schedule.estimate.others:
        return "; ".join([f"{sum_of(devices_of_copies(schedule.estimate))} devices: {one}", *(
            f"{policy(other.policy).title}: {controls_cell(other)}" for other in others)])
    return one if count == 1 else f"{count} copies of {one}"


def line_of(row: Row) -> str:
    own = row.planned or NOTHING
    other = row.best_by_hand
    verdict = " **below**" * row.is_below + " **bound exceeded**" * row.is_disproved
    hand = "the same" if other.words == own.words else other.words
    return (f"| {row.scenario} | {_seconds(row.bound_s)} | {own.throughput_qps:.4g} | {own.words} "
            f"| {row.bound_qps:.4g} | {row.by_hand.throughput_qps:.4g} | {hand} "
            f"| {row.drawn.throughput_qps:.4g} | {row.ratio:.3f}{verdict} | {row.search_s:.2f} "
            f"| {row.margin_s:.2f} |")


def _seconds(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.3g}"


def page(rows: Sequence[Row]) -> list[str]:
    """The summary, the problems where a person finds better, and the table."""
    gaps = [row.gap for row in rows if row.planned is not None]
    ratios = np.array([row.ratio for row in rows if math.isfinite(row.ratio)])
    lines = ["# Best by hand", "", *about(__doc__).splitlines(), "",
             f"- {len(rows)} of {4 * len(SCENARIOS)} problems. The planner is below the best by "
             f"hand by more than {GAP:.1%} in {sum(row.is_below for row in rows)}, by more than "
             f"the gap that it proved of the problem in {sum(row.is_disproved for row in rows)}. "
             f"That gap is over {GAP:.1%} in {sum(gap > GAP for gap in gaps)}, at most "
             f"{max(gaps, default=0.0):.2%}.",
             f"- Its throughput over the best by hand: least {ratios.min():.3f}, median "
             f"{np.median(ratios):.3f}, most {ratios.max():.3f}."]
    for label, values in (("search alone", [row.search_s for row in rows]),
                          ("with the margin and the explanation",
                           [row.margin_s for row in rows])):
        lines.append(f"- Seconds, {label}: median {np.median(values):.2f}, longest "
                     f"{max(values):.2f}, {sum(value < 1 for value in values)} under 1 s, "
                     f"{sum(value > 5 for value in values)} over 5 s.")
    header = ("problem", "bound s", "queries/s", "chosen", "upper bound", "by hand", "how", "drawn",
              "ratio", "s", "s with margin")
    return [*lines, "", *table(header), *map(line_of, rows), "",
            f"One thread of {cpu()}, {today()}. *by hand*: the best of any policy at "
            f"its best, any number of copies; *drawn*: of {DRAWN:,} configurations at random."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--scenarios", nargs="*", default=[],
                        help="those whose model/cluster/task contains one of these")
    parser.add_argument("--hand", type=Path, metavar="FILE",
                        help="what is found by hand: kept there, and taken from there")
    parser.add_argument("--hand-only", action="store_true")
    arguments = parser.parse_args()
    chosen = [one for one in SCENARIOS if not arguments.scenarios
              or any(part in one.name for part in arguments.scenarios)]
    if arguments.hand_only:
        for one in chosen:
            print(one.name, kept_by_hand(one, arguments.hand), flush=True)
        return
    rows = [row for one in chosen for row in rows_of(one, arguments.hand)]
    text = "\n".join(page(rows))
    write("best-by-hand", text, arguments.out)


if __name__ == "__main__":
    main()
