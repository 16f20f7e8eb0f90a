"""vLLM as the engine: does what its own profile predicts come true, and does a bound hold that its
own scheduler does not know?

    python benchmarks/engine_accuracy.py FOLDER --python VLLM_PYTHON --model MODEL_FOLDER
        [--workload FILE] [--queries 200] [--threads 2] [--shares 0.7,0.55,0.4] [--most N]
        [--out benchmarks/results]

The queries of benchmarks/peers.py, in bfloat16. For RRA, Sarathi and vLLM's rule the search takes a
schedule without a bound, then one within each share of the latency that was predicted of RRA
without: up to twelve runs by `xgpt submit` (a rule that keeps a bound by no schedule has none),
each predicted from one profile of vLLM's steps, which the first one measures. Wanted of the
medians, of eight runs at least: throughput within 8 %, 99th-percentile latency within 10 %.

Then vLLM by itself (benchmarks/peers/run_vllm_bounds.py, its default scheduler): once with default
settings, and once for each bound with the settings that the search gives it (max_num_seqs and
max_num_batched_tokens of the Sarathi schedule: its scheduler encodes in chunks beside decoding).
Latencies are from the start of a query's encoding to its last token, on both sides.

FOLDER keeps what was run, and the same command goes on; `--most` ends it after so many runs of
each kind. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from several_runs import DISTURBED, Run, SeveralRuns, is_quiet
from workload import Query, read_or_draw, write_job, write_workload

POLICIES = ("rra", "sarathi", "vllm")
WORST = {"throughput_qps": 0.08, "latency_p99_s": 0.10}
DRIVER = Path(__file__).parent / "peers" / "run_vllm_bounds.py"


class Setting(NamedTuple):
    """What all runs of a round have in common."""

    several: SeveralRuns
    folder: Path
    queries: Sequence[Query]
    python: str
    model: Path
    threads: int
    shares: Sequence[float]  # of RRA's predicted latency without a bound, which are the bounds


class Found(NamedTuple):
    """The runs under one bound, by policy, and vLLM's own figures; infinite: without a bound."""

    bound_s: float
    runs: dict[str, Run]
    own: dict[str, Any] | None  # with the settings that the search gives it


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--model", type=Path, required=True, help="folder, bfloat16")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shares", default="0.7,0.55,0.4")
    parser.add_argument("--most", type=int, help="runs of each kind, after which it ends")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(SeveralRuns(given.folder.resolve()), given.folder.resolve(),
                      read_or_draw(given.workload)[:given.queries], given.python,
                      given.model.resolve(), given.threads,
                      [float(share) for share in given.shares.split(",")])
    text = page(*measured(setting, given.most))
    print(text)
    if given.out is not None:
        path = given.out / f"engine-vllm-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def measured(setting: Setting, most: int | None) -> tuple[dict[str, Any], list[Found]]:
    """(vLLM with default settings, what was found under each bound)"""
    free = submitted(setting, None, 1e9, most)
    if "rra" not in free:
        sys.exit("no run of RRA without a bound yet")
    predicted_s = free["rra"].metrics["latency_p99_s"]["predicted"]
    found, default = [], by_itself(setting, "default")
    for share in (None, *setting.shares):
        bound_s = float("inf") if share is None else share * predicted_s
        runs = free if share is None else submitted(setting, share, bound_s, most)
        own = None
        if "sarathi" in runs:
            variables = runs["sarathi"].schedule.estimate.variables
            own = by_itself(setting, f"set-{share}", **{
                "max-num-seqs": variables["max_active"],
                "max-num-batched-tokens": variables["token_budget"]})
        found.append(Found(bound_s, runs, own))
    return default, found


def submitted(setting: Setting, share: float | None, bound_s: float,
              most: int | None) -> dict[str, Run]:
    """The runs of every policy whose schedules keep the bound."""
    names = {policy: f"{policy}-{'free' if share is None else share}" for policy in POLICIES}
    setting.several.submit(((name, 1, job_of(setting, policy, bound_s if share else None))
                            for policy, name in names.items()), most=most)
    return {policy: runs[0] for policy, name in names.items()
            if (runs := setting.several.runs(name))}


