"""The paper's scenarios under four latency bounds each: the schedule found, and its gain over FT.

    python benchmarks/scenarios.py [--scenarios opt-13b ...] [--limit N] [--out benchmarks/results]

FT is run as the paper runs it: tensor parallelism within a machine, its best batch and
micro-batches for which an output of *maximum* length meets the bound (7.1). "Gain" is over that.
The second gain is over FT at its best: any tensor-parallel plan, and judged like ours, by the
length at the 99th percentile. A40 scenarios are run twice, with and without
peer access between the cards.
Seconds are the processor's, of one thread.
"""

from __future__ import annotations

import os

from runner import cpu, options, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from paper_scenarios import Scenario, bounds_of, ft_plan, scenarios

from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.search_planner import SearchPlanner
from xsimulator.rough.formulas import Formulas

POLICIES = ("rra", "waa-c", "waa-m")
# Sections 7.3 and 7.4: mean gain, and its range
PAPER = {"small and mid-sized (S, T, C1)": "2.0, at most 5.4",
         "large (G, C1, C2)": "3.2, 1.1 to 15.2", "large, infinite bound": "2.2",
         "all": "2.9, at most 15.2"}
# Scenarios taken apart: where the gain comes from
CASES = (("opt-13b/a40-4/S", 3), ("gpt3-39b/a40-16/S", 0), ("gpt3-39b/a40-16/T", 3),
         ("gpt3-101b/a100-16/S", 3), ("gpt3-101b/a100-16/G", 0), ("gpt3-175b/a40-32/G", 0))
# What the paper's text and its Table 6 say of bounds and of FT's longest latency, seconds
PAPER_BOUNDS = (("opt-13b/a40-4/S", (3.1, 5.9, 11.5), None),
                ("gpt3-39b/a40-16/S", (9.8,), 47.0))
SECTIONS = {"PCIe with peer access (as the paper's nodes seem to have)": True,
            "PCIe without peer access (the catalog's A40 node)": False}
