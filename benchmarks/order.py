"""Makespans of jobs by the order of their requests: by replay, and of real runs on CPU ranks.

    python benchmarks/order.py [--data FOLDER] [--measured FOLDER] [--out benchmarks/results]

OPT-13B on four A40, no latency limit, outputs known. Makespans are medians of seven seeds. Static
batches have 334 requests, so that six are equal. `--data`: a folder with
sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv in it. `--measured`: a folder for real runs
of SmolLM2-135M with random weights on this machine, three in each order, by turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from paper_scenarios import Scenario
from runner import about, machine, options, table, today, write

from xgpt.core import catalog
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import IntArray, joint_empirical
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xscheduler.evaluator import predict
from xscheduler.ordering import in_chosen_order
from xscheduler.planner import PlanOptions, plan

SEEDS = 7
ORDERS = (("input", 0), ("longest-output", 1024), ("longest-output", 0))
JOBS = {"static batches, 2,000 requests": ("ft", 2000, {"encode_batch": 334}),
        "RRA, 300 requests": ("rra", 300, {}), "RRA, 2,000 requests": ("rra", 2000, {})}
# pairs of tasks, shuffled: (prefixes, requests of each; mean tokens of prefix, own input, output)
MIXED = {"few-shot classes, and 8 samples": ((400, 25, 1000, 40, 8), (1250, 8, 300, 2, 250)),
         "documents, and chat": ((500, 20, 1500, 30, 30), (100, 100, 200, 100, 400))}
FILE = "sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
TASK = Scenario(model="opt-13b", cluster="a40-4", task="T")


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    found = predict(in_chosen_order(problem, schedule), TASK.timing(), schedule.estimate)
    assert found is not None
    return found.wall_s


def ratios() -> Iterator[tuple[str, list[float]]]:
    """(job, median makespan in each of ORDERS) of each of JOBS."""
    for name, (policy, count, own) in JOBS.items():
        problem = replace(TASK.problem(), fixed=FixedSchedule(
            policies=(policy,), replicas=1, **own))
        schedule = plan(problem, TASK.timing(), PlanOptions(horizon="steady", has_margin=False))
        yield name, [statistics.median(
            makespan_s(replace(problem, num_queries=count, is_synthetic=True, seed=seed),
                       schedule.changed(order=order, window=window))
            for seed in range(SEEDS)) for order, window in ORDERS]


def known(pairs: IntArray, policies: Sequence[str] = ()) -> Problem:
    """A job of requests of these (input, output) tokens, [requests, 2]."""
    inputs, outputs = pairs.T
    return replace(
        TASK.problem(), lengths=joint_empirical(pairs), num_queries=len(pairs),
        default_max_tokens=int(outputs.max()), adjustment=Adjustment(),
        fixed=FixedSchedule(policies=tuple(policies), replicas=1),
        queries=QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs))


def two_tasks(count: int = 1000) -> IntArray:
    """`count` requests of task S, then as many of task G."""
    rng = np.random.default_rng(0)
    return np.concatenate([np.stack(catalog.task(name).sample(count, rng), axis=1)
                           for name in ("S", "G")])


def sharegpt(folder: Path, count: int = 2000) -> IntArray:
    """The first `count` requests of the file that OPT's positions hold."""
    rows = np.loadtxt(folder / FILE, np.int64, delimiter=",", skiprows=1, usecols=(0, 1))
    return rows[rows.sum(axis=1) <= 2048][:count]


