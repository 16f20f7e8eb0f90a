"""Figures and tables of the paper's evaluation anew, beside the paper's own statements.

    python benchmarks/scenarios.py [--only 6 7 9 10 11 table7] [--data FOLDER]
        [--out benchmarks/results]

Every record is written to scenarios.json as soon as it is made, and one that is there is not made
again: delete the file to make all anew. Part 6 has Figures 6 and 8: throughput under four latency
limits over that of FT. FT is run as the paper runs it: tensor parallelism within a machine, its
best batch for which an output of *maximum* length keeps to the limit (section 7.1). The paper's
schedules (`paper_policies`) are RRA and WAA of whole batches on one replica. `with_chunks` may also
prefill beside decoding, and `every_policy` adds continuous batching and replicas. Part 10 needs
`--data`: a folder with wmt/ and sharegpt/ in it, files of request lengths.
"""

from __future__ import annotations

import os

from runner import about, cpu, options, table, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paper_figures as figures
from paper_scenarios import (
    BOUNDS,
    LARGE,
    LARGE_TASKS,
    PAPERS,
    SMALL,
    SMALL_TASKS,
    Found,
    Scenario,
    best_schedule,
    scenarios,
)

from xgpt.core.schedule_file import write_json
from xscheduler.ft_latency import ft_plan

Record = dict[str, Any]
Tasks = dict[str, Callable[[], Record]]
NAME = "scenarios"
# Sections 7.3 and 7.4: mean gain, and its range
PAPER = {"small and mid-sized (S, T, C1)": "2.0, at most 5.4",
         "large (G, C1, C2)": "3.2, 1.1 to 15.2", "large, no limit": "2.2",
         "all": "2.9, at most 15.2"}
OURS = ("rra", "paper_policies", "with_chunks", "every_policy")


def gain_record(scenario: Scenario, bound: str) -> Record:
    """Throughput in requests/s of FT and of the best schedules of OURS under one limit."""
    bound_s, timing = scenario.bounds()[bound], scenario.timing()
    problem = scenario.problem(bound_s)
    plan = ft_plan(problem)
    found = {
        "ft": best_schedule(scenario.problem(bound_s, 1.0), timing, ("ft",), plan),
        "ft_p99": best_schedule(problem, timing, ("ft",), plan),
        "ft_any_plan": best_schedule(problem, timing, ("ft",)),
        "rra": best_schedule(problem, timing, ("rra",), has_chunks=False),
        "paper_policies": best_schedule(problem, timing, PAPERS, has_chunks=False),
        "with_chunks": best_schedule(problem, timing, PAPERS),
        "every_policy": best_schedule(problem, timing, (), replicas=None)}
    return {"bound_s": bound_s} | {name: described(one) for name, one in found.items()}


def described(found: Found) -> Record | None:
    """The figures of a schedule that stand in scenarios.json."""
    e = found.estimate
    return None if e is None else {
        "policy": e.policy, "throughput_qps": e.figures.throughput_qps,
        "latency_s": e.figures.latency_s, "replicas": e.deployment.replicas,
        "tp_degree": e.deployment.tp_degree, "tp_gpus": e.deployment.tp_gpus,
        "encode_batch": e.figures.encode_batch,
        "decode_iterations": e.figures.decode_iterations, "search_s": round(found.seconds, 2)}


def gain(record: Record, ours: str, over: str = "ft") -> float:
    """Throughput over that of FT; NaN if either keeps no limit."""
    one, other = record[ours], record[over]
    return math.nan if one is None or other is None else (
        one["throughput_qps"] / other["throughput_qps"])