EXPLANATION = ("""## Where we differ from the paper, and why

- *The link decides FT's figures on A40.* The roofline's PCIe is that of an A40 node whose cards
  copy through the host's memory: all-reduces then take two thirds to five sixths of FT's time in
  the cases above, and its bounds are 1.7 to 2.8 times those that the paper names. With peer
  access, four times as quick, the tightest bounds that the paper names come out within 2 %
  (OPT-13B and S: 3.1 s; GPT-3 39B and S: 9.7 s for 9.8 s), and so does its case of the largest
  gain among smaller models: WAA, 5.4 times FT at 7.8 s there, 5.9 times at 8.6 s here. The first
  section is therefore the comparison, the second what such a node without peer access would see.
- *GPT-3 39B gains more than in the paper*, at every task and bound; without it the smaller models'
  mean is near the paper's. FT spends two thirds of its time in all-reduces over eight cards there,
  and without a bound it takes nearly half as long again as in the paper: our link is still slow
  for that degree, which flatters us. Over FT with the best tensor plan it is 1.9 to 3.2.
- *FT's plan is fixed by hand, and its bound is stricter.* It must meet the bound with an output of
  maximum length, we with one of the 99th percentile. Where a query's time hardly depends on the
  batch, as at the tightest bounds of large models, that costs FT most of its batch: it is the
  factor "99th pctl for maximum". The paper's 15.2 (GPT-3 175B and G, tightest bound) is of this
  kind. Our FT has a batch of 12 there and we gain 4.5; at its smallest batch of 4 it would be 10.8.
- *What is the schedule's own* is in the last two factors of the products: leaving early and
  refilling (RRA) instead of FT's full batches, then the better policy.
- *WAA is chosen more often than in the paper*, without a bound too: in the paper OPT-13B with S
  goes over to RRA, and WAA does not fit GPT-3 175B at all. Our WAA may use any tensor plan that
  memory admits, and its formula reserves memory for the queries in the system alone.
- *Times are the roofline's*, one set of kernels for FT and for us, and nobody's measurement.""",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search answered. `estimate` None: nothing meets the bound."""

    estimate: Estimate | None
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario under one bound. `ft`: as the paper runs it; `ft_best`: at its best."""

    scenario: Scenario
    bound_s: float
    ft: Estimate | None
    ft_best: Estimate | None
    found: Found

    @property
    def gain(self) -> float:
        """Over FT; NaN where either meets no bound."""
        return _ratio(self.found.estimate, self.ft)

    @property
    def gain_best(self) -> float:
        return _ratio(self.found.estimate, self.ft_best)


def best_schedule(problem: Problem, timing: TimingSource, policies: tuple[str, ...] = POLICIES,
                  plan: tuple[int, int] | None = None) -> Found:
    """The best schedule of one copy by these policies, by this tensor plan if one is given, and
    what it took to find it; all without a margin."""
    degree, gpus = plan or (None, None)
    fixed = replace(problem.fixed, policies=policies, replicas=1, tp_degree=degree, tp_gpus=gpus)
    began = time.process_time()
    planner = SearchPlanner(replace(problem, fixed=fixed), timing, is_brief=True)
    try:
        estimate = planner.best(problem.constraint.latency_s, has_margin=False).estimate
    except InfeasibleError:
        estimate = None
    return Found(estimate=estimate, nodes=planner.nodes, seconds=time.process_time() - began)


def row_of(scenario: Scenario, timing: TimingSource, bound_s: float) -> Row:
    problem = scenario.problem(bound_s)
    return Row(
        scenario=scenario, bound_s=bound_s,
        ft=best_schedule(scenario.problem(bound_s, quantile=1.0), timing, ("ft",),
                         ft_plan(problem.cluster)).estimate,
        ft_best=best_schedule(problem, timing, ("ft",)).estimate,
        found=best_schedule(problem, timing))


def table(rows: Sequence[Row]) -> list[str]:
    lines = ["| model, cluster, task | bound s | policy | B_E | N_D | G | TP | requests/s "
             "| latency s | FT | gain | FT at its best | gain | s | nodes |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    return lines + [_line_of(row) for row in rows]


def _line_of(row: Row) -> str:
    e, scenario = row.found.estimate, row.scenario
    own = (
        "none | | | | | | "
        if e is None
        else f"{e.policy} | {e.figures.encode_batch} | "
        f"{e.figures.decode_iterations if e.policy == 'rra' else ''} "
        f"| {e.deployment.num_groups} | {e.deployment.tp_degree}x{e.deployment.tp_gpus} "
        f"| {e.figures.throughput_qps:.3g} "
        f"| {e.figures.latency_s:.3g}"
    )
    return (f"| {scenario.model}, {scenario.cluster}, {scenario.task} | {_seconds(row.bound_s)} "
            f"| {own} | {_qps(row.ft)} | {_gain(row.gain)} | {_qps(row.ft_best)} "
            f"| {_gain(row.gain_best)} | {row.found.seconds:.2f} | {row.found.nodes:,} "
            "|")


def summary(rows: Sequence[Row]) -> list[str]:
    """Beside the paper's figures. Bounds that FT does not meet have no gain, and are counted."""
    groups = {
        "small and mid-sized (S, T, C1)": [r for r in rows if r.scenario.is_small],
        "large (G, C1, C2)": [r for r in rows if r.scenario.is_large],
        "large, infinite bound": [r for r in rows
                                  if r.scenario.is_large and math.isinf(r.bound_s)],
        "all": list(rows)}
    lines = ["| scenarios | paper: gain | mean | geometric | least | most | FT at its best: mean "
             "| least | most | bounds that FT misses | that we miss |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    for name, group in groups.items():
        gains, best = (np.array([g for g in values if not math.isnan(g)]) for values in (
            [r.gain for r in group], [r.gain_best for r in group]))
        if not len(gains) or not len(best):
            continue
        lines.append(
            f"| {name} | {PAPER[name]} | {gains.mean():.1f} | {np.exp(np.log(gains).mean()):.1f} "
            f"| {gains.min():.1f} | {gains.max():.1f} | {best.mean():.1f} | {best.min():.1f} "
            f"| {best.max():.1f} | {sum(r.ft is None for r in group)} of {len(group)} "
            f"| {sum(r.found.estimate is None for r in group)} |")
    return lines


def search_summary(rows: Sequence[Row]) -> str:
    seconds = np.array([row.found.seconds for row in rows])
    wins = {name: sum(row.found.estimate is not None and row.found.estimate.policy == name
                      for row in rows) for name in POLICIES}
    return (f"Searches: median {np.median(seconds):.2f} s, longest {seconds.max():.2f} s, "
            f"{(seconds < 1).sum()} of {len(rows)} under 1 s. Chosen: "
            + ", ".join(f"{name} {count}" for name, count in wins.items()) + ".")


def decomposition(rows: Sequence[Row]) -> list[str]:
    """The gain of some rows as a product: a bound at the 99th percentile instead of the maximum,
    the tensor plan, leaving early and refilling (RRA), and the better of RRA and WAA; with FT's
    share of time in collectives."""
    lines = ["| scenario | bound s | FT's time in collectives | gain | = 99th pctl for maximum "
             "| x any plan | x RRA for FT | x best policy |", "|---|---|---|---|---|---|---|---|"]
    of_name: dict[str, list[Row]] = {}
    for row in rows:
        of_name.setdefault(row.scenario.name, []).append(row)
    for name, place in CASES:
        if len(of_name.get(name, ())) > place:
            lines.append(_factors(of_name[name][place]))
    return lines


def _factors(row: Row) -> str:
    scenario, bound_s = row.scenario, row.bound_s
    timing, problem = scenario.timing(), scenario.problem(bound_s)
    same_plan = best_schedule(problem, timing, ("ft",), ft_plan(problem.cluster)).estimate
    rra = best_schedule(problem, timing, ("rra",)).estimate
    steps = [(same_plan, row.ft), (row.ft_best, same_plan), (rra, row.ft_best),
             (row.found.estimate, rra)]
    return (f"| {scenario.name} | {_seconds(bound_s)} | {_collectives(row):.0%} "
            f"| {_gain(row.gain)} | " + " | ".join(_gain(_ratio(*step)) for step in steps) + " |")


def _collectives(row: Row) -> float:
    """Share of the period of FT's best that goes if all-reduces cost nothing."""
    if row.ft is None:
        return math.nan
    timing, problem = row.scenario.timing(), row.scenario.problem(row.bound_s, quantile=1.0)
    free = replace(timing.constants, synchronisation_s=((2, 0.0),), **{
        kind: replace(getattr(timing.constants, kind), launch_s=0.0, hop_share=0.0,
                      large_launch_s=0.0, all_reduce_shares=((2, math.inf),))
        for kind in ("nvlink", "pcie")})
    own, without = (Formulas(problem, times).of("ft").of_estimate(row.ft)["period_s"]
                    for times in (timing, Roofline(problem.model, problem.cluster.device,
                                                   problem.dtype, free)))
    return 1 - without / own


def bounds_beside(rows: Sequence[Row]) -> list[str]:
    """Our bounds and FT's longest latency beside those that the paper's text names."""
    lines = []
    for name, bounds, longest in PAPER_BOUNDS:
        own = [row for row in rows if row.scenario.name == name]
        if not own:
            continue
        told = ", ".join(f"{bound:.3g}" for bound in bounds)
        slowest = own[-1].ft
        lines.append(
            f"- {name}: ours {', '.join(_seconds(row.bound_s) for row in own)}; "
            f"paper: {told}" + ("" if longest is None or slowest is None else
                                f"; FT unbounded: ours {slowest.figures.latency_s:.3g} s, "
                                f"paper {longest:g} s"))
    return lines


def _ratio(one: Estimate | None, other: Estimate | None) -> float:
    return (
        math.nan
        if one is None or other is None
        else one.figures.throughput_qps / other.figures.throughput_qps
    )


def _gain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _qps(estimate: Estimate | None) -> str:
    return "none" if estimate is None else f"{estimate.figures.throughput_qps:.3g}"


def _seconds(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.3g}"


def run(chosen: Sequence[Scenario], limit: int | None = None) -> list[Row]:
    """Rows of these scenarios, the bounds of each from tight to none; at most `limit` rows."""
    rows: list[Row] = []
    for scenario in chosen:
        timing, problem = scenario.timing(), scenario.problem()
        for bound_s in bounds_of(problem, timing):
            if limit is not None and len(rows) >= limit:
                return rows
            rows.append(row_of(scenario, timing, bound_s))
            print(_line_of(rows[-1]), flush=True)
    return rows


def section(title: str, rows: Sequence[Row], same: Sequence[Row] = ()) -> list[str]:
    """`same`: rows of an earlier section that hold here too; they count, and are not repeated."""
    if not rows:
        return []
    return [f"## {title}", "", *summary([*rows, *same]), "", search_summary(rows), "",
            *table(rows), "", "Where the gain comes from, as a product of throughput ratios:", "",
            *decomposition(rows), "", *bounds_beside(rows), ""]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--scenarios", nargs="*", default=[],
                        help="those whose model/cluster/task contains one of these")
    parser.add_argument("--limit", type=int, help="rows of each section at most")
    arguments = parser.parse_args()
    lines, same = ["# The paper's scenarios", ""], list[Row]()
    for title, peer in SECTIONS.items():
        chosen = [s for s in scenarios(has_peer_access=peer)
                  if not arguments.scenarios or any(part in s.name for part in arguments.scenarios)]
        known = {row.scenario.name for row in same}
        new = run([s for s in chosen if s.name not in known], arguments.limit)
        lines += section(title, new, same)
        same = [row for row in new if not row.scenario.has_pcie]  # not concerned
    lines += [*EXPLANATION, "", f"One thread of {cpu()}, {today()}."]
    text = "\n".join(lines)
    write("scenarios", text, arguments.out)


if __name__ == "__main__":
    main()