def mixed(tasks: Sequence[tuple[int, ...]], policy: str) -> Problem:
    """A job of these tasks at random; sizes lie within a half of their means."""
    ends, nodes, pairs = list[int](), list[int](), list[tuple[int, int]]()
    rng = np.random.default_rng(0)
    for count, each, *means in tasks:
        for _ in range(count):
            ends.append(int(rng.integers(means[0] // 2, 3 * means[0] // 2)))
            own = rng.integers([mean - mean // 2 for mean in means[1:]],
                               [mean + mean // 2 + 1 for mean in means[1:]], (each, 2))
            nodes += [len(ends) - 1] * each
            pairs += [(ends[-1] + inputs, outputs) for inputs, outputs in own.tolist()]
    rows = rng.permutation(len(nodes))
    problem = known(np.array(pairs)[rows], (policy,))
    assert problem.queries is not None
    return replace(problem, queries=replace(problem.queries, prefixes=Prefixes(
        parents=np.full(len(ends), -1), ends=np.array(ends), nodes=np.array(nodes)[rows],
        block_tokens=16)))


def chosen(problem: Problem) -> tuple[Schedule, float, float]:
    """The plan, and its makespan in the input's order and in its own."""
    schedule = plan(problem, TASK.timing(), PlanOptions(has_margin=False))
    return schedule, makespan_s(problem, schedule.changed(order="input", window=0)), makespan_s(
        problem, schedule)


def measured(folder: Path, runs: int = 3) -> dict[str, tuple[float, float]]:
    """order -> (median seconds measured, predicted) of a job of 120 requests."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = np.random.default_rng(0).lognormal(3.2, 0.9, 120).astype(int).clip(4, 300)
    (folder / "requests.jsonl").write_text("".join(json.dumps(
        {"tokens": [7] * 24, "forced_tokens": int(tokens)}) + "\n" for tokens in outputs))
    (folder / "job.yaml").write_text(
        "model: smollm2-135m\ncluster: local\nworkload: {requests: requests.jsonl}\n"
        "schedule: {policy: rra, encode_batch: 8, decode_iterations: 8, encode_chunk: 0}\n"
        "run: {weights: random, ranks: 1, threads_per_rank: 2, reschedule: off}\noutput: out\n")
    found: dict[str, list[tuple[float, float]]] = {"input": [], "auto": []}
    for run in range(runs):
        for order, walls in found.items():
            subprocess.run(
                [sys.executable, "-m", "xgpt", "submit", str(folder / "job.yaml"), "--set",
                 f"schedule.order={order}", "--set", f"output=out-{order}-{run}"], check=True,
                capture_output=True)
            own = json.loads((folder / f"out-{order}-{run}" / "metrics.json").read_text())["wall_s"]
            walls.append((own["measured"], own["predicted"]))
    return {order: (statistics.median(own[0] for own in walls),
                    statistics.median(own[1] for own in walls)) for order, walls in found.items()}


def _window(schedule: Schedule) -> str:
    return "-" if schedule.order == "input" else f"{schedule.window or 'job'}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--measured", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    lines = ["# The order of requests", "", about(__doc__), "", f"{today()}, {machine()}.", "",
             *table(("job", "input", "longest outputs first, in 1,024", "in the whole job",
                     "ratio"))]
    for name, walls in ratios():
        lines.append(f"| {name} | {' | '.join(f'{wall:.1f} s' for wall in walls)} | "
                     f"{walls[-1] / walls[0]:.3f} |")
    lines += ["", *table(("job, `order: auto`", "policy", "order", "window", "input", "chosen"))]
    jobs = {"1,000 of task S, then 1,000 of G": two_tasks()}
    if given.data is not None:
        jobs["ShareGPT, 2,000 requests"] = sharegpt(given.data)
    for name, pairs in jobs.items():
        for policies in ((), ("rra",), ("ft",)):
            schedule, before_s, after_s = chosen(known(pairs, policies))
            lines.append(f"| {name} | {schedule.estimate.policy} | {schedule.order} | "
                         f"{_window(schedule)} | {before_s:.1f} s | {after_s:.1f} s |")
    lines += ["", *table(("two tasks with shared prefixes", "policy", "input", "prefix", "blend"))]
    for name, tasks in MIXED.items():
        for policy in ("sarathi", "rra"):
            problem = mixed(tasks, policy)
            schedule = plan(replace(problem, adjustment=Adjustment(order="prefix", window=0)),
                            TASK.timing(), PlanOptions(has_margin=False))
            walls = [makespan_s(problem, schedule.changed(order=order, window=0))
                     for order in ("input", "prefix", "blend")]
            lines.append(f"| {name} | {policy} | {' | '.join(f'{one:,.0f} s' for one in walls)} |")
    if given.measured is not None:
        lines += ["", *table(("real runs", "measured", "predicted"))]
        lines += [f"| {order} | {own_s:.1f} s | {predicted_s:.1f} s |"
                  for order, (own_s, predicted_s) in measured(given.measured).items()]
    write("order", "\n".join(lines), given.out)


if __name__ == "__main__":
    main()
