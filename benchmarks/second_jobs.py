"""The second job of a model on a machine: does it measure nothing, and does its prediction come
true?

    python benchmarks/second_jobs.py FOLDER [--jobs 5] [--most 4] [--out benchmarks/results]

One job measures a quick profile and is run; then so many others of each of three length
distributions, in turns, each by `xgpt submit` with other queries and whatever schedule the search
takes. Wanted of them: nothing is measured, and throughput and 99th-percentile latency are off by
8 % and 10 % at most, in the median. FOLDER keeps what was run, and the same command goes on;
`--most` ends it after so many runs, for a machine that is quiet for a minute at a time. The machine
must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from several_runs import DISTURBED, Run, SeveralRuns, is_quiet, range_words

MODEL, QUERIES = "smollm2-135m", 40
WORST = {"throughput_qps": 0.08, "latency_p99_s": 0.10}


class Lengths(NamedTuple):
    """A length distribution; the words name it."""

    words: str
    inputs: dict[str, int]
    outputs: dict[str, int]


FIRST = Lengths("first", {"mean": 64, "std": 30, "max": 140}, {"mean": 32, "std": 14, "max": 80})
OTHERS = (
    Lengths("short answers", {"mean": 120, "std": 50, "max": 240},
            {"mean": 12, "std": 5, "max": 30}),
    Lengths("long answers", {"mean": 24, "std": 10, "max": 60},
            {"mean": 56, "std": 20, "max": 120}),
    Lengths("even", {"mean": 64, "std": 30, "max": 140}, {"mean": 32, "std": 14, "max": 80}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, help="runs, after which it ends")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    several = SeveralRuns(arguments.folder)
    # by itself: jobs of one command are planned before the first of them has run
    several.submit([(FIRST.words, 1, job_of(FIRST, 0, arguments.ranks))])
    several.submit(((name_of(lengths), turn, job_of(lengths, turn, arguments.ranks))
                    for turn in range(1, arguments.jobs + 1) for lengths in OTHERS),
                   most=arguments.most)
    first = several.runs(FIRST.words)
    found = [(lengths, runs) for lengths in OTHERS if (runs := several.runs(name_of(lengths)))]
    if not found:
        sys.exit("no second job yet")
    text = page(first[0], found)
    print(text)
    if arguments.out is not None:
        device = first[0].metrics["machine"]["device"]
        path = arguments.out / f"second-jobs-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def name_of(lengths: Lengths) -> str:
    return lengths.words.replace(" ", "-")


def job_of(lengths: Lengths, seed: int, ranks: int) -> dict[str, Any]:
    """`seed`: draws its queries."""
    return {"model": MODEL, "cluster": "local", "constraint": {"latency_s": "inf"},
            "workload": {"requests": {"count": QUERIES}, "input_tokens": lengths.inputs,
                         "output_tokens": lengths.outputs},
            "run": {"ranks": ranks, "dtype": "bfloat16", "weights": "random", "seed": seed}}


def spent_s(run: Run) -> float:
    """Seconds of measuring that had gone into the profile it was planned with."""
    profile = json.loads((run.place / "out" / "profile.json").read_text(encoding="utf-8"))
    return float(profile["spent_s"])


def page(first: Run, found: Sequence[tuple[Lengths, list[Run]]]) -> str:
    """The table, and whether the medians are within what is wanted."""
    metrics, before_s = first.metrics, spent_s(first)
    lines = [
        f"# The second job of a model, {metrics['machine']['device']}, {metrics['dtype']}", "",
        f"{MODEL} ({metrics['model_source']}), {QUERIES} queries a job; {metrics['date'][:10]}. "
        f"The first job measured for {before_s:.1f} s and took "
        f"{_ratio(first, 'wall_s'):.2f} of the time predicted. Ratios are measured / predicted, "
        "one figure a job.", "",
        "| lengths, in and out | jobs | what was chosen | more measured | throughput of each | "
        "off, median | P99 of each | off, median | others, most |", "|" + 9 * "---|"]
    lines += [row(lengths, [*filter(is_quiet, runs)], before_s) for lengths, runs in found
              if any(map(is_quiet, runs))]
    quiet = [run for _, runs in found for run in runs if is_quiet(run)]
    loud = sum(len(runs) for _, runs in found) - len(quiet)
    if quiet:
        off = {key: _off(quiet, key) for key in WORST}
        kept = "; ".join(f"{words} off by {off[key]:.0%} (at most {WORST[key]:.0%} wanted)"
                         for key, words in (("throughput_qps", "throughput"),
                                            ("latency_p99_s", "P99")))
        lines += ["", f"All {len(quiet)} together, in the median: {kept}."]
    return "\n".join([*lines, "", f"Left out: {loud} runs in which other programs used more than "
                                  f"{DISTURBED:.0%} of the cores."])


def row(lengths: Lengths, runs: list[Run], before_s: float) -> str:
    more_s = max(spent_s(run) for run in runs) - before_s
    others = max(run.metrics.get("others_cpu_share") or 0.0 for run in runs)
    figures = " | ".join(f"{' '.join(f'{_ratio(run, key):.2f}' for run in runs)} | "
                         f"{_off(runs, key):.0%}" for key in WORST)
    return (f"| {lengths.words}: {lengths.inputs['mean']}, {lengths.outputs['mean']} | {len(runs)} "
            f"| {range_words(run.words for run in runs)} | {more_s:.1f} s | {figures} | "
            f"{others:.0%} |")


def _ratio(run: Run, key: str) -> float:
    return float(run.metrics[key]["measured"] / run.metrics[key]["predicted"])


def _off(runs: Iterable[Run], key: str) -> float:
    return statistics.median(abs(_ratio(run, key) - 1) for run in runs)


if __name__ == "__main__":
    main()