def gain_page(records: Mapping[str, Record]) -> list[str]:
    """Figures 6 and 8: the gains of groups of scenarios, then every scenario and limit."""
    def is_of(name: str, rows: tuple[tuple[str, str], ...], tasks: tuple[str, ...]) -> bool:
        model, cluster, task, _ = name.split("/")
        return (model, cluster) in rows and task in tasks

    large = [name for name in records if is_of(name, LARGE, LARGE_TASKS)]
    groups = {"small and mid-sized (S, T, C1)": [
                  name for name in records if is_of(name, SMALL, SMALL_TASKS)],
              "large (G, C1, C2)": large,
              "large, no limit": [name for name in large if name.endswith("/inf")],
              "all": [*records]}
    lines = table(("scenarios", "policies", "paper: gain", "mean", "geometric mean", "least",
                   "most", "over FT with any plan: mean", "most", "limits that FT misses"))
    for title, names in groups.items():
        for ours in OURS:
            gains, best = (np.array([value for name in names if not math.isnan(
                value := gain(records[name], ours, over))]) for over in ("ft", "ft_any_plan"))
            if len(gains) and len(best):
                missed = sum(records[name]["ft"] is None for name in names)
                lines.append(
                    f"| {title} | {ours} | {PAPER[title]} | {gains.mean():.1f} "
                    f"| {np.exp(np.log(gains).mean()):.1f} | {gains.min():.1f} | {gains.max():.1f} "
                    f"| {best.mean():.1f} | {best.max():.1f} | {missed} of {len(names)} |")
    head = ("scenario", "limit s", "FT", "FT, P99", "FT, any plan", "RRA", "paper's policies",
            "with chunks", "every policy", "gain of the paper's", "B_E", "N_D", "TP", "latency s")
    lines += ["", *table(head)]
    for name, record in records.items():
        cells = [_cell(record[key]) for key in ("ft", "ft_p99", "ft_any_plan", *OURS)]
        own = record["paper_policies"]
        controls = ["", "", "", ""] if own is None else [
            str(own["encode_batch"]),
            str(own["decode_iterations"]) if own["policy"] == "rra" else "",
            f"{own['tp_degree']}x{own['tp_gpus']}", f"{own['latency_s']:.3g}"]
        lines.append(f"| {name} | {float(record['bound_s']):.3g} | {' | '.join(cells)} "
                     f"| {gain(record, 'paper_policies'):.2f} | {' | '.join(controls)} |")
    return lines


def _cell(found: Record | None) -> str:
    return "none" if found is None else (
        f"{found['throughput_qps']:.3g}" + ("" if found["policy"] == "ft" else
                                            f" {found['policy']}"))


def tasks(data: Path | None) -> dict[str, Tasks]:
    """{part: {key: what makes its record}}."""
    return {"6": {f"{one.name}/{bound}": partial(gain_record, one, bound)
                  for one in scenarios() for bound in BOUNDS},
            "7": figures.system_tasks(), "table7": figures.scatter_tasks(),
            "9": figures.memory_tasks(), "11": figures.drift_tasks(),
            "10": {} if data is None else figures.data_set_tasks(data)}


PAGES: Mapping[str, tuple[str, Callable[[Mapping[str, Record]], list[str]]]] = {
    "6": ("Figures 6 and 8: throughput over FT", gain_page),
    "7": ("Figure 7: FT, DSI, ORCA and vLLM's rule of 2023, OPT-13B on four A40",
          figures.system_page),
    "table7": ("Table 7: scatter of stage times, OPT-13B, task S", figures.scatter_page),
    "9": ("Figure 9: memory of WAA's pools, no limit", figures.memory_page),
    "11": ("Figure 11: other output lengths than planned, OPT-13B, task T",
           figures.drift_page),
    "10": ("Figure 10: lengths estimated from a tenth of a data set", figures.data_set_page)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[*PAGES], choices=[*PAGES], metavar="PART")
    parser.add_argument("--data", type=Path, metavar="FOLDER",
                        help="with wmt/ and sharegpt/ in it, for part 10")
    asked = parser.parse_args()
    path = None
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        path = asked.out / f"{NAME}.json"
    known: dict[str, dict[str, Record]] = (
        json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {})
    for part, own in tasks(asked.data).items():
        for key, make in own.items() if part in asked.only else ():
            if key not in known.setdefault(part, {}):
                known[part][key] = make()
                print(part, key, flush=True)
                if path is not None:
                    write_json(path, known)
    lines = ["# The paper's figures and tables", "", about(__doc__), ""]
    for part, (title, page) in PAGES.items():
        if known.get(part):
            lines += [f"## {title}", "", *page(known[part]), ""]
    write(NAME, "\n".join([*lines, f"One thread of {cpu()}, {today()}."]), asked.out)


if __name__ == "__main__":
    main()
