"""Are this tree's schedules as good as those of another commit? One replay judges both.

    python benchmarks/same_plans.py --against COMMIT [--seeds 4] [--queries 20000]
        [--scenarios 8b ...] [--out benchmarks/results]

Both trees plan every problem of hand_problems.py, each with its own margin, in a process of its
own for each problem. This tree computes the latency bounds for both and replays both schedules by
the same queries. Throughput is that of all copies together and latency that of the slowest copy,
both the mean over the seeds. A schedule keeps its bound if its latency times its own margin factor
is within it. Planning seconds are those of the processor, of one thread. What COMMIT planned is
kept in the cache folder, for it does not change. The exit status is 1 where a schedule has less
than 0.98 of the throughput of COMMIT's, breaks a bound that COMMIT's keeps, or is refused where
COMMIT has one.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hand_problems import SCENARIOS, HandScenario
from runner import cpu, options, today, write

from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import from_json, write_json
from xgpt.report.words import controls_cell
from xscheduler.replicas import problem_of_replica
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.replay.steady_state import enough_queries, steady_figures

ROOT = Path(__file__).resolve().parent.parent
LEAST_RATIO = 0.98  # chosen: issue 42
SCATTER = 1.006  # measured: xsimulator/replay/prediction.py, of latencies over seeds
ROUNDS, MOST_QUERIES = 6, 200_000  # chosen: static batches need several rounds for a steady state
# may be of an older format
NOT_JUDGED = ("rejected", "explanation", "over_copies", "prospects", "device_group", "until",
              "chunk_queries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one tree made of a problem. `schedule` is None where it refused, with `refusal`."""

    seconds: float
    schedule: Schedule | None
    refusal: str = ""

    @property
    def words(self) -> str:
        if self.schedule is None:
            return "refused"
        shapes = self.schedule.estimate.shapes
        return " + ".join(f"{shape.deployment.replicas} x {policy(shape.policy).title} "
                          f"{controls_cell(shape)}" for shape in shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Means over replays: requests/s of all copies, and seconds of the slowest copy; nan where a
    replay has no steady state."""

    throughput_qps: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem, as the older commit and this tree plan it. `*_replay` is None where that side
    refused."""

    name: str
    bound_s: float
    older: Planned
    own: Planned
    older_replay: Replayed | None
    own_replay: Replayed | None

    @property
    def ratio(self) -> float:
        """This tree's throughput over the older commit's; nan unless both have one."""
        if self.older_replay is None or self.own_replay is None:
            return math.nan
        return self.own_replay.throughput_qps / self.older_replay.throughput_qps

    @property
    def kept(self) -> tuple[bool, bool]:
        """Whether the (older, own) schedule keeps the bound with its margin; True if refused."""
        return (keeps(self.older, self.older_replay, self.bound_s),
                keeps(self.own, self.own_replay, self.bound_s))

    @property
    def is_below(self) -> bool:
        """Whether both have a schedule and this tree's is worse, or has no steady state."""
        both = self.older.schedule is not None and self.own.schedule is not None
        return both and not self.ratio >= LEAST_RATIO

    @property
    def is_broken(self) -> bool:
        return self.kept == (True, False)

    @property
    def is_lost(self) -> bool:
        return self.own.schedule is None and self.older.schedule is not None


def keeps(planned: Planned, replay: Replayed | None, bound_s: float) -> bool:
    """Whether a schedule's replayed latency, times its own margin factor, is within the bound."""
    if planned.schedule is None or replay is None or math.isinf(bound_s):
        return True
    return replay.latency_s * planned.schedule.margin.factor <= bound_s * SCATTER


def plan_by(tree: str, scenario: str, bound: str) -> None:
    """Plans one problem by the packages of `tree` and prints the result as JSON. Its source runs in
    a process of its own, so it imports all it uses, and only what both trees have."""
    import json
    import sys
    import time
    from pathlib import Path

    sys.path[:0] = [tree, f"{tree}/benchmarks"]  # before a tree that is installed
    import hand_problems

    import xgpt
    import xscheduler.planner
    from xgpt.core.errors import InfeasibleError
    from xgpt.core.schedule_file import to_json

    for module in (xgpt, xscheduler, hand_problems):
        assert Path(tree).resolve() in Path(str(module.__file__)).resolve().parents, module
    asked = hand_problems.HandScenario(**json.loads(scenario))
    options = xscheduler.planner.PlanOptions(horizon="steady")
    problem, timing = asked.problem(float(bound)), asked.timing()
    schedule, refusal, began = None, "", time.process_time()
    try:
        schedule = to_json(xscheduler.planner.plan(problem, timing, options))
    except InfeasibleError as cause:
        refusal = str(cause)
    seconds = time.process_time() - began
    print(json.dumps({"seconds": seconds, "refusal": refusal, "schedule": schedule}))


def plan_in(tree: Path, scenario: HandScenario, bound_s: float) -> dict[str, Any]:
    """What `tree` makes of a problem, as `plan_by` prints it."""
    source = f"{inspect.getsource(plan_by)}\nimport sys\nplan_by(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", source, str(tree), json.dumps(asdict(scenario)), str(bound_s)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree}:{tree}/benchmarks"},
        stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned_of(raw: Mapping[str, Any]) -> Planned:
    """What `plan_in` returned, with its schedule read."""
    schedule = raw["schedule"] and from_json(_judged(raw["schedule"]))
    return Planned(seconds=raw["seconds"], schedule=schedule, refusal=raw["refusal"])


