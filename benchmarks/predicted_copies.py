"""Predicted against measured: two copies of one rank and of two, RRA in chunks of three sizes, and
what `policy: auto` chooses.

    python benchmarks/predicted_copies.py FOLDER [--round 3 --ranks 2 --turns 5]
        [--out benchmarks/results]

A round measures a profile of its own and then runs each schedule of so many ranks by `xgpt submit`,
in turns; what it measured stays in FOLDER, and a round that was cut off goes on. `--out` writes the
page of all rounds so far. What counts is the makespan, measured /
predicted, at the median of a schedule's runs. Four ranks on two cores share them: docs/design.md,
"The profile". The machine must be otherwise idle during a round, for some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from several_runs import DISTURBED, Run, SeveralRuns, is_quiet, range_words

WORST = 0.15  # by which the makespan may be off, at the median
QUERIES = 32
JOB = {"model": "smollm2-135m", "cluster": "local",
       "workload": {"requests": {"count": QUERIES},
                    "input_tokens": {"mean": 64, "std": 30, "max": 140},
                    "output_tokens": {"mean": 32, "std": 14, "max": 80}},
       "constraint": {"latency_s": "inf"}}


class Case(NamedTuple):
    name: str
    ranks: int
    schedule: dict[str, Any]
    wants: str = "rra"  # the policy that the search must choose

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "-")


def _rra(**more: int) -> dict[str, Any]:
    return {"policy": "rra", "tp_degree": 1, "encode_batch": 6, "decode_iterations": 16, **more}


CASES = (
    Case("two copies of one rank", 2, _rra(replicas=2, encode_chunk=0)),
    *(Case(f"chunks of {chunk}", 2, _rra(replicas=1, encode_chunk=chunk))
      for chunk in (16, 64, 256)),
    Case("auto", 2, {"policy": "auto"}, wants="sarathi"),
    Case("two copies of two ranks", 4, _rra(replicas=2, encode_chunk=0)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--round", type=int)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--most", type=int, help="runs, after which the round waits for another")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.round is not None:
        one_round(arguments.folder / f"round-{arguments.round:02d}", arguments.turns,
                  arguments.ranks, arguments.most)
    every = [(case, runs_of(case, arguments.folder)) for case in CASES]
    found = [(case, own) for case, runs in every if (own := [*filter(is_quiet, runs)])]
    if not found:
        sys.exit("no run on a quiet machine yet")
    text = page(found, rounds=len({*arguments.folder.glob("round-*")}),
                disturbed=[run for _, runs in every for run in runs if not is_quiet(run)])
    print(text)
    if arguments.out is not None:
        device = found[0][1][0].metrics["machine"]["device"]
        path = arguments.out / f"predicted-copies-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def one_round(folder: Path, turns: int, ranks: int, most: int | None) -> None:
    SeveralRuns(folder).submit((
        (case.folder, turn, {**JOB, "schedule": case.schedule, "run": {
            "ranks": ranks, "dtype": "bfloat16", "weights": "random"}})
        for turn in range(1, turns + 1) for case in CASES if case.ranks == ranks), most=most)


def runs_of(case: Case, folder: Path) -> list[Run]:
    """Those of every round so far, the first round first."""
    found = [run for place in sorted(folder.glob("round-*")) for run in SeveralRuns(place).runs(
        case.folder)]
    for run in found:
        if run.schedule.estimate.policy != case.wants:
            sys.exit(f"{case.name}: {run.words} was chosen, not {case.wants}")
    return found


def ratio(run: Run) -> float:
    return float(run.metrics["wall_s"]["measured"] / run.metrics["wall_s"]["predicted"])


def page(found: list[tuple[Case, list[Run]]], rounds: int, disturbed: list[Run]) -> str:
    """The table, and whether each schedule's median is within what is wanted."""
    first = found[0][1][0].metrics
    lines = [
        "# Copies, chunks and auto: predicted against measured, "
        f"{first['machine']['device']}, {first['dtype']}", "",
        f"{JOB['model']} ({first['model_source']}), {QUERIES} queries, inputs of 64 and outputs of "
        f"32 tokens in the mean; {first['date'][:10]}. {rounds} rounds, each with a profile that "
        "was measured at its start. Ratios are of the makespan, measured / predicted, one figure a "
        "run; seconds and parts are medians.", "",
        "| schedule | ranks | what it is | predicted s | measured s | ratio of each run | median |"
        " lengths | step times | rest | others |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    lines += [row(case, runs) for case, runs in found]
    off = [abs(statistics.median(map(ratio, runs)) - 1) for _, runs in found]
    return "\n".join([*lines, "", (
        f"At the median of its runs {sum(one <= WORST for one in off)} of {len(off)} schedules are "
        f"within {WORST:.0%}; the worst is off by {max(off):.0%}."), "", (
        f"Left out: {len(disturbed)} runs in which other programs used more than {DISTURBED:.0%} "
        "of the cores" + (f" (ratios {min(map(ratio, disturbed)):.2f} to "
                          f"{max(map(ratio, disturbed)):.2f})." if disturbed else "."))])


def row(case: Case, runs: list[Run]) -> str:
    parts = [statistics.median(run.metrics["attribution"][to] / run.metrics["attribution"][origin]
                               for run in runs)
             for to, origin in (("with_lengths_s", "predicted_s"),
                                ("with_times_s", "with_lengths_s"),
                                ("measured_s", "with_times_s"))]
    others = max(run.metrics.get("others_cpu_share") or 0.0 for run in runs)
    measured, predicted = (statistics.median(run.metrics["wall_s"][key] for run in runs)
                           for key in ("measured", "predicted"))
    return (f"| {case.name} | {case.ranks} | {range_words(run.words for run in runs)} | "
            f"{predicted:.2f} | {measured:.2f} | "
            f"{' '.join(f'{ratio(run):.2f}' for run in runs)} | "
            f"{statistics.median(map(ratio, runs)):.2f} | "
            + " | ".join(f"{part - 1:+.0%}" for part in parts) + f" | {others:.0%} |")


if __name__ == "__main__":
    main()
