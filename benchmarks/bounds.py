"""Three latency bounds: the schedule that xgpt finds for each, run, beside the best configuration
of FT, ORCA and vLLM-style continuous batching that keeps it, run by the same ranks and kernels.

    python benchmarks/bounds.py [--workload FILE] [--ranks 2] [--only POLICY] [--out FOLDER]

FILE holds lines {"input_ids": [...], "output_len": N}; without it 200 requests of the same law are
drawn (inputs about N(128, 81) on [1, 256], outputs about N(64, 30) on [1, 160]). All queries are
there at the start, every one gives exactly its number of tokens. The bounds are a quarter, half and
twice the latency of the schedule without a bound, for 99 % of all queries. Every configuration is
planned from the same profile with the same confidence; what counts is what the run measured. The
machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from workload import draw

MODEL = "smollm2-135m"
FACTORS = (0.25, 0.5, 2.0)
OURS = ("rra", "waa-c")
BASELINES = ("ft", "orca", "vllm")
_XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]


class Run(NamedTuple):
    bound_s: float
    policy: str
    controls: str  # empty where no configuration keeps the bound
    metrics: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help="one policy")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_job(folder, arguments.workload, arguments.ranks)
        free = schedule(job, math.inf, "rra")
        assert free is not None, "without a bound there is a schedule"
        print(f"without a bound: {controls(free)}, {free['latency_s']:.2f} s", flush=True)
        runs = []
        for factor in FACTORS:
            bound_s = round(factor * free["latency_s"], 3)
            for policy in (*OURS, *BASELINES):
                if arguments.only in (None, policy):
                    runs.append(one_run(job, bound_s, policy))
                    print(row(runs[-1]), flush=True)
    text = table(runs, free, arguments.ranks)
    print(text)
    if arguments.out is not None:
        device = next(r.metrics for r in runs if r.metrics)["machine"]["device"]
        path = arguments.out / f"bounds-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def write_job(folder: Path, workload: Path | None, ranks: int) -> Path:
    """job.yaml and its requests."""
    if workload is not None:
        rows = [json.loads(line) for line in workload.open(encoding="utf-8")]
        pairs = [(row["input_ids"], row["output_len"]) for row in rows]
    else:
        rng = np.random.default_rng(20261121)
        inputs = draw(rng, 128, 81, 256)
        pairs = [(rng.integers(100, 30_000, size=n).tolist(), m)
                 for n, m in zip(inputs, draw(rng, 64, 30, 160), strict=True)]
    outputs = np.array([m for _, m in pairs])
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"id": f"r{i:03d}", "tokens": tokens, "forced_tokens": int(m)}) + "\n"
        for i, (tokens, m) in enumerate(pairs)))
    job = {"name": "bounds", "model": MODEL, "cluster": "local",
           "workload": {"requests": "requests.jsonl", "input_tokens": "from_requests",
                        "output_tokens": {"mean": float(outputs.mean()),
                                          "std": float(outputs.std()), "max": int(outputs.max())}},
           "constraint": {"latency_s": "inf", "kind": "queries", "quantile": 0.99},
           "run": {"ranks": ranks, "dtype": "bfloat16"}, "output": str(folder / "out")}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def schedule(job: Path, bound_s: float, policy: str) -> dict[str, Any] | None:
    """None where no schedule keeps the bound."""
    done = xgpt("schedule", job, bound_s, policy)
    return None if done.returncode == 3 else json.loads(checked(done).stdout)


def one_run(job: Path, bound_s: float, policy: str) -> Run:
    done = xgpt("submit", job, bound_s, policy)
    if done.returncode in (2, 3):  # none keeps the bound
        return Run(bound_s, policy, "", {})
    metrics = json.loads(checked(done).stdout)
    found = json.loads((job.parent / "out" / "schedule.json").read_text())
    return Run(bound_s, policy, controls(found), metrics)


def xgpt(command: str, job: Path, bound_s: float, policy: str) -> subprocess.CompletedProcess[str]:
    bound = "inf" if math.isinf(bound_s) else str(bound_s)
    return subprocess.run(
        [*_XGPT, command, str(job), "--json", "--set", f"constraint.latency_s={bound}", "--set",
         f"schedule.policy={policy}"], capture_output=True, text=True, check=False)


def checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done


def controls(found: dict[str, Any]) -> str:
    names = ("encode_batch", "decode_iterations", "decode_micro_batches", "encode_micro_batches",
             "max_active", "token_budget")
    words = [f"{name} {found[name]}" for name in names if found.get(name)]
    if found.get("tp_degree", 1) > 1:
        words.append(f"tp {found['tp_degree']} on {found['tp_gpus']}")
    return ", ".join(words)


def row(run: Run) -> str:
    if not run.controls:
        return f"| {run.bound_s:.2f} | {run.policy} | none keeps the bound | | | | | |"
    qps, p99 = run.metrics["throughput_qps"], run.metrics["latency_p99_s"]
    verdict = "yes" if p99["measured"] <= run.bound_s else "NO"
    others = run.metrics.get("others_cpu_share") or 0.0
    return (f"| {run.bound_s:.2f} | {run.policy} | {run.controls} | {qps['predicted']:.2f} | "
            f"{qps['measured']:.2f} | {p99['predicted']:.2f} | {p99['measured']:.2f} {verdict} | "
            f"{others:.0%} |")


def table(runs: list[Run], free: dict[str, Any], ranks: int) -> str:
    machine = next(r.metrics for r in runs if r.metrics)["machine"]
    lines = [
        f"# Three latency bounds, {MODEL}, {machine['device']}, {ranks} ranks, bfloat16", "",
        f"{time.strftime('%Y-%m-%d')}. Without a bound: {controls(free)}, "
        f"{free['throughput_qps']:.2f} queries/s in steady state, {free['latency_s']:.2f} s. "
        "Latencies are those of 99 % of all queries.", "",
        "| bound (s) | policy | configuration | predicted queries/s | measured | predicted P99 |"
        " measured, kept? | others |", "|---|---|---|---|---|---|---|---|"]
    lines += [row(run) for run in runs]
    for bound_s in dict.fromkeys(run.bound_s for run in runs):
        lines += ["", _verdict(bound_s, [r for r in runs if r.bound_s == bound_s])]
    return "\n".join(lines)


def _verdict(bound_s: float, runs: list[Run]) -> str:
    kept = [r for r in runs if r.controls
            and r.metrics["latency_p99_s"]["measured"] <= bound_s]
    best = {names: max((r for r in kept if r.policy in names), default=None,
                       key=lambda r: r.metrics["throughput_qps"]["measured"])
            for names in (OURS, BASELINES)}
    ours, other = best[OURS], best[BASELINES]
    if ours is None or other is None:
        return (f"Bound {bound_s:.2f} s: kept by "
                f"{', '.join(r.policy for r in kept) or 'none'} only.")
    ratio = (ours.metrics["throughput_qps"]["measured"]
             / other.metrics["throughput_qps"]["measured"])
    return (f"Bound {bound_s:.2f} s: {ours.policy} at {ratio:.2f} times the throughput of the best "
            f"baseline that kept it ({other.policy}).")


if __name__ == "__main__":
    main()