def job_of(setting: Setting, policy: str, bound_s: float | None) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load(write_job(
        setting.folder, setting.queries, str(setting.model),
        {"engine": "vllm", "engine_python": setting.python, "dtype": "bfloat16", "ranks": 1,
         "threads_per_rank": setting.threads}).read_text(encoding="utf-8"))
    job["workload"]["requests"] = str(setting.folder / "requests.jsonl")
    if bound_s is not None:
        job["constraint"] = {"latency_s": bound_s, "kind": "sequence", "quantile": 0.99}
    return {**job, "schedule": {"policy": policy}}


def by_itself(setting: Setting, name: str, **settings: Any) -> dict[str, Any]:
    """What vLLM's own scheduler does with the queries; kept in the folder."""
    kept = setting.folder / f"own-{name}.json"
    if not kept.is_file():
        workload = setting.folder / "workload.jsonl"
        write_workload(setting.queries, workload)
        done = subprocess.run(
            [setting.python, str(DRIVER), "--model", str(setting.model), "--workload",
             str(workload), "--threads", str(setting.threads),
             *(word for key, value in settings.items() for word in (f"--{key}", str(value)))],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"vLLM by itself: exit code {done.returncode}\n{done.stderr[-2000:]}")
        kept.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    figures: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    assert figures["is_exact"], f"{kept}: not the tokens that were asked for"
    return figures


def page(default: dict[str, Any], found: Sequence[Found]) -> str:
    runs = [run for one in found for run in one.runs.values()]
    machine = runs[0].metrics["machine"]["device"]
    lines = [f"# vLLM {default['version']} under schedules of xgpt, {machine}", "",
             f"{len(runs)} runs; {sum(map(is_quiet, runs))} of them with others below "
             f"{DISTURBED:.0%} of the cores.", "", "## Predicted and measured", "",
             "| bound | schedule | queries/s predicted | measured | off | P99 predicted, s "
             "| measured | off | others |", "|---|---|---|---|---|---|---|---|---|"]
    for one in found:
        lines += [row(one.bound_s, run) for run in one.runs.values()]
    for key, worst in WORST.items():
        middle = statistics.median(abs(off(run, key)) for run in runs)
        lines.append(f"\nMedian error of {key}: {middle:.1%} (wanted: {worst:.0%} at most).")
    lines += ["", "## Three bounds side by side", "",
              "| bound, s | executed as | queries/s | P99, s | kept |", "|---|---|---|---|---|"]
    for one in found:
        lines.append(side("vLLM, default settings", one.bound_s, default))
        if one.own is not None:
            lines.append(side(f"vLLM, max_num_seqs {one.own['max_num_seqs']}, "
                              f"max_num_batched_tokens {one.own['max_num_batched_tokens']}",
                              one.bound_s, one.own))
        lines += [side(f"our rule: {run.words}", one.bound_s, {
            key: run.metrics[key]["measured"] for key in WORST})
            for run in one.runs.values()]
    return "\n".join(lines)


def off(run: Run, key: str) -> float:
    figures = run.metrics[key]
    return float(figures["measured"] / figures["predicted"]) - 1


def row(bound_s: float, run: Run) -> str:
    cells = [f"{bound_s:.1f} s" if bound_s < 1e6 else "none", run.words]
    for key in WORST:
        figures = run.metrics[key]
        cells += [f"{figures['predicted']:.2f}", f"{figures['measured']:.2f}",
                  f"{off(run, key):+.1%}"]
    cells.append(f"{run.metrics.get('others_cpu_share') or 0.0:.0%}")
    return f"| {' | '.join(cells)} |"


def side(words: str, bound_s: float, figures: dict[str, Any]) -> str:
    is_bound, p99_s = bound_s < 1e6, figures["latency_p99_s"]
    kept = "-" if not is_bound else "yes" if p99_s <= bound_s else "no"
    return (f"| {f'{bound_s:.1f}' if is_bound else 'none'} | {words} | "
            f"{figures['throughput_qps']:.2f} | {p99_s:.2f} | {kept} |")


if __name__ == "__main__":
    main()