def _judged(part: Any) -> Any:
    """A schedule's JSON without the keys that are not judged, at any depth."""
    if isinstance(part, list):
        return [_judged(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {key: _judged(value) for key, value in part.items() if key not in NOT_JUDGED}


class OtherCommit:
    """The plans of another commit, which are made in a worktree and kept in the cache folder."""

    def __init__(self, commit: str) -> None:
        self.commit = git("rev-parse", "--verify", f"{commit}^{{commit}}")
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._kept = Path(cache) / "xgpt" / "same_plans" / self.commit
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def plan(self, scenario: HandScenario, bound_s: float) -> dict[str, Any]:
        path = self._kept / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', scenario.name)}_{bound_s!r}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, plan_in(self._tree(), scenario, bound_s))
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found

    def _tree(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            git("worktree", "add", "--detach", f"{self._folder.name}/tree", self.commit)
        return Path(self._folder.name) / "tree"

    def close(self) -> None:
        if self._folder is not None:
            git("worktree", "remove", "--force", str(self._tree()))
            self._folder.cleanup()


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, text=True,
                          check=True).stdout.strip()


def replayed(scenario: HandScenario, bound_s: float, schedule: Schedule, *, seeds: int,
             queries: int) -> Replayed:
    """The means over seeds of a schedule's replays, each of at least so many queries a copy."""
    problem, timing = scenario.problem(bound_s), scenario.timing()
    throughput, latency = np.zeros(seeds), np.zeros(seeds)
    for shape in schedule.estimate.shapes:
        own = problem_of_replica(problem, shape)
        count = enough_queries(shape.one_copy, least=queries, rounds=ROUNDS, most=MOST_QUERIES)
        replayer = Replayer(own, timing, shape)
        for seed in range(seeds):
            lengths = own.lengths.sample(count, np.random.default_rng(seed))
            found = steady_figures(replayer.run(planned_queries(own, *lengths)), own.constraint,
                                   own.lengths.outputs)
            qps, seconds = (math.nan, math.nan) if found is None else (
                found.throughput_qps, found.latency_s)
            throughput[seed] += shape.deployment.replicas * qps
            latency[seed] = np.maximum(latency[seed], seconds)  # nan stays
    return Replayed(throughput_qps=float(throughput.mean()), latency_s=float(latency.mean()))


def judged(scenario: HandScenario, bound_s: float, older: Planned, own: Planned, *, seeds: int,
           queries: int) -> Row:
    """Both plans of a problem, replayed."""
    def replay(planned: Planned) -> Replayed | None:
        return None if planned.schedule is None else replayed(
            scenario, bound_s, planned.schedule, seeds=seeds, queries=queries)

    older_replay = replay(older)
    own_replay = older_replay if executed(own) == executed(older) else replay(own)
    return Row(name=scenario.name, bound_s=bound_s, older=older, own=own,
               older_replay=older_replay, own_replay=own_replay)


def executed(planned: Planned) -> list[Any]:
    """All that a replay takes of a schedule, so that equal ones are replayed once."""
    shapes = planned.schedule.estimate.shapes if planned.schedule else ()
    return [(shape.controls, shape.deployment) for shape in shapes]


def line_of(row: Row) -> str:
    """A line of the table; each pair is of the older commit and this tree."""
    sides = [(row.older, row.older_replay), (row.own, row.own_replay)]
    qps = ["-" if replay is None else f"{replay.throughput_qps:.4g}" for _, replay in sides]
    gaps = [f"{plan.schedule.proof.gap:.1%}" if plan.schedule else "-" for plan, _ in sides]
    kept = ["yes" if is_kept else "BROKEN" for is_kept in row.kept]
    bound = "none" if math.isinf(row.bound_s) else f"{row.bound_s:.3g}"
    is_same = executed(row.own) == executed(row.older)
    cells = (row.name, bound, row.older.words, "the same" if is_same else row.own.words,
             " / ".join(qps), f"{row.ratio:.3f}", " / ".join(kept),
             f"{row.older.seconds:.2f} / {row.own.seconds:.2f}", " / ".join(gaps))
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> list[str]:
    """The lines below the table; each pair is of the older commit and this tree."""
    def named(chosen: Sequence[Row]) -> str:
        names = "; ".join(f"{row.name} under {row.bound_s:.3g} s" for row in chosen)
        return f"{len(chosen)}{f' ({names})' if names else ''}"

    def median(values: Iterator[float]) -> float:
        return float(np.median([*values] or [math.nan]))

    ratios = [row.ratio for row in rows if row.ratio > 0]
    mean = math.exp(float(np.mean(np.log(ratios)))) if ratios else math.nan
    both = [[row.older for row in rows], [row.own for row in rows]]
    schedules = [[plan.schedule for plan in side if plan.schedule] for side in both]
    seconds = [f"{median(plan.seconds for plan in side):.2f}" for side in both]
    gaps = [f"{median(one.proof.gap for one in side):.1%}" for side in schedules]
    factors = [f"{median(one.margin.factor for one in side):.3f}" for side in schedules]
    return [
        f"- Problems below {LEAST_RATIO}: {named([row for row in rows if row.is_below])}.",
        f"- Geometric mean of {len(ratios)} ratios: {mean:.3f}.",
        f"- Bounds broken: {named([row for row in rows if not row.kept[0]])} / "
        f"{named([row for row in rows if not row.kept[1]])}.",
        f"- Refused by the older commit alone: "
        f"{named([row for row in rows if row.own.schedule and not row.older.schedule])}.",
        f"- Refused by this tree alone: {named([row for row in rows if row.is_lost])}.",
        f"- Median planning seconds: {' / '.join(seconds)}.",
        f"- Median claimed gap: {' / '.join(gaps)}.",
        f"- Median margin factor: {' / '.join(factors)}."]


def as_data(row: Row) -> dict[str, Any]:
    """A row for the JSON file beside the page."""
    def side(planned: Planned, replay: Replayed | None) -> dict[str, Any]:
        one = planned.schedule
        return {"words": planned.words, "planning_s": planned.seconds, "refusal": planned.refusal,
                "replay": replay and asdict(replay), "margin_factor": one and one.margin.factor,
                "bound_qps": one and one.proof.bound_qps, "gap": one and one.proof.gap}

    return {"problem": row.name, "bound_s": row.bound_s, "ratio": row.ratio,
            "older": side(row.older, row.older_replay), "own": side(row.own, row.own_replay)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--queries", type=int, default=20_000, help="of a copy, at least")
    parser.add_argument("--scenarios", nargs="*", default=[""],
                        help="those whose model/cluster/task contains one of these")
    asked = parser.parse_args()
    older, rows = OtherCommit(asked.against), list[Row]()
    lines = ["| problem | bound s | older | this tree | requests/s | ratio | bound kept "
             "| planning s | claimed gap |", f"|{'---|' * 9}"]
    print("\n".join(lines), flush=True)
    try:
        for scenario in SCENARIOS:
            if not any(part in scenario.name for part in asked.scenarios):
                continue
            for bound_s in scenario.bounds():
                rows.append(judged(
                    scenario, bound_s, planned_of(older.plan(scenario, bound_s)),
                    planned_of(plan_in(ROOT, scenario, bound_s)), seeds=asked.seeds,
                    queries=asked.queries))
                lines.append(line_of(rows[-1]))
                print(lines[-1], flush=True)
    finally:
        older.close()
    how = (f"{older.commit[:8]} (older) / {git('rev-parse', '--short', 'HEAD')} (this tree, with "
           f"what is not committed); {asked.seeds} seeds of {asked.queries:,} queries. One thread "
           f"of {cpu()}, {today()}.")
    text = [f"# The schedules of two commits: {len(rows)} problems", "", how, "", *summary(rows),
            "", *lines]
    write("same-plans", "\n".join(text), asked.out,
          {"how": how, "problems": [as_data(row) for row in rows]})
    if any(row.is_below or row.is_broken or row.is_lost for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
