"""How long planning takes: seconds of one core for every problem of hand_problems.py, the cases
that users began with, and the largest scenario of the paper.

    python benchmarks/planning_time.py [--only 8b "opt-13b/1x4 A40/S 11.5" ...] [--keep FILE]
        [--so-far] [--out benchmarks/results]

In pieces: rows that FILE has are taken from there, new ones are added to it; --so-far writes the
page of those that are there.

A row is the first schedule that a fresh planner is asked for, as `xgpt schedule` asks for it: all
policies and numbers of copies, margin, explanation, and what there would be without a bound. The
paper's scenarios have no margin, as in jobs/paper-scenarios.yaml. Seconds are the processor's, of
one thread; those of replays, which check a latency, are told apart.
"""

from __future__ import annotations

import os

from runner import cpu, options, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hand_problems import SCENARIOS, HandScenario
from paper_scenarios import Scenario, scenarios
from xscheduler.copies_shown import configuration

import xscheduler.evaluator
from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Schedule
from xscheduler.planner import PlanOptions, plan
from xsimulator.policies.continuous import walk_table

CASES = (("llama-3.1-8b/1x8 H100/D", 30.0), ("llama-3.1-70b/2x8 H100/D", 30.0),
         ("opt-13b/1x4 A40/S", 11.5))
LARGEST = "gpt3-341b"
BOUNDS_S = {"G": (99.9, 143.0, 231.0), "C1": (52.2, 99.3, 192.0), "C2": (136.0, 177.0, 263.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem to plan, and which of the three tables it belongs to."""

    scenario: HandScenario | Scenario
    bound_s: float
    table: str

    @property
    def name(self) -> str:
        return f"{self.scenario.name} {words_of_bound(self.bound_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`found`: cells of the table, what was chosen among them."""

    asked: Asked
    seconds: float
    replay_s: float
    replays: int
    found: str


class ReplayTimer:
    """Counts the replays that check a latency, and their seconds."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._replay = xscheduler.evaluator.replay_checked
        xscheduler.evaluator.replay_checked = self._timed  # type: ignore[assignment]

    def _timed(self, *given: object) -> object:
        began = time.process_time()
        found = self._replay(*given)  # type: ignore[arg-type]
        self.seconds += time.process_time() - began
        self.count += 1
        return found

    def start(self) -> None:
        self.seconds, self.count = 0.0, 0


def all_asked() -> Iterator[Asked]:
    """Every problem once."""
    for one in SCENARIOS:
        for bound_s in one.bounds():
            yield Asked(scenario=one, bound_s=bound_s, table="hand")
    for paper in scenarios():
        if paper.model == LARGEST:
            for bound_s in (*BOUNDS_S[paper.task], math.inf):
                yield Asked(scenario=paper, bound_s=bound_s, table="paper")


def planned(asked: Asked, timer: ReplayTimer) -> Row:
    problem, timing = asked.scenario.problem(asked.bound_s), asked.scenario.timing()
    walk_table._tables.clear()  # of other bounds of the scenario: the planner is a fresh one
    timer.start()
    began = time.process_time()
    try:
        found: Schedule | None = plan(problem, timing, PlanOptions(
            has_margin=asked.table != "paper"))
    except InfeasibleError:
        found = None
    return Row(asked=asked, seconds=time.process_time() - began, replay_s=timer.seconds,
               replays=timer.count, found=words_of(found))


def kept(asked: Asked, timer: ReplayTimer, path: Path | None) -> Row:
    """The row of a file that it is in, or else planned and put there."""
    rows = json.loads(path.read_text("utf-8")) if path is not None and path.is_file() else {}
    if asked.name in rows:
        return Row(asked=asked, **rows[asked.name])
    row = planned(asked, timer)
    rows[asked.name] = {"seconds": row.seconds, "replay_s": row.replay_s, "replays": row.replays,
                        "found": row.found}
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(line_of(row), flush=True)
    return row


def words_of(found: Schedule | None) -> str:
    if found is None:
        return "- | no schedule keeps the bound | -"
    what, copies = configuration(found.estimate), found.deployment.replicas
    return (f"{found.figures.throughput_qps:.4g} | "
            f"{what if copies == 1 else f'{copies} copies of {what}'} | {found.proof.gap:.1%}")


def words_of_bound(bound_s: float) -> str:
    return "none" if math.isinf(bound_s) else f"{bound_s:.3g}"


def line_of(row: Row) -> str:
    return (f"| {row.asked.scenario.name} | {words_of_bound(row.asked.bound_s)} "
            f"| {row.seconds:.2f} | {row.replay_s:.2f} | {row.replays} | {row.found} |")


def summary(label: str, rows: Sequence[Row]) -> str:
    seconds = np.array([row.seconds for row in rows])
    return (f"- {label}, {len(rows)} problems: median {np.median(seconds):.2f} s, longest "
            f"{seconds.max():.2f} s; {int((seconds < 1).sum())} under 1 s, "
            f"{int((seconds < 2).sum())} under 2 s, {int((seconds > 5).sum())} over 5 s.")


def page(rows: Sequence[Row]) -> list[str]:
    """The summaries and the table."""
    hand = [row for row in rows if row.asked.table == "hand"]
    paper = [row for row in rows if row.asked.table == "paper"]
    cases = [row for row in hand if (row.asked.scenario.name, row.asked.bound_s) in CASES]
    lines = [f"# Planning time: {len(rows)} of {len(list(all_asked()))} problems", "",
             *(__doc__ or "").split("\n\n", 3)[3].strip().splitlines(), ""]
    lines += [summary(label, own) for label, own in (
        ("Problems of hand_problems.py", hand), ("The paper's largest model (no margin)", paper))
        if own]
    lines += [f"- {row.asked.scenario.name}, {row.asked.bound_s:g} s: {row.seconds:.2f} s."
              for row in cases]
    return [*lines, "", "| problem | bound s | s | of which replays | replays | queries/s | chosen "
            "| gap |", f"|{'---|' * 8}", *map(line_of, rows), "",
            f"One thread of {cpu()}, {today()}: seconds of the processor."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[],
                        help="problems whose model/cluster/task, space and bound contains one of "
                             "these")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what was timed: kept there, and "
                        "taken from there")
    parser.add_argument("--so-far", action="store_true", help="nothing that FILE does not have")
    arguments = parser.parse_args()
    timer = ReplayTimer()
    asked = [one for one in all_asked() if not arguments.only or any(
        part in one.name for part in arguments.only)]
    if arguments.so_far:
        has = json.loads(arguments.keep.read_text("utf-8"))
        asked = [one for one in asked if one.name in has]
    rows = [kept(one, timer, arguments.keep) for one in asked]
    text = "\n".join(page(rows))
    write("planning-time", text, arguments.out)


if __name__ == "__main__":
    main()
