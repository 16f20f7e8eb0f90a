"""Is there a better schedule by hand? What the planner chooses against what a patient person finds.

    python benchmarks/best_by_hand.py [--scenarios 8b ...] [--hand FILE] [--out benchmarks/results]

For every problem of hand_problems.py: the schedule that `xgpt schedule --horizon steady` chooses,
beside the best of
- any policy at its best, as `xgpt simulate --baselines` finds it (RRA and WAA by their search, all
  others by a grid and every neighbour of its best points), on the whole cluster, as any number of
  equal copies of a smaller part of it, and, on one node, as copies on unlike numbers of devices;
- 2,000 configurations drawn at random: the number of copies, the policy, the tensor plan, and every
  control variable, sizes evenly over their logarithms.
All by the same times (the roofline's) and closed forms, all without a margin. Seconds are the
processor's, of one thread, of the first schedule that is asked for.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from closed_form_speed import cpu
from hand_problems import SCENARIOS, HandScenario, copies, other_sizes

from xgpt.core.copies import devices_of_copies, sum_of
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policies, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.report.policy_words import controls_cell
from xprofiler.roofline import Roofline
from xscheduler.admissible import Limits, admissible
from xscheduler.partition import best_unequal
from xscheduler.planner import Planner, PlanOptions
from xscheduler.search import GAP, Scheduler
from xscheduler.spaces.grid import MOST_QUERIES, QuicklyBounded, best
from xscheduler.spaces.remembered import RememberedPolicy
from xscheduler.spaces.tensor_plans import all_tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.figures import EstimateArrays
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.waa.config import WaaConfig

DRAWN = 2000
SMALL = 4  # devices of a copy, of which every tensor plan is tried by grid
SEARCHED = ("rra", "waa-c", "waa-m")  # by hand, too: their grids are the search
CONTINUOUS, STATIC = ("orca", "vllm", "sarathi"), ("ft", "dsi")
EQUAL = 1.0 + 1e-6  # of one another: figures of the same schedule
_SEED = 20261123


class Found(NamedTuple):
    """A way to run a problem: queries/s of all copies together, and what it is."""

    throughput_qps: float
    words: str


NOTHING = Found(0.0, "nothing keeps the bound")


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


class ByHand:
    """One copy of so many, under any bound: the best of each policy. Keeps what was evaluated."""

    def __init__(self, count: int, problem: Problem, timing: Roofline) -> None:
        self.count, self.problem = count, problem
        self._searches: dict[str, Scheduler] = {}
        self._grids: dict[str, _Remembering] = {}
        for row in policies():
            if row.is_decoder_only and problem.model.is_encoder_decoder:
                continue
            if row.name in SEARCHED:
                try:
                    self._searches[row.name] = Scheduler(replace(
                        problem, fixed=FixedSchedule(policies=(row.name,))), timing)
                except InputError:  # too few devices for two pools
                    continue
            elif row.name in (*CONTINUOUS, *STATIC):
                self._grids[row.name] = _Remembering(row.name, problem, timing)
        self.plans = all_tensor_plans(problem, timing)
        devices = problem.cluster.num_devices
        # of many devices those that treat all alike: as a person would
        self.usual = self.plans if devices <= SMALL else [
            plan for plan in self.plans if plan.tp_gpus in (0, devices)]

    def best(self, bound_s: float) -> Found:
        """The best of any policy."""
        return max([NOTHING, *self._all(bound_s)])

    def _all(self, bound_s: float) -> Iterator[Found]:
        for search in self._searches.values():
            try:
                estimate = search.find(bound_s, compares=False).estimate
            except InfeasibleError:
                continue
            yield self.found(estimate)
        for form in self._grids.values():
            estimate = best(form, bound_s, plans=self.usual)
            if estimate is not None:
                yield self.found(estimate)

    def found(self, estimate: Any) -> Found:
        one = f"{policy(estimate.policy).title}: {controls_cell(estimate)}"
        return Found(self.count * estimate.figures.throughput_qps,
                     one if self.count == 1 else f"{self.count} copies of {one}")


class _Remembering:
    """A closed form with its grid, for several bounds in turn."""

    def __init__(self, name: str, problem: Problem, timing: Roofline) -> None:
        self.problem, self.timing = problem, timing
        self._form: Any = make_policy(name, problem, timing)
        self._known = RememberedPolicy(self._form.evaluate, self._form.limits if isinstance(
            self._form, QuicklyBounded) else None)
        self._grid: list[Any] | None = None
        self.evaluate, self.limits = self._known.evaluate, self._known.limits

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[Any]:
        if self._grid is None:
            self._grid = list(self._form.grid(max_queries, plans))
        return self._grid

    def estimate(self, config: Any) -> Any:
        return self._form.estimate(config)


class Drawn:
    """Configurations of all policies and numbers of copies, drawn at random, and their figures."""

    def __init__(self, parts: Sequence[ByHand], timing: Roofline, rng: np.random.Generator) -> None:
        self._of: list[tuple[ByHand, Any, list[Any], EstimateArrays]] = []
        names = [row.name for row in policies() if not (
            row.is_decoder_only and parts[0].problem.model.is_encoder_decoder)]
        groups: dict[tuple[int, str], int] = {}
        for _ in range(DRAWN):
            key = int(rng.integers(len(parts))), str(rng.choice(names))
            groups[key] = groups.get(key, 0) + 1
        for (place, name), count in sorted(groups.items()):
            part = parts[place]
            configs = [config for config in (
                draw(name, part, rng) for _ in range(count)) if config is not None]
            try:
                form = make_policy(name, part.problem, timing)
                self._of.append((part, form, configs, form.evaluate(configs)))
            except InputError:  # no two pools on these devices
                continue

    def best(self, bound_s: float) -> Found:
        found = [NOTHING]
        limits = Limits(queries=MOST_QUERIES, latency_s=bound_s)
        for part, form, configs, figures in self._of:
            if not configs:
                continue
            qps = np.where(admissible(figures, limits), figures.throughput_qps, 0.0)
            if (row := int(qps.argmax())) >= 0 and qps[row] > 0:
                found.append(part.found(form.estimate(configs[row])))
        return max(found)


def draw(name: str, part: ByHand, rng: np.random.Generator) -> Any:
    """A configuration; None where the part has no tensor plan at all."""
    if not part.plans:
        return None
    degree, gpus = part.plans[rng.integers(len(part.plans))]
    plan: dict[str, Any] = {"tp_degree": int(degree), "tp_gpus": int(gpus)}
    stages = part.problem.cluster.num_devices - gpus + gpus // degree
    batch, groups = _size(rng, 2048), int(rng.integers(1, 2 * stages + 1))
    if name == "rra":
        return RraConfig(
            encode_batch=batch, decode_iterations=_size(rng, part.problem.lengths.outputs.max),
            decode_micro_batches=None if rng.random() < 0.5 else groups,
            encode_chunk=0 if rng.random() < 0.5 else _size(rng, 8192, 64), **plan)
    if name in STATIC:
        parts = int(rng.integers(1, 9)) if name == "dsi" else None
        return StaticConfig(encode_batch=max(batch, groups), decode_micro_batches=groups,
                            encode_parts=parts, **plan)
    if name in CONTINUOUS:
        budget = 0 if name == "orca" else _size(rng, 8192, 32)
        return ContinuousConfig(max_active=batch, token_budget=budget, **plan)
    return WaaConfig(encode_batch=_size(rng, 256), decode_micro_batches=groups, **plan)


def _size(rng: np.random.Generator, most: int, least: int = 1) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


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
    lines = ["# Best by hand", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), "",
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
    header = (
        "problem", "bound s", "queries/s", "chosen", "upper bound", "by hand", "how",
              "drawn", "ratio", "s",
        "s with margin")
    return [*lines, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}",
            *map(line_of, rows), "",
            f"One thread of {cpu()}, {datetime.date.today()}. *by hand*: the best of any policy at "
            f"its best, any number of copies; *drawn*: of {DRAWN:,} configurations at random."]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="*", default=[],
                        help="those whose model/cluster/task contains one of these")
    parser.add_argument("--hand", type=Path, metavar="FILE",
                        help="what is found by hand: kept there, and taken from there")
    parser.add_argument("--hand-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chosen = [one for one in SCENARIOS if not arguments.scenarios
              or any(part in one.name for part in arguments.scenarios)]
    if arguments.hand_only:
        for one in chosen:
            print(one.name, kept_by_hand(one, arguments.hand), flush=True)
        return
    rows = [row for one in chosen for row in rows_of(one, arguments.hand)]
    text = "\n".join(page(rows))
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"best-by-hand-{datetime.date.today()}.md"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
