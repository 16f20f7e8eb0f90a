"""Predicted against measured, schedule by schedule: RRA and WAA, tensor parallelism on some or all
ranks, micro-batches, two to four ranks, three models.

    python benchmarks/predicted_measured.py [--runs 2] [--only TEXT] [--out benchmarks/results]

Each row is one `xgpt submit` of synthetic requests under a schedule that the job fixes; what is
predicted is the whole job, from a profile that is measured anew before the first case of each
model, number of ranks and degrees (`--cached`: from the one in the cache, whatever the machine has
become since). The machine must be otherwise idle: the last column is the share
of the cores that others used. Four ranks on two cores share them: docs/times.md.

Columns: throughput and 99th-percentile latency, measured / predicted; then the makespan taken
apart (docs/simulate.md): what the run's own output lengths, its step times, and the rest made of
it. "rest" is also how far the replay is off that is fed with the run's lengths and stage times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from runner import options, write

QUERIES = 96
INPUTS = {"mean": 96, "std": 50, "max": 200}
OUTPUTS = {"mean": 48, "std": 24, "max": 120}
WORST_THROUGHPUT, WORST_LATENCY = 0.10, 0.15  # at the median, by which a prediction may be off
_XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]


class Case(NamedTuple):
    model: str
    ranks: int
    schedule: dict[str, Any]

    @property
    def name(self) -> str:
        s = self.schedule
        words = [s["policy"], f"encode_batch {s['encode_batch']}"]
        if "decode_iterations" in s:
            words.append(f"decode_iterations {s['decode_iterations']}")
        if "decode_micro_batches" in s:
            words.append(f"{s['decode_micro_batches']} micro-batches")
        if s["tp_degree"] > 1:
            words.append(f"tp {s['tp_degree']} on {s['tp_gpus']} ranks")
        return ", ".join(words)


def rra(model: str, ranks: int, batch: int, iterations: int, *, groups: int | None = None,
        tp: tuple[int, int] = (1, 0)) -> Case:
    grouped = {} if groups is None else {"decode_micro_batches": groups}
    return Case(model, ranks, {"policy": "rra", "encode_batch": batch, **grouped,
                               "decode_iterations": iterations, "tp_degree": tp[0],
                               "tp_gpus": tp[1]})


def waa(model: str, ranks: int, batch: int, groups: int, *, tp: tuple[int, int] = (1, 0)) -> Case:
    return Case(model, ranks, {"policy": "waa-c", "encode_batch": batch, "tp_degree": tp[0],
                               "tp_gpus": tp[1], "decode_micro_batches": groups})


CASES = (
    rra("smollm2-135m", 2, 16, 16),
    rra("smollm2-135m", 2, 24, 40, groups=4),
    rra("smollm2-135m", 2, 4, 4),
    waa("smollm2-135m", 2, 1, 1),
    waa("smollm2-135m", 2, 1, 2),
    rra("smollm2-135m", 4, 16, 16),
    waa("smollm2-135m", 3, 1, 2),
    rra("opt-125m", 2, 16, 16),
    rra("opt-125m", 2, 16, 16, groups=1, tp=(2, 2)),
    rra("opt-125m", 3, 16, 16, tp=(2, 2)),
    rra("opt-125m", 4, 16, 24, tp=(2, 2)),
    waa("opt-125m", 2, 1, 2),
    rra("t5-small", 2, 16, 16),
    rra("t5-small", 2, 32, 40, groups=4),
    rra("t5-small", 2, 16, 16, groups=1, tp=(2, 2)),
    waa("t5-small", 2, 1, 2),
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose model and name hold this")
    parser.add_argument("--cached", action="store_true", help="measure no profile anew")
    arguments = parser.parse_args()
    cases = [c for c in CASES if arguments.only in f"{c.model} {c.ranks} {c.name}"]
    found: list[tuple[Case, list[dict[str, Any]]]] = []
    measured: set[tuple[object, ...]] = set()
    for case in cases:
        key = (case.model, case.ranks, case.schedule["tp_degree"])
        if key not in measured and not arguments.cached:
            xgpt("profile", case, "--again")
        measured.add(key)
        found.append((case, [one_run(case) for _ in range(arguments.runs)]))
        print(row(*found[-1]), flush=True)
    text = table(found)
    write("predicted", text, arguments.out)


def one_run(case: Case) -> dict[str, Any]:
    """metrics.json of one submit."""
    metrics: dict[str, Any] = json.loads(xgpt("submit", case, "--json"))
    return metrics


def xgpt(command: str, case: Case, *options: str) -> str:
    """What the command prints for the case's job."""
    job = {"name": "predicted", "model": case.model, "cluster": "local",
           "workload": {"requests": {"count": QUERIES}, "input_tokens": INPUTS,
                        "output_tokens": OUTPUTS},
           "schedule": case.schedule,
           "run": {"ranks": case.ranks, "dtype": "bfloat16",
                   "weights": "random"}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump({**job, "output": str(Path(folder) / "out")}))
        done = subprocess.run([*_XGPT, command, str(path), *options], capture_output=True,
                              text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{case.model}, {case.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def ratio(metrics: dict[str, Any], key: str) -> float:
    return float(metrics[key]["measured"] / metrics[key]["predicted"])


def row(case: Case, runs: list[dict[str, Any]]) -> str:
    parts = []
    for to, origin in (("with_lengths_s", "predicted_s"), ("with_times_s", "with_lengths_s"),
                       ("measured_s", "with_times_s")):
        parts.append(statistics.median(r["attribution"][to] / r["attribution"][origin]
                                       for r in runs))
    throughput, latency = ([ratio(r, key) for r in runs]
                           for key in ("throughput_qps", "latency_p99_s"))
    others = max(r.get("others_cpu_share") or 0.0 for r in runs)
    qps = statistics.median(r["throughput_qps"]["measured"] for r in runs)
    return (f"| {case.model} | {case.ranks} | {case.name} | {qps:.2f} | "
            f"{_each(throughput)} | {_each(latency)} | "
            + " | ".join(f"{100 * (p - 1):+.0f} %" for p in parts) + f" | {others:.0%} |")


def _each(values: list[float]) -> str:
    return " ".join(f"{v:.2f}" for v in values)


def table(found: list[tuple[Case, list[dict[str, Any]]]]) -> str:
    first = found[0][1][0]
    lines = [
        f"# Predicted against measured, {first['machine']['device']}, bfloat16", "",
        f"{QUERIES} queries, inputs of {INPUTS['mean']} and outputs of {OUTPUTS['mean']} tokens in "
        f"the mean; {first['date'][:10]}. Ratios are measured / predicted, one figure a run.", "",
        "| model | ranks | schedule | request/s | throughput | P99 latency | lengths | step times |"
        " rest | others |", "|---|---|---|---|---|---|---|---|---|---|"]
    lines += [row(case, runs) for case, runs in found]
    for key, allowed in (("throughput_qps", WORST_THROUGHPUT), ("latency_p99_s", WORST_LATENCY)):
        off = [abs(statistics.median(ratio(r, key) for r in runs) - 1) for _, runs in found]
        worst = max(off)
        lines += ["", f"{key}: off by {statistics.median(off):.1%} at the median of "
                  f"{len(found)} schedules (wanted: {allowed:.0%}), {worst:.1%} at worst."]
    rests = [abs(r["attribution"]["measured_s"] / r["attribution"]["with_times_s"] - 1)
             for _, runs in found for r in runs]
    lines += ["", "A replay with the run's lengths and stage times is off by "
              f"{statistics.median(rests):.1%} at the median, {max(rests):.1%} at worst "
              "(wanted: 5 %)."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
