"""Predicted against measured: the quickstart job, several runs, beside the physical floor.

    python benchmarks/quickstart_accuracy.py [--runs 3] [--out benchmarks/results]

The machine must be otherwise idle: with as many ranks as cores, any other process takes a core
from one of them, and all of them wait for it. The script prints the share of the cores that
others used during each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from xgpt.core import catalog
from xgpt.core.local import detect
from xgpt.launch.contention import Contention

JOB = Path(__file__).resolve().parent.parent / "jobs" / "quickstart.yaml"
KEYS = ("throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "wall_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [one_run(Path(folder)) for _ in range(arguments.runs)]
        schedule = json.loads((Path(folder) / "schedule.json").read_text())
        results = [json.loads(line) for line in (Path(folder) / "results.jsonl").open()]
    text = table(runs, schedule, results)
    print(text)
    if arguments.out is not None:
        device = runs[0]["machine"]["device"]
        path = arguments.out / f"quickstart-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def one_run(output: Path) -> dict[str, Any]:
    """metrics.json of one submit, with the CPU share that other processes used meanwhile."""
    contention = Contention()
    xgpt = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
    done = subprocess.run([*xgpt, "submit", str(JOB), "--json", "--set", f"output={output}"],
                          capture_output=True, text=True, check=True)
    metrics: dict[str, Any] = json.loads(done.stdout)
    metrics["others_share"] = contention.others_share() or 0.0
    return metrics


def table(runs: list[dict[str, Any]], schedule: dict[str, Any],
          results: list[dict[str, Any]]) -> str:
    first = runs[0]
    lines = [
        f"# Quickstart, {first['machine']['device']}, {first['ranks']} ranks x "
        f"{first['machine']['threads_per_rank']} threads, {first['dtype']}", "",
        f"{first['queries']} queries, RRA encode_batch {schedule['encode_batch']}, "
        f"decode_iterations {schedule['decode_iterations']}; torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, {first['date'][:10]}", "",
        "| | predicted (median) | measured (median) | measured / predicted: each run | median |",
        "|---|---|---|---|---|"]
    for key in KEYS:
        predicted = statistics.median(r[key]["predicted"] for r in runs)
        measured = statistics.median(r[key]["measured"] for r in runs)
        ratios = [r[key]["measured"] / r[key]["predicted"] for r in runs]
        lines.append(f"| {key} | {predicted:.4g} | {measured:.4g} | "
                     f"{', '.join(f'{x:.3f}' for x in ratios)} | {statistics.median(ratios):.3f} |")
    shares = ", ".join(f"{r['others_share']:.0%}" for r in runs)
    wall_s = statistics.median(r["wall_s"]["measured"] for r in runs)
    compute_s, weights_s, rates = floor(first, schedule, results)
    lines += ["", f"Other processes used {shares} of the cores during the runs (start-up and "
              "report included).",
              f"Floor: {compute_s:.2f} s of matrix work at the {rates[0] / 1e9:.0f} GFLOP/s a "
              f"large matrix product reaches here on all ranks together, {weights_s:.2f} s to read "
              f"the weights once per decode step at {rates[1] / 1e9:.1f} GB/s; the run took "
              f"{wall_s:.2f} s."]
    return "\n".join(lines)


def floor(metrics: dict[str, Any], schedule: dict[str, Any], results: list[dict[str, Any]]
          ) -> tuple[float, float, tuple[float, float]]:
    """(seconds of FLOPs, seconds of weight reads, the measured rates): no schedule is quicker.

    FLOPs: 2 per parameter and token. Reads: the longest output needs that many decode steps, and
    each reads every weight at least once, whatever the batch.
    """
    model, dtype = catalog.model("smollm2-135m"), getattr(torch, metrics["dtype"])
    tokens = sum(r["input_tokens"] + r["output_tokens"] - 1 for r in results)
    layers = model.num_layers * model.decoder_layer_params
    head = model.head_params * sum(r["output_tokens"] for r in results)
    rates = machine_rates(dtype, detect(metrics["ranks"]).num_devices)
    steps = max(r["output_tokens"] for r in results)
    read_bytes = steps * (layers + model.head_params) * dtype.itemsize
    return 2 * (layers * tokens + head) / rates[0], read_bytes / rates[1], rates


def machine_rates(dtype: torch.dtype, ranks: int) -> tuple[float, float]:
    """(FLOP/s of a 2048 matrix product, bytes/s of reading 256 MB) with `ranks` threads."""
    torch.set_num_threads(ranks)
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    data = torch.ones(64 * 2**20)
    return (2 * 2048**3 / fastest_s(lambda: a @ b), data.numel() * 4 / fastest_s(data.sum))


def fastest_s(work: Any) -> float:
    times = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
