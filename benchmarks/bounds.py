"""Three latency bounds: what `policy: auto` chooses for each, run, beside each policy that xgpt
searches and a static batch, each in its best configuration that keeps the bound, by the same ranks
and kernels.

    python benchmarks/bounds.py FOLDER [--turns 3] [--ranks 2] [--most 8]
        [--out benchmarks/results]

32 queries of forced lengths (inputs about N(64, 40) on [1, 140], outputs about N(32, 15) on
[1, 80]), all there at the start. The bounds are two fifths, three fifths and twice the latency of
what auto chooses without a bound, for 99 % of all queries. Every configuration is planned from one
profile, measured first, with the same confidence; what counts is what the runs measured. They are
run in turns: every policy under every bound once, then all again. FOLDER keeps what was run: the
same command goes on, and `--most` ends it after so many runs. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from several_runs import Run, SeveralRuns, range_words
from workload import draw

MODEL = "smollm2-135m"
QUERIES = 32
FACTORS = (0.4, 0.6, 2.0)
AUTO = "auto"
POLICIES = (AUTO, "rra", "waa-c", "sarathi", "vllm", "orca", "ft")


class Row(NamedTuple):
    bound_s: float
    policy: str
    runs: list[Run]  # none: no configuration keeps the bound

    @property
    def measured_qps(self) -> float:
        return statistics.median(run.metrics["throughput_qps"]["measured"] for run in self.runs)

    @property
    def kept(self) -> int:
        """In how many of its runs 99 % of the queries kept the bound."""
        return sum(run.metrics["latency_p99_s"]["measured"] <= self.bound_s for run in self.runs)

    @property
    def keeps(self) -> bool:
        return bool(self.runs) and 2 * self.kept > len(self.runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, help="runs, after which it ends")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    several = SeveralRuns(arguments.folder)
    job = job_of(arguments.folder, arguments.ranks)
    bounds = bounds_of(several, arguments.folder, job)
    several.submit(((name_of(bound_s, policy), turn, with_bound(job, bound_s, policy))
                    for turn in range(1, arguments.turns + 1) for bound_s in bounds
                    for policy in POLICIES), most=arguments.most)
    rows = [Row(bound_s, policy, runs) for bound_s in bounds for policy in POLICIES
            if (runs := several.runs(name := name_of(bound_s, policy)))
            or several.keeps_no_bound(name)]
    text = table(rows, arguments.ranks)
    print(text)
    if arguments.out is not None:
        device = next(run for one in rows for run in one.runs).metrics["machine"]["device"]
        path = arguments.out / f"bounds-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def job_of(folder: Path, ranks: int) -> dict[str, Any]:
    """The job but for its bound and policy; its requests are written to the folder."""
    rng = np.random.default_rng(20261121)
    inputs, outputs = draw(rng, 64, 40, 140)[:QUERIES], draw(rng, 32, 15, 80)[:QUERIES]
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"id": f"r{i:03d}", "tokens": rng.integers(100, 30_000, size=n).tolist(),
                    "forced_tokens": m}) + "\n"
        for i, (n, m) in enumerate(zip(inputs, outputs, strict=True))), encoding="utf-8")
    return {"model": MODEL, "cluster": "local",
            "workload": {"requests": str((folder / "requests.jsonl").absolute()),
                         "input_tokens": "from_requests",
                         "output_tokens": {"mean": float(np.mean(outputs)),
                                           "std": float(np.std(outputs)), "max": max(outputs)}},
            "run": {"ranks": ranks, "dtype": "bfloat16", "weights": "random"}}


def bounds_of(several: SeveralRuns, folder: Path, job: dict[str, Any]) -> list[float]:
    """Seconds; of one search without a bound, which measures the profile."""
    kept = folder / "free.json"
    if not kept.is_file():
        place = folder / "free.yaml"
        place.write_text(json.dumps(with_bound(job, math.inf, AUTO)), encoding="utf-8")
        done = several.xgpt("schedule", str(place), "--json")
        if done.returncode != 0:
            sys.exit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
        kept.write_text(done.stdout, encoding="utf-8")
    latency_s = json.loads(kept.read_text(encoding="utf-8"))["latency_s"]
    return [round(factor * latency_s, 3) for factor in FACTORS]


def with_bound(job: dict[str, Any], bound_s: float, policy: str) -> dict[str, Any]:
    bound = "inf" if math.isinf(bound_s) else bound_s
    return {**job, "schedule": {"policy": policy},
            "constraint": {"latency_s": bound, "kind": "queries", "quantile": 0.99}}


def name_of(bound_s: float, policy: str) -> str:
    return f"{bound_s:g}s-{policy}"


def row(one: Row) -> str:
    if not one.runs:
        return f"| {one.bound_s:.2f} | {one.policy} | none keeps the bound | | | | | | |"
    predicted = [statistics.median(run.metrics[key]["predicted"] for run in one.runs)
                 for key in ("throughput_qps", "latency_p99_s")]
    qps, p99 = ([run.metrics[key]["measured"] for run in one.runs]
                for key in ("throughput_qps", "latency_p99_s"))
    others = max(run.metrics.get("others_cpu_share") or 0.0 for run in one.runs)
    return (f"| {one.bound_s:.2f} | {one.policy} | {range_words(run.words for run in one.runs)} | "
            f"{predicted[0]:.2f} | {' '.join(f'{value:.2f}' for value in qps)} | "
            f"{one.measured_qps:.2f} | {predicted[1]:.2f} | "
            f"{' '.join(f'{value:.2f}' for value in p99)}, kept {one.kept} of {len(one.runs)} | "
            f"{others:.0%} |")


def table(rows: list[Row], ranks: int) -> str:
    first = next(one.runs[0].metrics for one in rows if one.runs)
    lines = [
        f"# Three latency bounds, {MODEL} ({first['model_source']}), {first['machine']['device']}, "
        f"{ranks} ranks, {first['dtype']}", "",
        f"{first['date'][:10]}. {(__doc__ or '').split(chr(10) * 2)[2]}", "",
        "| bound (s) | policy | configuration | predicted queries/s | measured, each run | median |"
        " predicted P99 | measured P99 of each run | others |", "|" + 9 * "---|",
        *map(row, rows), ""]
    return "\n".join([*lines, *(f"- {_verdict([one for one in rows if one.bound_s == bound_s])}"
                                for bound_s in dict.fromkeys(one.bound_s for one in rows))])


def _verdict(rows: list[Row]) -> str:
    """Auto beside the best of the others, of those that kept the bound in most of their runs."""
    head = f"Bound {rows[0].bound_s:.2f} s: "
    auto = next((one for one in rows if one.policy == AUTO), None)
    kept = [one for one in rows if one.keeps and one is not auto]
    if auto is None or not auto.keeps or not kept:
        return head + (f"kept in most runs by {', '.join(r.policy for r in rows if r.keeps)}."
                       if any(r.keeps for r in rows) else "kept in most runs by none.")
    best = max(kept, key=lambda one: one.measured_qps)
    return head + (f"auto at {auto.measured_qps / best.measured_qps:.2f} times the throughput of "
                   f"the best of the others that kept it ({best.policy}).")


if __name__ == "__main__":
    main()
